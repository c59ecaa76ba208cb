"""The states of a prompt's recurrent layers during its computation.

States exist after the last computed token alone. They are kept in the middle of a prompt at a few
stops: at the last block of the prompt, where the next turn and the other members of a group
continue, and where another prompt parts from this one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from services.inference.engines.embedded.recurrent.packed import Piece
from services.inference.engines.embedded.recurrent.shape import StateShape

MOST_STOPS = 3


class ReadStates:
    """States of one prompt, uint8 [1, S] each."""

    def __init__(self, shape: StateShape, device: torch.device) -> None:
        self.now = shape.zeros(1, device)
        """After the last computed token."""
        self.kept: dict[int, torch.Tensor] = {}
        """By the number of tokens before them."""
        self._stops: set[int] = set()
        self._before: torch.Tensor | None = None
        """Those before the pass that runs."""

    def stop(self, tokens: int) -> None:
        """Keep the states after so many tokens, which are still to be computed."""
        if len(self._stops) < MOST_STOPS:
            self._stops.add(tokens)

    def share(self, tokens: int, *, done: int) -> int:
        """The most of the first `tokens` tokens behind which states are or will be kept for another
        prompt; `done` of them are computed."""
        if tokens > done:
            self.stop(tokens)
        return max((one for one in self._stops if one <= tokens), default=0)

    def pieces(
        self, start: int, end: int, *, offset: int, begin: torch.Tensor | None
    ) -> Iterator[Piece]:
        """The tokens `start` to `end`, which lie at `offset` in the pass, between stops; `begin`:
        states to begin with, of another prompt. End the pass with `settle` or `undo`."""
        self._before = self.now.clone()
        stops = sorted(one for one in self._stops if start < one < end)
        for last in [*stops, end]:
            if last in self._stops:
                self.kept[last] = torch.empty_like(self.now)
            yield Piece(
                place=slice(offset, offset + last - start),
                row_1S=self.now,
                begin_1S=begin,
                keep_1S=self.kept.get(last),
            )
            offset, start, begin = offset + last - start, last, None

    def settle(self) -> None:
        """End a pass."""
        self._before = None

    def undo(self) -> None:
        """End a pass that failed: some layers have changed their states."""
        if self._before is not None:
            self.now, self._before = self._before, None
