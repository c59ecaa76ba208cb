"""The backbone's last hidden states of a tree, collected from its passes.

Owns the table that passes and ranks write into. Results computed from it have no gradient in the
backbone.

Shapes: L layout tokens, C hidden channels, l tokens of a pass.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from forge.rl.collectives import all_reduce
from forge.rl.tree.parts import TreePart


class TreeStates:
    """States of the newest tree; zeros where none was computed (branches without training)."""

    def __init__(self) -> None:
        self._tokens = 0
        self._states_LC: Tensor | None = None

    def begin(self, tokens: int) -> None:
        """Begin a tree of this number of tokens."""
        self._tokens, self._states_LC = tokens, None

    def keep(self, part: TreePart, states_lC: Tensor) -> None:
        """Store the states of one pass."""
        if self._states_LC is None:
            self._states_LC = states_lC.new_zeros((self._tokens, states_lC.shape[-1]))
        places = part.places_L.to(states_lC.device)
        # A rank without a range computes one token that it does not own.
        self._states_LC[places] = states_lC.detach()[: len(places)]

    def gather(self, group: dist.ProcessGroup) -> None:
        """Gather from all ranks: each state has one owner, so a sum is a gather."""
        all_reduce(self.whole, group)

    @property
    def whole(self) -> Tensor:
        """[L, C], detached."""
        assert self._states_LC is not None, "no pass has been made"
        return self._states_LC
