"""Rows of whole trajectories, with everything that the pool has of them.

One row is one trajectory, with the same names in both encodings:

    trajectory_id, task_id, domain, state, reason, closed_unix_s
    rewards: list of event_id, name, kind, value, turn_index
    turns:   list of turn_index, parent_turn, prefix_tokens, prompt_ids, sampled_ids, logprobs,
             weight_versions, allowed_logprobs, other_model (a name; "": the policy), and the
             other fields of a Turn

The full sequence of a turn is sequence(parent)[:prefix_tokens] + prompt_ids + sampled_ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge.cli.exports.files import Arrow
from forge.core.enum_words import enum_word
from forge.core.token_columns import float32_array, int32_array
from forge.v1 import common_pb2

_INT_LISTS = ("prompt_ids", "sampled_ids", "weight_versions")
_FLOAT_LISTS = ("logprobs", "allowed_logprobs")
_INTS = ("turn_index", "parent_turn", "prefix_tokens", "cached_tokens", "top_k")
_TIMINGS = ("queue_s", "prefill_s", "decode_s", "agent_s")
_FLOATS = ("temperature", "top_p", "started_unix_s", *_TIMINGS)
_TEXTS = ("finish_reason", "messages_json", "parse_error", "context_action", "agent")
_STRINGS = (*_TEXTS, "other_model")
_REWARD_STRINGS = ("event_id", "name", "kind")
_ROW = ("trajectory_id", "task_id", "domain", "state", "reason", "closed_unix_s")


class TrajectoryRows:
    """The columns of whole trajectories, see the top of the file."""

    def size_bytes(self, trajectory: common_pb2.Trajectory, /) -> int:
        """Returns the size of the stored trajectory."""
        return trajectory.ByteSize()

    def json_row(self, trajectory: common_pb2.Trajectory, /) -> dict[str, Any]:
        """Returns one row as plain data."""
        row = _row(trajectory)
        row["rewards"] = [_reward(reward) for reward in trajectory.rewards]
        row["turns"] = [_json_turn(turn) for turn in trajectory.turns]
        return row

    def table(self, arrow: Arrow, rows: Sequence[common_pb2.Trajectory]) -> Any:
        """Returns rows as a table."""
        plain = [_row(row) for row in rows]
        columns = {
            name: arrow.pa.array(
                [row[name] for row in plain],
                arrow.pa.float64() if name == "closed_unix_s" else arrow.pa.string(),
            )
            for name in _ROW
        }
        rewards = [reward for row in rows for reward in row.rewards]
        turns = [turn for row in rows for turn in row.turns]
        columns["rewards"] = arrow.lists(
            [len(row.rewards) for row in rows], _reward_column(arrow, rewards)
        )
        columns["turns"] = arrow.lists([len(row.turns) for row in rows], _turn_column(arrow, turns))
        return arrow.pa.table(columns)


def _reward_column(arrow: Arrow, rewards: Sequence[common_pb2.RewardEvent]) -> Any:
    plain = [_reward(reward) for reward in rewards]
    types = dict.fromkeys(_REWARD_STRINGS, arrow.pa.string()) | {
        "value": arrow.pa.float64(),
        "turn_index": arrow.pa.int32(),
    }
    return arrow.struct(plain, types)


def _turn_column(arrow: Arrow, turns: Sequence[common_pb2.Turn]) -> Any:
    types = (
        dict.fromkeys(_INTS, arrow.pa.int32())
        | dict.fromkeys(_FLOATS, arrow.pa.float64())
        | dict.fromkeys(_STRINGS, arrow.pa.string())
    )
    plain = arrow.struct([_scalars(turn) for turn in turns], types)
    arrays = dict(zip(types, plain.flatten(), strict=True))
    columns = [_columns(turn) for turn in turns]
    for names, kind in ((_INT_LISTS, arrow.pa.int32()), (_FLOAT_LISTS, arrow.pa.float32())):
        for name in names:
            arrays[name] = arrow.numbers([turn[name] for turn in columns], kind)
    return arrow.pa.StructArray.from_arrays(list(arrays.values()), list(arrays))


def _row(trajectory: common_pb2.Trajectory) -> dict[str, Any]:
    row = {name: getattr(trajectory, name) for name in ("trajectory_id", "task_id", "domain")}
    row["state"] = enum_word(common_pb2.TrajectoryState, trajectory.state)
    return row | {"reason": trajectory.reason, "closed_unix_s": trajectory.sealed_unix_s}


def _reward(reward: common_pb2.RewardEvent) -> dict[str, Any]:
    row = {name: getattr(reward, name) for name in (*_REWARD_STRINGS, "value", "turn_index")}
    row["kind"] = enum_word(common_pb2.RewardKind, reward.kind)
    return row


def _scalars(turn: common_pb2.Turn) -> dict[str, Any]:
    row = {name: getattr(turn, name) for name in (*_INTS, *_TEXTS)}
    row["other_model"] = turn.other_model.name
    row |= {name: getattr(turn.timings if name in _TIMINGS else turn, name) for name in _FLOATS}
    row["finish_reason"] = enum_word(common_pb2.FinishReason, turn.finish_reason)
    return row | {name: None for name in ("top_p", "top_k") if not turn.HasField(name)}


def _columns(turn: common_pb2.Turn) -> dict[str, bytes]:
    sampled = turn.sampled
    return {
        "prompt_ids": turn.prompt_ids,
        "sampled_ids": sampled.ids,
        "weight_versions": sampled.weight_versions,
        "logprobs": sampled.logprobs,
        "allowed_logprobs": sampled.allowed_logprobs,
    }


def _json_turn(turn: common_pb2.Turn) -> dict[str, Any]:
    row = _scalars(turn)
    columns = _columns(turn)
    row |= {name: int32_array(columns[name]).tolist() for name in _INT_LISTS}
    row |= {name: float32_array(columns[name]).tolist() for name in _FLOAT_LISTS}
    return row
