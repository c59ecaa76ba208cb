"""From requests to commands: every check that does not need the store.

Each function raises `InvalidArgument` naming the field and its value; its result is safe to store.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from forge.core.credit.rewards import check_name, check_value
from forge.core.errors import InvalidArgument
from forge.core.tasks.validation import check_payload
from forge.core.token_columns import TOKEN_BYTES, float32_array, int32_array
from forge.core.trajectory import check_columns, check_task_id, parse_trajectory_id
from forge.runtime.rpc.routes import check_routes
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import (
    AppendRewards,
    NewTurn,
    PutGroups,
    SealTrajectory,
    SetGroupStates,
)
from services.pool.storage.keys import MAX_EVENT_ID_BYTES
from services.pool.storage.records import TurnHead

MAX_LOOKED_UP = 10_000
"""Ids in one LookUpGroups or EraseTrajectories call."""
MAX_REASON_CHARS = 1000
"""Longest reason of an abandoned trajectory, which may be an agent's, or of a tombstone; a longer
one is cut."""
MAX_MOVED = 1000
"""Groups in one ImportGroups, ExportGroups or MarkGroupsMoved call."""
_ERASURE_ID = re.compile(r"[A-Za-z0-9-]{0,64}")
_SEALS = (common_pb2.TRAJECTORY_STATE_SEALED, common_pb2.TRAJECTORY_STATE_ABANDONED)


def new_turn(serialized: bytes) -> NewTurn:
    """Checks a serialized Turn and extracts its head."""
    try:
        turn = common_pb2.Turn.FromString(serialized)
    except DecodeError as error:
        raise InvalidArgument(f"the {len(serialized)} bytes sent are not a Turn: {error}") from None
    name = parse_trajectory_id(turn.trajectory_id)
    try:
        return NewTurn(
            trajectory=name,
            head=_turn_head(turn),
            serialized=serialized,
            traceparent=turn.traceparent,
        )
    except InvalidArgument as error:
        raise InvalidArgument(f"turn {turn.turn_index} of {name}: {error}") from None


def _turn_head(turn: common_pb2.Turn) -> TurnHead:
    # Each look at a field of bytes copies it.
    prompt_ids, sampled_ids = turn.prompt_ids, turn.sampled.ids
    logprobs, weight_versions = turn.sampled.logprobs, turn.sampled.weight_versions
    check_columns(
        prompt_ids=prompt_ids,
        sampled_ids=sampled_ids,
        logprobs=logprobs,
        weight_versions=weight_versions,
    )
    if not -1 <= turn.parent_turn < turn.turn_index:
        raise InvalidArgument(f"parent_turn {turn.parent_turn} must be -1 or an earlier turn")
    if turn.parent_turn == -1 and turn.prefix_tokens:
        raise InvalidArgument(f"prefix_tokens is {turn.prefix_tokens} but there is no parent_turn")
    _check_not_negative("prompt_ids", prompt_ids)
    _check_not_negative("sampled.ids", sampled_ids)
    _check_not_negative("sampled.weight_versions", weight_versions)
    if not _all_finite(logprobs):
        raise InvalidArgument("sampled.logprobs holds a value that is not finite")
    if not (math.isfinite(turn.temperature) and turn.temperature >= 0):
        raise InvalidArgument(f"temperature {turn.temperature} must be finite and not negative")
    if turn.HasField("top_p") and not 0 < turn.top_p <= 1:
        raise InvalidArgument(f"top_p {turn.top_p} must be above 0 and at most 1")
    tokens = turn.prefix_tokens + (len(prompt_ids) + len(sampled_ids)) // TOKEN_BYTES
    check_routes(turn.sampled.routed_experts, tokens=tokens)
    low, high = _range(weight_versions)
    return TurnHead(
        turn_index=turn.turn_index,
        parent_turn=turn.parent_turn,
        prefix_tokens=turn.prefix_tokens,
        prompt_tokens=len(prompt_ids) // 4,
        sampled_tokens=len(sampled_ids) // 4,
        min_weight_version=low,
        max_weight_version=high,
    )


# Columns are checked as bytes where possible: making an int of each token would block the event
# loop for a turn of 200k tokens.


def _check_not_negative(field: str, column: bytes) -> None:
    # Every fourth byte has the sign bit, and is ASCII without it.
    if not column[3::4].isascii():
        lowest = min(int32_array(column))
        raise InvalidArgument(f"{field} holds {lowest}, which must not be negative")


def _all_finite(column: bytes) -> bool:
    highest = column[3::4]
    if 0x7F not in highest and 0xFF not in highest:
        return True  # All exponents are small.
    # A sum is finite only if every term is.
    return math.isfinite(sum(float32_array(column)))


def _range(column: bytes) -> tuple[int, int]:
    """Lowest and highest number; -1 for none."""
    if column == column[:4] * (len(column) // 4):
        column = column[:4]  # Nearly always all are the same.
    numbers = int32_array(column)
    return min(numbers, default=-1), max(numbers, default=-1)


def append_rewards(request: pool_pb2.AppendRewardsRequest) -> AppendRewards:
    """Checks a request for rewards."""
    return AppendRewards(
        trajectory=parse_trajectory_id(request.trajectory_id), rewards=_rewards(request.rewards)
    )


def seal_trajectory(
    request: pool_pb2.SealTrajectoryRequest, *, now_unix_s: float
) -> SealTrajectory:
    """Checks a request to close a trajectory."""
    name = parse_trajectory_id(request.trajectory_id)
    if request.task_id not in ("", name.task_id):
        raise InvalidArgument(f"task_id {request.task_id!r} is not the task of trajectory {name}")
    if request.state not in _SEALS:
        raise InvalidArgument(f"state {request.state} must be SEALED or ABANDONED")
    if not (math.isfinite(request.closing_agent_s) and request.closing_agent_s >= 0):
        raise InvalidArgument(
            f"closing_agent_s is {request.closing_agent_s}; must be finite and at least 0"
        )
    return SealTrajectory(
        trajectory=name,
        domain=request.domain,
        turns=request.turns,
        rewards=_rewards(request.rewards),
        state=request.state,
        reason=request.reason[:MAX_REASON_CHARS],
        sealed_unix_s=now_unix_s,
        closing_agent_s=request.closing_agent_s if request.HasField("closing_agent_s") else None,
    )


def _rewards(rewards: Iterable[common_pb2.RewardEvent]) -> tuple[common_pb2.RewardEvent, ...]:
    return tuple(_reward(reward) for reward in rewards)


def _reward(reward: common_pb2.RewardEvent) -> common_pb2.RewardEvent:
    length = len(reward.event_id.encode())
    if not 1 <= length <= MAX_EVENT_ID_BYTES:
        raise InvalidArgument(
            f"reward {reward.name!r} has an event_id of {length} bytes; it must have 1 to "
            f"{MAX_EVENT_ID_BYTES}"
        )
    if not reward.name:
        raise InvalidArgument(f"reward {reward.event_id} has no name")
    check_name(reward.name)
    if reward.kind not in common_pb2.RewardKind.values() or not reward.kind:
        raise InvalidArgument(f"reward {reward.event_id} has kind {reward.kind}, which is unknown")
    check_value(reward.name, reward.value)
    if reward.turn_index < -1:
        raise InvalidArgument(
            f"reward {reward.event_id} has turn_index {reward.turn_index}; it must be -1 or a turn"
        )
    return reward


def put_groups(request: pool_pb2.PutGroupsRequest, *, shard: str) -> PutGroups:
    """Checks a request with new groups of `shard`."""
    return PutGroups(
        groups=tuple(_new_group(group, shard) for group in request.groups), fence=request.fence
    )


def _new_group(group: common_pb2.GroupRecord, shard: str) -> common_pb2.GroupRecord:
    """`group` as stored: on this shard, without its state."""
    task = group.task
    check_task_id(task.task_id)
    if task.group_size < 1:
        raise InvalidArgument(f"task {task.task_id} has group_size 0; it must be at least 1")
    if task.purpose not in common_pb2.Purpose.values() or not task.purpose:
        raise InvalidArgument(f"task {task.task_id} has purpose {task.purpose}, which is unknown")
    check_payload(task.payload_json, name=f"payload_json of task {task.task_id}")
    if group.pool_shard not in ("", shard):
        raise InvalidArgument(
            f"group {task.task_id} belongs to pool shard {group.pool_shard!r}, not to {shard!r}"
        )
    return common_pb2.GroupRecord(
        task=task,
        queue_index=group.queue_index,
        pool_shard=shard,
        task_digest=group.task_digest,
    )


def check_look_up(request: pool_pb2.LookUpGroupsRequest) -> None:
    """Raises for a look-up of too many ids."""
    count = len(request.task_ids) + len(request.batch_ids)
    if count > MAX_LOOKED_UP:
        raise InvalidArgument(f"{count} ids to look up; a call takes at most {MAX_LOOKED_UP}")


def check_move(task_ids: Sequence[str]) -> Sequence[str]:
    """The tasks of one move. Raises for too many or wrong ids."""
    if len(task_ids) > MAX_MOVED:
        raise InvalidArgument(f"{len(task_ids)} groups to move; a call takes at most {MAX_MOVED}")
    for task_id in task_ids:
        check_task_id(task_id)
    return task_ids


def check_erase(request: pool_pb2.EraseTrajectoriesRequest) -> None:
    """Raises for a request without exactly one selection, and for too many or wrong ids."""
    if sum(map(bool, (request.task_ids, request.user, request.tag))) != 1:
        raise InvalidArgument("task_ids, user, tag: exactly one must be set")
    if len(request.task_ids) > MAX_LOOKED_UP:
        raise InvalidArgument(
            f"task_ids has {len(request.task_ids)} ids; at most {MAX_LOOKED_UP} are at a time"
        )
    for task_id in request.task_ids:
        check_task_id(task_id)
    if not _ERASURE_ID.fullmatch(request.erasure_id):
        raise InvalidArgument(
            f"erasure_id {request.erasure_id[:40]!r} must have up to 64 letters, digits and dashes"
        )


def set_group_states(
    request: pool_pb2.SetGroupStatesRequest, *, now_unix_s: float
) -> SetGroupStates:
    """Checks a request with states of groups."""
    states: dict[str, common_pb2.GroupRecord] = {}
    for change in request.changes:
        if change.state not in common_pb2.GroupState.values() or not change.state:
            raise InvalidArgument(f"group {change.task_id} has unknown state {change.state}")
        states[check_task_id(change.task_id)] = common_pb2.GroupRecord(
            state=change.state,
            batch_id=change.batch_id,
            step=change.step,
            reason=change.reason[:MAX_REASON_CHARS],
        )
    return SetGroupStates(
        states=states,
        fence=request.fence,
        term=request.term,
        tombstone_freed=request.tombstone_freed,
        now_unix_s=now_unix_s,
    )
