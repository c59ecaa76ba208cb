"""Summaries of a trajectory's records, for writers and readers alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from forge.core.enum_words import enum_word
from forge.core.queue.dispatch.failures import abandon_reason, kind_of_abandoned
from forge.core.trajectory import TrajectoryName
from forge.v1 import common_pb2
from services.pool.data.closed_digests import checked_rewards
from services.pool.storage.keys import index_of_turn_key, trajectory_key
from services.pool.storage.records import (
    Payload,
    Records,
    TrajectoryHeader,
    TurnHead,
    decode_header,
    decode_turn_head,
)
from services.pool.storage.tables import Table

FREED_OUTCOME = "outcome"
"""Name and id of the one event that is left of the rewards of a freed trajectory."""
MOST_SUMMARY_BYTES = 1 << 20
"""Largest summary with all rewards: a message has room for four."""
SHORT_REASON_CHARS = 200


def header_of(records: Records, trajectory: bytes) -> TrajectoryHeader | None:
    """Header of a trajectory; None if it is not stored."""
    payload = records.get(Table.TRAJECTORIES, trajectory)
    return None if payload is None else decode_header(payload)


def state_name(state: int) -> str:
    """The name of a trajectory's state in errors."""
    return enum_word(common_pb2.TrajectoryState, state)


def turns_of(records: Records, trajectory: bytes) -> Iterator[tuple[TurnHead, Payload]]:
    """Every turn in order, as its head and its stored payload."""
    for key, payload in records.scan(Table.TURNS, prefix=trajectory):
        yield decode_turn_head(index_of_turn_key(key), payload), payload


def rewards_of(
    records: Records, trajectory: bytes, header: TrajectoryHeader
) -> list[common_pb2.RewardEvent]:
    """Every reward, in order of event id. Raises `DataLoss` if a closed trajectory lacks one."""
    return [
        common_pb2.RewardEvent.FromString(bytes(payload))
        for payload in checked_rewards(records, trajectory, header)
    ]


def count_turns(header: TrajectoryHeader, heads: Sequence[TurnHead]) -> TrajectoryHeader:
    """`header` with the totals of `heads`."""
    sampled = [head for head in heads if head.sampled_tokens]
    return msgspec.structs.replace(
        header,
        turns=len(heads),
        sampled_tokens=sum(head.sampled_tokens for head in heads),
        prompt_tokens=sum(head.prompt_tokens for head in heads),
        min_weight_version=min((head.min_weight_version for head in sampled), default=-1),
        max_weight_version=max((head.max_weight_version for head in sampled), default=-1),
    )


def summarize(
    records: Records, name: TrajectoryName, *, brief: bool = False
) -> common_pb2.TrajectorySummary | None:
    """None for an unknown trajectory; `brief`: turns of an open one are not read and count as
    none."""
    key = trajectory_key(name)
    header = header_of(records, key)
    if header is None:
        return None
    if header.is_open and not brief:
        header = count_turns(header, [head for head, _ in turns_of(records, key)])
    return summary_of(records, name, header)


def summary_of(
    records: Records, name: TrajectoryName, header: TrajectoryHeader
) -> common_pb2.TrajectorySummary:
    """Returns the summary with the turns that `header` counts. A summary that would not fit a
    message has the outcome as its only reward."""
    summary = common_pb2.TrajectorySummary(
        trajectory_id=name.trajectory_id,
        task_id=name.task_id,
        state=common_pb2.TrajectoryState.ValueType(header.state),
        turns=header.turns,
        sampled_tokens=header.sampled_tokens,
        rewards=_rewards(records, trajectory_key(name), header),
        min_weight_version=header.min_weight_version,
        max_weight_version=header.max_weight_version,
        sealed_unix_s=header.sealed_unix_s,
        reason=header.reason,
        domain=header.domain,
        freed=header.freed,
        prompt_tokens=header.prompt_tokens,
    )
    if summary.ByteSize() > MOST_SUMMARY_BYTES:
        shorten(summary)
    return summary


def shorten(summary: common_pb2.TrajectorySummary) -> None:
    """Removes all rewards but outcomes, and cuts a long reason, which earlier versions stored
    whole."""
    outcomes = [one for one in summary.rewards if one.kind == common_pb2.REWARD_KIND_OUTCOME]
    del summary.rewards[:]
    summary.rewards.extend(outcomes)
    summary.reason = summary.reason[:SHORT_REASON_CHARS]


def compact(summary: common_pb2.TrajectorySummary) -> common_pb2.TrajectorySummary:
    """Only what a leader needs of an attempt: id, state, time, kind of the failure, and the sum of
    its outcomes as one reward."""
    short = common_pb2.TrajectorySummary(
        trajectory_id=summary.trajectory_id,
        state=summary.state,
        sealed_unix_s=summary.sealed_unix_s,
    )
    if summary.state == common_pb2.TRAJECTORY_STATE_ABANDONED:
        short.reason = abandon_reason(kind_of_abandoned(summary.reason), "")
    kind = common_pb2.REWARD_KIND_OUTCOME
    if outcomes := [reward.value for reward in summary.rewards if reward.kind == kind]:
        short.rewards.add(event_id="o", name="o", kind=kind, value=sum(outcomes))
    return short


def _rewards(
    records: Records, trajectory: bytes, header: TrajectoryHeader
) -> list[common_pb2.RewardEvent]:
    if not header.freed:
        return rewards_of(records, trajectory, header)
    if header.outcome is None:
        return []
    return [
        common_pb2.RewardEvent(
            event_id=FREED_OUTCOME,
            name=FREED_OUTCOME,
            kind=common_pb2.REWARD_KIND_OUTCOME,
            value=header.outcome,
            turn_index=-1,
        )
    ]
