"""The forward pass of a decode step over slabs, and a draw in each of its rows.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from services.inference.engines.embedded.kv.compiled_attention import compiled_attention
from services.inference.engines.embedded.kv.decode_attention import SlabStep
from services.inference.engines.embedded.kv.shared_prefixes import SharedPrefixes
from services.inference.engines.embedded.kv.slabs import Slabs
from services.inference.engines.embedded.kv.state_rows import StateRows
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.sampler import Drawn, draw
from services.inference.engines.embedded.sequences import DecodeSequence
from services.inference.engines.embedded.speculation.drafter import Draft


class DecodePass(Protocol):
    """Computes the last sampled token of each sequence and its drafts, a row each."""

    def run(self, sequences: Sequence[DecodeSequence], drafts: Sequence[Draft]) -> Drawn:
        """Store keys and values of all rows, and draw the token behind each. `sequences`: all that
        run, or consecutive ones in their order. A pass may fail half-way: it can be repeated."""

    def after_swap(self) -> None:
        """Called when other weights are served."""


class SlabPass:
    """The `DecodePass` over slabs and shared prefixes."""

    def __init__(
        self,
        policy: Policy,
        running: Slabs[DecodeSequence],
        prefixes: SharedPrefixes | None,
        states: StateRows | None,
    ) -> None:
        self._states = states
        self._policy = policy
        self._running = running
        self._prefixes = prefixes
        if policy.dtype is torch.bfloat16 and policy.device.type == "cpu":
            compiled_attention()  # Compiled before the first request.

    def run(self, sequences: Sequence[DecodeSequence], drafts: Sequence[Draft]) -> Drawn:
        """See `DecodePass`."""
        prefix_slabs = self._prefixes.slabs.occupied if self._prefixes is not None else []
        part = sequences if len(sequences) < len(self._running) else None
        step = SlabStep(self._running.occupied, prefix_slabs, part=part)
        ids: list[int] = []
        for sequence, draft in zip(sequences, drafts, strict=True):
            ids += (sequence.sampled[-1], *draft.ids)
        ids_N = torch.tensor(ids, device=self._policy.device)
        recurrent = self._states.batch(sequences) if self._states is not None else ()
        logits_NV = self._policy.forward(ids_N, step.positions_N, step, recurrent=recurrent)
        return draw_rows(logits_NV, sequences, drafts)

    def after_swap(self) -> None:
        """See `DecodePass`."""


def draw_rows(
    logits_NV: torch.Tensor, sequences: Sequence[DecodeSequence], drafts: Sequence[Draft]
) -> Drawn:
    """Draw the token behind each row; see `draw`."""
    rows = [
        (sequence, draft, index)
        for sequence, draft in zip(sequences, drafts, strict=True)
        for index in range(1 + len(draft.ids))
    ]
    return draw(
        logits_NV,
        [sequence.prompt for sequence, _, _ in rows],
        positions=[sequence.position + index for sequence, _, index in rows],
        matchers=[draft.matcher_after(index, sequence) for sequence, draft, index in rows],
        answers=[sequence.answer_with(draft.ids[:index]) for sequence, draft, index in rows],
    )
