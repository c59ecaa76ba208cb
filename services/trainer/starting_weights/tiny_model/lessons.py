"""Demonstrations for the tiny policy, as token rows.

Owns their rendering and the mask of the teacher's tokens. Pure functions of the seed. The teacher
attempts training tasks alone, never held-out tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from forge.agents.environments.code import CodeDomain
from forge.agents.environments.general import GeneralDomain
from forge.agents.environments.qa import QaDomain
from forge.agents.environments.reasoning import ReasoningDomain
from forge.agents.environments.split import training_payload
from services.trainer.starting_weights.tiny_model.tokenizer import END, START

ATTEMPTS: Final = (
    (ReasoningDomain(), 9),
    (QaDomain(), 2),
    (CodeDomain(), 5),
    (GeneralDomain(), 2),
)
"""Attempts at each domain in a round: harder skills need more examples."""
_BUCKET_ROWS: Final = 2048


@dataclass(frozen=True, slots=True)
class Lesson:
    """One conversation in tokens."""

    ids: list[int]
    taught: list[bool]
    """Whether the token is the teacher's, its end mark included."""


def conversations(
    seed: str, rounds: int, *, flawless: bool
) -> Iterator[tuple[list[Any], list[Any] | None]]:
    """Messages and tools of the teacher's attempts, domains taking turns."""
    for index in range(rounds):
        for domain, attempts in ATTEMPTS:
            for attempt in range(attempts):
                rng = Random(f"{seed}/{domain.name}/{index}/{attempt}")
                payload = training_payload(domain, rng)
                demonstration = domain.demonstrate(payload, rng, flawless=flawless)
                for context in demonstration.contexts:
                    yield list(context), list(demonstration.tools) or None


def texts(
    tokenizer: PreTrainedTokenizerFast, seed: str, rounds: int, *, flawless: bool
) -> list[str]:
    """The conversations, rendered by the tokenizer's chat template."""
    return [
        tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        for messages, tools in conversations(seed, rounds, flawless=flawless)
    ]


def lessons(
    tokenizer: PreTrainedTokenizerFast, seed: str, rounds: int, *, flawless: bool
) -> list[Lesson]:
    """Demonstrations as token rows."""
    rendered = texts(tokenizer, seed, rounds, flawless=flawless)
    encoded = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    opening = tokenizer(f"{START}assistant\n", add_special_tokens=False)["input_ids"]
    end = tokenizer.convert_tokens_to_ids(END)
    return [Lesson(ids, _taught(ids, opening, end)) for ids in encoded]


def batches(rows: Sequence[Lesson], tokens: int, rng: Random) -> list[list[Lesson]]:
    """Batches of about `tokens` tokens, of rows of similar length, in random order."""
    shuffled = rng.sample(rows, len(rows))
    result: list[list[Lesson]] = []
    for start in range(0, len(shuffled), _BUCKET_ROWS):
        batch: list[Lesson] = []
        for row in sorted(shuffled[start : start + _BUCKET_ROWS], key=lambda row: len(row.ids)):
            batch.append(row)
            if len(batch) * len(row.ids) >= tokens:
                result.append(batch)
                batch = []
    rng.shuffle(result)
    return result


def padded(batch: Sequence[Lesson], pad_id: int) -> tuple[Tensor, Tensor]:
    """Ids and the teacher's-token mask, both [rows, longest], padded on the right."""
    longest = max(len(row.ids) for row in batch)
    ids_BT = torch.full((len(batch), longest), pad_id)
    taught_BT = torch.zeros((len(batch), longest), dtype=torch.bool)
    for index, row in enumerate(batch):
        ids_BT[index, : len(row.ids)] = torch.tensor(row.ids)
        taught_BT[index, : len(row.ids)] = torch.tensor(row.taught)
    return ids_BT, taught_BT


def _taught(ids: list[int], opening: list[int], end: int) -> list[bool]:
    taught = [False] * len(ids)
    at = 0
    while at < len(ids):
        if ids[at : at + len(opening)] == opening:
            at += len(opening)
            stop = ids.index(end, at) + 1
            taught[at:stop] = [True] * (stop - at)
            at = stop
        else:
            at += 1
    return taught
