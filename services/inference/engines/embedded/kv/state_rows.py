"""The states of running sequences: one row each, without gaps, so that a step reads them without a
copy. A step computes its tokens in the order of the rows.

Shapes: B rows, S bytes of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.inference.engines.embedded.kv.slabs import SlabRow
from services.inference.engines.embedded.recurrent.layers import StateBatch
from services.inference.engines.embedded.recurrent.shape import StateShape


class StateRows:
    """At most `rows` running sequences."""

    def __init__(
        self, shape: StateShape, device: torch.device, *, rows: int, block_tokens: int
    ) -> None:
        """`block_tokens`: the states after the last whole block of each sequence are kept, too; 0:
        they are not."""
        self._now_BS = shape.zeros(rows, device)
        self._kept_BS = shape.zeros(rows if block_tokens else 0, device)
        self._block_tokens = block_tokens
        self._sequences: list[SlabRow] = []
        self._kept_tokens: list[int] = []
        """Tokens before the kept states; 0: none are kept."""
        self._part: tuple[list[int], torch.Tensor] | None = None
        """Rows of the last batch, and their states, if it had not all sequences."""

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def bytes(self) -> int:
        """Memory of all rows."""
        return self._now_BS.nbytes + self._kept_BS.nbytes

    def add(self, sequence: SlabRow, states_1S: torch.Tensor) -> None:
        """Give a sequence a row with the states after its last token."""
        row = len(self._sequences)
        self._sequences.append(sequence)
        self._kept_tokens.append(0)
        self._now_BS[row] = states_1S[0]
        self._keep([row])

    def remove(self, sequence: SlabRow) -> None:
        """Free the row of a sequence; the last row fills the gap."""
        row = self._row(sequence)
        last = self._sequences.pop()
        kept = self._kept_tokens.pop()
        if last is not sequence:
            moved = len(self._sequences)
            self._sequences[row], self._kept_tokens[row] = last, kept
            self._now_BS[row] = self._now_BS[moved]
            if self._block_tokens:
                self._kept_BS[row] = self._kept_BS[moved]

    def batch(self, sequences: Sequence[SlabRow]) -> StateBatch:
        """These sequences, with one token each in this order: all of them, whose states change in
        place, or a part, whose states change with `advance`."""
        self._part = None
        if len(sequences) < len(self._sequences):
            numbers = {id(one): row for row, one in enumerate(self._sequences)}
            rows = [numbers[id(one)] for one in sequences]
            rows_B = torch.tensor(rows, device=self._now_BS.device)
            self._part = rows, self._now_BS[rows_B]
            return StateBatch(rows_BS=self._part[1])
        rows_BS = self._now_BS[: len(self._sequences)]
        places = {id(sequence): place for place, sequence in enumerate(sequences)}
        order = [places[id(sequence)] for sequence in self._sequences]
        if order == list(range(len(order))):
            return StateBatch(rows_BS=rows_BS)
        places_B = torch.tensor(order, device=rows_BS.device)
        return StateBatch(rows_BS=rows_BS, places_B=places_B)

    def advance(self) -> None:
        """End a pass over the last batch. Keep the states of sequences whose last token ended a
        block. Takes no memory: the pass cannot be repeated."""
        if self._part is not None:
            for row, states_S in zip(*self._part, strict=True):
                self._now_BS[row] = states_S
            self._part = None
        self._keep(range(len(self._sequences)))

    def kept(self, sequence: SlabRow) -> dict[int, torch.Tensor]:
        """The states after the last whole block, [1, S], by the number of tokens before them; empty
        if the sequence has ended none."""
        row = self._row(sequence)
        tokens = self._kept_tokens[row]
        return {tokens: self._kept_BS[row : row + 1]} if tokens else {}

    def _keep(self, rows: Sequence[int]) -> None:
        if not self._block_tokens:
            return
        for row in rows:
            sequence = self._sequences[row]
            tokens = sequence.base + sequence.tokens
            if tokens % self._block_tokens == 0 and tokens != self._kept_tokens[row]:
                self._kept_tokens[row] = tokens
                self._kept_BS[row] = self._now_BS[row]

    def _row(self, sequence: SlabRow) -> int:
        return next(row for row, one in enumerate(self._sequences) if one is sequence)
