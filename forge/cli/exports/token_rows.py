"""Rows of tokens: the training data of a trajectory, without messages.

One row is one sequence that no later turn continues as a whole, so a trajectory without branches is
one row:

    input_ids          the tokens, prompts and answers
    loss_mask          1 for the tokens to train
    logprobs           behavior log-prob of each token with mask 1, as stored; else 0
    allowed_logprobs   see SampledTokens in common.proto; 0 where the record has none
    advantages         advantage of each token with mask 1, by the default rules; else 0
    weight_versions    version that sampled each token with mask 1; else -1
    turns              list of turn_index, start, stop, temperature: the answers with mask 1

Over all rows each sampled token has mask 1 at most once: a beginning that several rows share counts
in the first one. Not trained: side calls, turns that the agent left, greedy ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge.cli.exports.files import Arrow
from forge.client.stored.trajectory_tree import TrajectoryTree, turn_tokens
from forge.core.credit.side_calls import SideCall
from forge.core.errors import InvalidArgument
from forge.core.token_columns import (
    TOKEN_BYTES,
    float32_array,
    float32_bytes,
    int32_array,
    int32_bytes,
)
from forge.core.trajectory import NO_PARENT, TokenTree
from forge.v1 import common_pb2 as pb

Untrained = Literal["empty", "aborted", "greedy", "other_model"] | SideCall
"""Reason why a turn has no token with mask 1; the names are the trainer's."""

_TEXTS = ("trajectory_id", "task_id", "domain")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SampledSpan:
    """The sampled tokens of one turn in a row."""

    turn: pb.Turn
    start: int
    stop: int
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """One row; columns are little-endian bytes, one entry per token."""

    trajectory_id: str
    domain: str
    turn_index: int
    """The turn that the sequence ends with."""
    reward: float | None
    input_ids: bytes
    loss_mask: bytes
    """int8."""
    logprobs: bytes
    allowed_logprobs: bytes
    advantages: bytes
    weight_versions: bytes
    turns: Sequence[Mapping[str, Any]]


def token_rows(
    trajectory: pb.Trajectory, advantages: Sequence[float], reward: float | None
) -> tuple[list[TokenRow], Counter[Untrained]]:
    """Returns the rows of a trajectory, and the turns without a trained token by reason.

    `advantages` has one per turn. Raises `InvalidArgument` if the turns form no tree.
    """
    turns = trajectory.turns
    tree = TrajectoryTree(turns)
    tokens = TokenTree([turn_tokens(turn) for turn in turns])
    reasons = {index: why for index in range(len(turns)) if (why := _untrained(turns, tree, index))}
    left = set(range(len(turns))) - set(reasons)
    whole = {turn.parent_turn for turn in turns if _continues(tree, turn)}
    rows = []
    for end in range(len(turns)):
        if end in whole:
            continue
        answers = []
        for index in _line(tree, turns, end):
            if index in left:
                left.discard(index)
                answers.append(
                    _SampledSpan(
                        turn=turns[index],
                        start=tree.contexts[index],
                        stop=tree.lengths[index],
                        advantage=advantages[index],
                    )
                )
        if answers:
            ids = tokens.sequence(end)
            rows.append(_row(trajectory, end, ids, answers[::-1], reward))
    return rows, Counter(reasons.values())


def _untrained(turns: Sequence[pb.Turn], tree: TrajectoryTree, index: int) -> Untrained | None:
    turn = turns[index]
    if turn.HasField("other_model"):
        return "other_model"
    if tree.contexts[index] in (0, tree.lengths[index]):
        return "empty"
    if turn.finish_reason == pb.FINISH_REASON_ABORTED:
        return "aborted"
    if turn.temperature <= 0:
        return "greedy"
    return tree.aside.get(index)


def _continues(tree: TrajectoryTree, turn: pb.Turn) -> bool:
    """Whether the sequence of the turn's parent is its beginning."""
    parent = turn.parent_turn
    return parent != NO_PARENT and turn.prefix_tokens == tree.lengths[parent]


def _line(tree: TrajectoryTree, turns: Sequence[pb.Turn], end: int) -> Sequence[int]:
    """The turns whose whole sequences are beginnings of that of `end`, the last first."""
    line, kept, index = [], tree.lengths[end], end
    while index != NO_PARENT:
        if kept >= tree.lengths[index]:
            line.append(index)
        kept = min(kept, turns[index].prefix_tokens)
        index = turns[index].parent_turn
    return line


