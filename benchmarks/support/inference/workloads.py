"""Models and prompts of `benchmarks.inference`: random weights and random tokens.

Speed does not depend on what a model has learnt; so all compared programs sample fixed numbers of
tokens and never stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from benchmarks.support.inference.engine_costs import SHAPES

_SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
    num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
    tie_word_embeddings=True, eos_token_id=None, bos_token_id=None,
)  # fmt: skip
"""The shape of SmolLM2-135M."""

Ask = Callable[[list[list[int]], int], list[list[int]]]
"""Prompts and the tokens of each answer; returns the answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests to one model, in turns."""

    config: PreTrainedConfig
    dtype: str
    groups: int
    """Members of a group have the same first prompt."""
    members: int = 1
    turns: int = 1
    prompt_tokens: int
    answer_tokens: int
    added_tokens: int = 0
    """Tokens of the environment between two turns."""

    @property
    def context_tokens(self) -> int:
        """Longest context."""
        turn = self.answer_tokens + self.added_tokens
        return self.prompt_tokens + self.turns * turn

    @property
    def requests(self) -> int:
        """Number of all answers."""
        return self.groups * self.members * self.turns

    @property
    def sampled_tokens(self) -> int:
        """Tokens of all answers."""
        return self.requests * self.answer_tokens

    def run(self, ask: Ask, *, seed: int) -> None:
        """Make all requests, turn by turn; other prompts for each seed."""
        rng = Random(seed)
        first = [self._fresh(rng, self.prompt_tokens) for _ in range(self.groups)]
        histories = [ids for ids in first for _ in range(self.members)]
        for turn in range(self.turns):
            answers = ask(histories, self.answer_tokens)
            assert [len(one) for one in answers] == [self.answer_tokens] * len(histories)
            if turn + 1 < self.turns:
                histories = [
                    [*ids, *answer, *self._fresh(rng, self.added_tokens)]
                    for ids, answer in zip(histories, answers, strict=True)
                ]

    def _fresh(self, rng: Random, tokens: int) -> list[int]:
        return [rng.randrange(self.config.vocab_size) for _ in range(tokens)]

    def save(self, folder: Path) -> Path:
        """Write the model, with random weights; return its directory."""
        torch.manual_seed(0)
        kind = getattr(torch, self.dtype)
        AutoModelForCausalLM.from_config(self.config, dtype=kind).save_pretrained(folder)
        return folder


WORKLOADS = {
    "tiny": Workload(
        config=SHAPES["tiny"], dtype="float32", groups=16, prompt_tokens=512, answer_tokens=64
    ),
    "agent": Workload(
        config=SHAPES["tiny"], dtype="float32", groups=8, members=8, turns=6,
        prompt_tokens=512, answer_tokens=48, added_tokens=48,
    ),
    "smollm2": Workload(
        config=_SMOLLM2, dtype="bfloat16", groups=8, prompt_tokens=256, answer_tokens=64
    ),
}  # fmt: skip


def time_to_first_token(
    ask: Callable[[list[int]], float], *, vocabulary: int, turns: int, seed: int
) -> list[float]:
    """CPU seconds until the first token of each turn but the first: a prompt of 1,024 tokens, then
    32 more each turn."""
    rng = Random(seed)
    history = [rng.randrange(vocabulary) for _ in range(1024)]
    found: list[float] = []
    for _ in range(turns):
        found.append(ask(history))
        history = history + [rng.randrange(vocabulary) for _ in range(32)]
    return found[1:]


def by_model(names: Sequence[str]) -> list[list[str]]:
    """Workloads of one model and type beside each other: one process serves them all."""
    models: dict[tuple[int, str], list[str]] = {}
    for name in names:
        work = WORKLOADS[name]
        models.setdefault((id(work.config), work.dtype), []).append(name)
    return list(models.values())
