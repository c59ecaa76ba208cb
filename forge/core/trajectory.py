"""Trajectories as data: their names, their turns, and the token sequences of the turns.

Owns the format of ids, the rule by which a turn extends another, and the reconstruction of full
sequences from turns that have only their new tokens. Owns no storage, no protobuf and no tensors:
columns stay little-endian bytes, are sliced and joined, never unpacked one by one.

The rule, as on `Turn` in common.proto:

    sequence(turn) = sequence(parent)[:prefix_tokens] + prompt_ids + sampled_ids
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

from forge.core.errors import InvalidArgument
from forge.core.token_columns import TOKEN_BYTES

TaskId = NewType("TaskId", str)
TrajectoryId = NewType("TrajectoryId", str)

NO_PARENT = -1
"""`parent_turn` of a turn without a parent."""
MAX_NUMBER = 2**32 - 1
"""Largest rollout index and attempt."""

_TASK_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")
_TRAJECTORY_ID = re.compile(r"([A-Za-z0-9._-]{1,200}):(0|[1-9][0-9]{0,9}):(0|[1-9][0-9]{0,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryName:
    """The parts of a trajectory id; `str()` returns the id."""

    task_id: TaskId
    rollout_index: int
    """Rollout of the group, from 0."""
    attempt: int
    """Attempt at the rollout, from 0."""

    def __str__(self) -> str:
        return f"{self.task_id}:{self.rollout_index}:{self.attempt}"

    @property
    def trajectory_id(self) -> TrajectoryId:
        """Return the id as text."""
        return TrajectoryId(str(self))


def check_task_id(task_id: str) -> TaskId:
    """Return `task_id`. Raises `InvalidArgument` for a malformed one."""
    if not _TASK_ID.fullmatch(task_id):
        raise InvalidArgument(f"task_id {task_id[:220]!r} must be 1 to 200 of [A-Za-z0-9._-]")
    return TaskId(task_id)


def parse_trajectory_id(trajectory_id: str) -> TrajectoryName:
    """Parse `{task_id}:{rollout_index}:{attempt}`. Raises `InvalidArgument`."""
    match = _TRAJECTORY_ID.fullmatch(trajectory_id)
    if match is None or max(numbers := [int(match[2]), int(match[3])]) > MAX_NUMBER:
        raise InvalidArgument(
            f"trajectory_id {trajectory_id[:240]!r} must be task_id:rollout_index:attempt, "
            f"both numbers at most {MAX_NUMBER}"
        )
    return TrajectoryName(task_id=TaskId(match[1]), rollout_index=numbers[0], attempt=numbers[1])


class TurnShape(Protocol):
    """A turn's place in the tree of its trajectory."""

    @property
    def turn_index(self) -> int:
        """Position in the trajectory, from 0."""

    @property
    def parent_turn(self) -> int:
        """Turn that this one extends, or `NO_PARENT`."""

    @property
    def prefix_tokens(self) -> int:
        """Tokens shared with the parent."""

    @property
    def new_tokens(self) -> int:
        """Tokens behind the shared prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """The tokens that one LLM call added to its trajectory's tree."""

    turn_index: int
    """From 0, in the order of the calls' ends."""
    parent_turn: int = NO_PARENT
    """Turn that this context extends."""
    prefix_tokens: int = 0
    """Tokens shared with the parent's sequence."""
    prompt_ids: bytes
    """int32 ids of the prompt behind the shared prefix."""
    sampled_ids: bytes
    """int32 sampled ids."""
    logprobs: bytes
    """float32 behavior log-prob of each sampled id."""
    weight_versions: bytes
    """int32 weight version of each sampled id."""

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt ids of this turn alone."""
        return len(self.prompt_ids) // TOKEN_BYTES

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled ids."""
        return len(self.sampled_ids) // TOKEN_BYTES

    @property
    def new_tokens(self) -> int:
        """Number of ids behind the shared prefix."""
        return self.prompt_tokens + self.sampled_tokens


