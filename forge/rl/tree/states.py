"""The trunk's last hidden states of a tree, as its passes leave them.

Owns the one table that passes, parts and ranks write into. What is computed from it has no
gradient in the trunk.

Shapes: L layout tokens, C hidden channels, l tokens of a pass.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from forge.rl.collectives import all_reduce
from forge.rl.tree.parts import TreePart


class TreeStates:
    """Of the newest tree. Where nothing was computed (a branch without a trained token), zeros."""

    def __init__(self) -> None:
        self._tokens = 0
        self._states_LC: Tensor | None = None

    def begin(self, tokens: int) -> None:
        """A tree of so many tokens comes."""
        self._tokens, self._states_LC = tokens, None

    def keep(self, part: TreePart, states_lC: Tensor) -> None:
        """What one pass computed."""
        if self._states_LC is None:
            self._states_LC = states_lC.new_zeros((self._tokens, states_lC.shape[-1]))
        places = part.places_L.to(states_lC.device)
        # A rank without a range of its own computes a token that is not its own.
        self._states_LC[places] = states_lC.detach()[: len(places)]

    def gather(self, group: dist.ProcessGroup) -> None:
        """From all ranks: each state has one owner, so a sum is a gather."""
        all_reduce(self.whole, group)

    @property
    def whole(self) -> Tensor:
        """[L, C], detached."""
        assert self._states_LC is not None, "no pass has been made"
        return self._states_LC
