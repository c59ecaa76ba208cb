"""The turns of one trajectory as a tree of branches.

In a branch each turn continues the answer of the turn before. A turn that shares less with its
parent, or is not the first to continue it, begins a new branch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forge.core.credit.side_calls import side_calls
from forge.core.token_columns import TOKEN_BYTES
from forge.core.trajectory import NO_PARENT, TurnTokens, sequence_lengths
from forge.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A turn's place in the tree, see `TurnShape`."""

    turn_index: int
    parent_turn: int
    prefix_tokens: int
    new_tokens: int


class TrajectoryTree:
    """The branches of one trajectory."""

    def __init__(self, turns: Sequence[pb.Turn]) -> None:
        """Raises `InvalidArgument` if the turns form no tree."""
        self.lengths = sequence_lengths([_shape(turn) for turn in turns])
        """Tokens of each turn's sequence, sampled ones included."""
        self.contexts = [
            length - sampled_tokens(turn) for length, turn in zip(self.lengths, turns, strict=True)
        ]
        """Tokens of each turn's prompt."""
        self.aside = side_calls(turns, self.contexts)
        """Side calls, by turn."""
        self._next: dict[int, int] = {}
        """The turn that continues a turn in its branch."""
        self.forks: dict[int, list[int]] = {}
        """First turns of the branches that leave a turn; those of NO_PARENT begin the tree."""
        for index, turn in enumerate(turns):
            parent = turn.parent_turn
            continues = parent != NO_PARENT and turn.prefix_tokens > self.contexts[parent]
            if continues and parent not in self._next:
                self._next[parent] = index
            else:
                self.forks.setdefault(parent, []).append(index)

    @property
    def branches(self) -> list[list[int]]:
        """Turn indices of each branch, in the order of their first turns."""
        firsts = sorted(index for forks in self.forks.values() for index in forks)
        return [list(self.branch(first)) for first in firsts]

    def branch(self, first: int) -> Iterator[int]:
        """The turns of a branch, from its first one on."""
        index: int | None = first
        while index is not None:
            yield index
            index = self._next.get(index)


def turn_tokens(turn: pb.Turn) -> TurnTokens:
    """The tokens of a recorded turn."""
    return TurnTokens(
        turn_index=turn.turn_index,
        parent_turn=turn.parent_turn,
        prefix_tokens=turn.prefix_tokens,
        prompt_ids=turn.prompt_ids,
        sampled_ids=turn.sampled.ids,
        logprobs=turn.sampled.logprobs,
        weight_versions=turn.sampled.weight_versions,
    )


def sampled_tokens(turn: pb.Turn) -> int:
    """Tokens that a turn sampled."""
    return len(turn.sampled.ids) // TOKEN_BYTES


def _shape(turn: pb.Turn) -> _Shape:
    return _Shape(
        turn_index=turn.turn_index,
        parent_turn=turn.parent_turn,
        prefix_tokens=turn.prefix_tokens,
        new_tokens=len(turn.prompt_ids) // TOKEN_BYTES + sampled_tokens(turn),
    )