def check_columns(
    *, prompt_ids: bytes, sampled_ids: bytes, logprobs: bytes, weight_versions: bytes
) -> None:
    """Raises `InvalidArgument` for truncated columns, or columns of different counts."""
    if len(prompt_ids) % TOKEN_BYTES:
        raise InvalidArgument(f"prompt_ids has {len(prompt_ids)} bytes, not a multiple of 4")
    if len(sampled_ids) % TOKEN_BYTES:
        raise InvalidArgument(f"sampled.ids has {len(sampled_ids)} bytes, not a multiple of 4")
    for name, column in (("logprobs", logprobs), ("weight_versions", weight_versions)):
        if len(column) != len(sampled_ids):
            raise InvalidArgument(
                f"sampled.{name} has {len(column)} bytes but sampled.ids has {len(sampled_ids)}: "
                "the columns must have one entry per token"
            )


def sequence_lengths(turns: Sequence[TurnShape]) -> list[int]:
    """Return the length of every turn's full sequence; check that the turns form a tree.

    `turns` are all turns of one trajectory in order. Raises `InvalidArgument` with the first
    misplaced turn, the first with a later parent, or the first that shares more tokens than its
    parent has.
    """
    lengths: list[int] = []
    for position, turn in enumerate(turns):
        if turn.turn_index != position:
            raise InvalidArgument(f"turn {position} is missing: found turn {turn.turn_index} there")
        if not NO_PARENT <= turn.parent_turn < position:
            raise InvalidArgument(
                f"turn {position} has parent_turn {turn.parent_turn}, which must be -1 or an "
                "earlier turn"
            )
        shareable = 0 if turn.parent_turn == NO_PARENT else lengths[turn.parent_turn]
        if not 0 <= turn.prefix_tokens <= shareable:
            raise InvalidArgument(
                f"turn {position} has prefix_tokens {turn.prefix_tokens}, but the sequence of its "
                f"parent turn {turn.parent_turn} has {shareable} tokens"
            )
        lengths.append(turn.prefix_tokens + turn.new_tokens)
    return lengths


class TokenTree:
    """All turns of one trajectory, and the token sequence of each.

    Copies nothing before a request for a sequence; then joins its pieces once, so the cost is the
    length of the result, independent of the number of parents.
    """

    def __init__(self, turns: Sequence[TurnTokens]) -> None:
        """Raises `InvalidArgument` if the turns form no tree (see `sequence_lengths`)."""
        for turn in turns:
            check_columns(
                prompt_ids=turn.prompt_ids,
                sampled_ids=turn.sampled_ids,
                logprobs=turn.logprobs,
                weight_versions=turn.weight_versions,
            )
        self.turns = tuple(turns)
        self.lengths = tuple(sequence_lengths(turns))
        """Tokens in each turn's full sequence, sampled ones included."""

    def context(self, turn_index: int) -> bytes:
        """Return the int32 ids of s_t: the prompt, without the sampled ids."""
        turn = self.turns[turn_index]
        return self._join(turn_index, turn.prefix_tokens + turn.prompt_tokens)

    def sequence(self, turn_index: int) -> bytes:
        """Return the int32 ids of s_t and a_t: the context, then the sampled ids."""
        return self._join(turn_index, self.lengths[turn_index])

    def _join(self, turn_index: int, tokens: int) -> bytes:
        """Return the first `tokens` ids of the sequence of `turn_index`."""
        pieces: list[memoryview] = []
        while tokens > 0:
            turn = self.turns[turn_index]
            own_bytes = (tokens - turn.prefix_tokens) * TOKEN_BYTES
            if own_bytes > 0:
                # Collected from the end of the sequence backwards.
                pieces.append(
                    memoryview(turn.sampled_ids)[: max(own_bytes - len(turn.prompt_ids), 0)]
                )
                pieces.append(memoryview(turn.prompt_ids)[:own_bytes])
            tokens = min(tokens, turn.prefix_tokens)
            turn_index = turn.parent_turn
        return b"".join(reversed(pieces))
