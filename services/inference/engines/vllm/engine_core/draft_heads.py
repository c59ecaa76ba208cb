"""In vLLM's process: drafts by the draft heads among the published weights.

A drafter of vLLM's kind custom_class, which gets no hidden states: `install` gives it those of the
runner. A draft is a head's likeliest token, and vLLM accepts it with its probability in the sampled
distribution, so drafts change no distribution, and a request's seed alone determines its draws.
Written for vLLM's first model runner. Not here: the check of heads, see `staging`.

Shape suffixes: R rows, C hidden channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from forge.rl.mtp.heads import MtpHead, MtpHeads


class DraftHeads:
    """The drafter of one model."""

    def __init__(self, vllm_config: Any) -> None:
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        self._kind: torch.dtype = vllm_config.model_config.dtype
        self._model: Any = None
        self._heads: list[MtpHead] = []
        self.drafted = 0
        self.accepted = 0

    def load_model(self, model: torch.nn.Module) -> None:
        """Take the model's embedding and head; vLLM calls it after it has built the model."""
        self._model = model
        _OF_MODEL[model] = self

    def serve(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Draft with these heads from the next step on; without tensors, not at all."""
        if not tensors:
            self._heads = []
            return
        device = next(self._model.parameters()).device
        # A copy: the memory of the publication is freed.
        served = {name: one.to(device, self._kind, copy=True) for name, one in tensors.items()}
        states, embeddings = (served[f"mtp.0.{name}_norm.weight"] for name in ("state", "token"))
        heads = MtpHeads.of(served, channels=len(states), embedding_channels=len(embeddings))
        self._heads = [head for head in heads if isinstance(head, MtpHead)][: self._most]

    def propose(self, *_: Any, **__: Any) -> list[list[int]]:
        """Raises RuntimeError: vLLM's own call has no hidden states."""
        raise RuntimeError("the runner does not draft by draft_heads.install")

    def draft(
        self, states_RC: torch.Tensor, sampled: list[list[int]], *, most: int
    ) -> list[list[int]]:
        """Return at most `most` drafts behind the tokens that a step sampled for each row, none for
        a row without any. `states_RC`: those that gave the last of them."""
        self.accepted += sum(len(tokens) - 1 for tokens in sampled if tokens)
        rows = [row for row, tokens in enumerate(sampled) if tokens]
        drafts: list[list[int]] = [[] for _ in sampled]
        heads = self._heads[:most]
        if not rows or not heads:
            return drafts
        states_RC = states_RC[rows]
        ids_R = torch.tensor([sampled[row][-1] for row in rows], device=states_RC.device)
        for head in heads:
            embedded_RC = self._model.embed_input_ids(ids_R).to(self._kind)
            states_RC = head(states_RC.to(self._kind), embedded_RC)
            logits_RV = self._model.compute_logits(head.out_norm(states_RC))
            ids_R = logits_RV.argmax(-1)
            for row, token in zip(rows, ids_R.tolist(), strict=True):
                drafts[row].append(token)
        self.drafted += len(rows) * len(heads)
        return drafts


_OF_MODEL: WeakKeyDictionary[torch.nn.Module, DraftHeads] = WeakKeyDictionary()


def drafter_of(model: torch.nn.Module) -> DraftHeads | None:
    """Return the drafter of a model; None if it drafts by something else."""
    return _OF_MODEL.get(model)


def _last_states(states_RC: torch.Tensor, sampled: list[list[int]], metadata: Any) -> torch.Tensor:
    """Return the state that gave the last token of each request. A request has a row for each draft
    that the step verified, and one more."""
    if metadata is None:
        return states_RC
    places, first = [], 0
    for drafts, tokens in zip(metadata.num_draft_tokens, sampled, strict=True):
        places.append(first + max(0, len(tokens) - 1))
        first += drafts + 1
    return states_RC[places]


def install(runner: Any) -> None:
    """Have a model runner draft by its `DraftHeads`. Raises RuntimeError for another drafter."""
    drafter = runner.drafter
    if not isinstance(drafter, DraftHeads):
        raise RuntimeError(f"vLLM's drafter is {type(drafter).__name__}, expected DraftHeads")

    def propose_draft_token_ids(
        scheduled: Any, sampled: Any, _: Any, __: Any, states_RC: torch.Tensor, *rest: Any
    ) -> list[list[int]]:
        last_RC = _last_states(states_RC, sampled, rest[1])
        return drafter.draft(last_RC, sampled, most=scheduled.num_spec_tokens_to_schedule)

    runner.propose_draft_token_ids = propose_draft_token_ids