def _row(
    trajectory: pb.Trajectory,
    end: int,
    ids: bytes,
    answers: Sequence[_SampledSpan],
    reward: float | None,
) -> TokenRow:
    count = len(ids) // TOKEN_BYTES
    mask, versions = bytearray(count), bytearray(int32_bytes([-1]) * count)
    logprobs, allowed, advantages = (bytearray(len(ids)) for _ in range(3))
    for one in answers:
        sampled, tokens = one.turn.sampled, one.stop - one.start
        span = slice(one.start * TOKEN_BYTES, one.stop * TOKEN_BYTES)
        mask[one.start : one.stop] = b"\1" * tokens
        logprobs[span] = sampled.logprobs
        versions[span] = sampled.weight_versions
        advantages[span] = float32_bytes([one.advantage]) * tokens
        if sampled.allowed_logprobs:
            allowed[span] = _allowed_logprobs(one.turn)
    return TokenRow(
        trajectory_id=trajectory.trajectory_id,
        domain=trajectory.domain,
        turn_index=end,
        reward=reward,
        input_ids=ids,
        loss_mask=bytes(mask),
        logprobs=bytes(logprobs),
        allowed_logprobs=bytes(allowed),
        advantages=bytes(advantages),
        weight_versions=bytes(versions),
        turns=[
            {
                "turn_index": one.turn.turn_index,
                "start": one.start,
                "stop": one.stop,
                "temperature": one.turn.temperature,
            }
            for one in answers
        ],
    )


def _allowed_logprobs(turn: pb.Turn) -> bytes:
    sampled = turn.sampled
    if len(sampled.allowed_logprobs) != len(sampled.logprobs):
        raise InvalidArgument(
            f"turn {turn.turn_index} has {len(sampled.logprobs)} bytes of logprobs and "
            f"{len(sampled.allowed_logprobs)} of allowed_logprobs"
        )
    return sampled.allowed_logprobs


class TokenRows:
    """The columns of tokens, see the top of the file."""

    def size_bytes(self, row: TokenRow, /) -> int:
        """Returns the bytes of the columns."""
        return 5 * len(row.input_ids) + len(row.loss_mask)

    def json_row(self, row: TokenRow, /) -> dict[str, Any]:
        """Returns one row as plain data."""
        return _facts(row) | {
            "input_ids": int32_array(row.input_ids).tolist(),
            "loss_mask": list(row.loss_mask),
            "logprobs": float32_array(row.logprobs).tolist(),
            "allowed_logprobs": float32_array(row.allowed_logprobs).tolist(),
            "advantages": float32_array(row.advantages).tolist(),
            "weight_versions": int32_array(row.weight_versions).tolist(),
            "turns": list(row.turns),
        }

    def table(self, arrow: Arrow, rows: Sequence[TokenRow], /) -> Any:
        """Returns rows as a table."""
        pa = arrow.pa
        kinds = dict.fromkeys(_TEXTS, pa.string()) | {
            "turn_index": pa.int32(),
            "reward": pa.float64(),
        }
        columns = arrow.plain([_facts(row) for row in rows], kinds)
        for name, kind in (
            ("input_ids", pa.int32()),
            ("loss_mask", pa.int8()),
            ("logprobs", pa.float32()),
            ("allowed_logprobs", pa.float32()),
            ("advantages", pa.float32()),
            ("weight_versions", pa.int32()),
        ):
            columns[name] = arrow.numbers([getattr(row, name) for row in rows], kind)
        spans = dict.fromkeys(("turn_index", "start", "stop"), pa.int32())
        columns["turns"] = arrow.lists(
            [len(row.turns) for row in rows],
            arrow.struct(
                [dict(one) for row in rows for one in row.turns],
                spans | {"temperature": pa.float64()},
            ),
        )
        return pa.table(columns)


def _facts(row: TokenRow) -> dict[str, Any]:
    return {
        "trajectory_id": row.trajectory_id,
        "task_id": row.trajectory_id.partition(":")[0],
        "domain": row.domain,
        "turn_index": row.turn_index,
        "reward": row.reward,
    }
