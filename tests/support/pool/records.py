"""Turns, rewards and groups as tests send them to a pool, and turns as they read them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from forge.client.stored.trajectory_tree import turn_tokens
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.core.trajectory import TokenTree
from forge.v1 import common_pb2


def make_turn(
    trajectory_id: str = "task:0:0",
    index: int = 0,
    *,
    parent: int | None = None,
    prefix: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    sampled: Sequence[int] = (4, 5),
    version: int = 1,
    messages_json: str = "",
) -> common_pb2.Turn:
    """A valid turn; it extends the one before it unless `parent` says otherwise."""
    return common_pb2.Turn(
        trajectory_id=trajectory_id,
        turn_index=index,
        parent_turn=index - 1 if parent is None else parent,
        prefix_tokens=prefix,
        prompt_ids=int32_bytes(prompt),
        sampled=common_pb2.SampledTokens(
            ids=int32_bytes(sampled),
            logprobs=float32_bytes([-0.25] * len(sampled)),
            weight_versions=int32_bytes([version] * len(sampled)),
        ),
        finish_reason=common_pb2.FINISH_REASON_STOP,
        temperature=1.0,
        messages_json=messages_json,
    )


def make_reward(
    event_id: str = "outcome",
    value: float = 1.0,
    *,
    turn_index: int = -1,
    kind: common_pb2.RewardKind.ValueType | None = None,
) -> common_pb2.RewardEvent:
    """The outcome by default, for any other event a process signal."""
    outcome = event_id == "outcome"
    usual = common_pb2.REWARD_KIND_OUTCOME if outcome else common_pb2.REWARD_KIND_PROCESS
    return common_pb2.RewardEvent(
        event_id=event_id,
        name="exact_answer",
        kind=usual if kind is None else kind,
        value=value,
        turn_index=turn_index,
    )


def make_group(
    task_id: str = "task",
    queue_index: int = 0,
    *,
    purpose: common_pb2.Purpose.ValueType = common_pb2.PURPOSE_TRAIN,
    payload_json: str = "{}",
) -> common_pb2.GroupRecord:
    task = common_pb2.Task(
        task_id=task_id,
        domain="code",
        scaffold="whitebox",
        payload_json=payload_json,
        group_size=2,
        purpose=purpose,
    )
    return common_pb2.GroupRecord(
        task=task, queue_index=queue_index, state=common_pb2.GROUP_STATE_PENDING
    )


def damage(data_dir: Path, needle: bytes) -> None:
    """Flips one bit wherever a closed shard holds `needle`, old copies of its pages included."""
    path = data_dir / "data.mdb"
    data = path.read_bytes()
    assert needle in data
    path.write_bytes(data.replace(needle, bytes([needle[0] ^ 1]) + needle[1:]))


def recorded_tree(turns: Iterable[common_pb2.Turn]) -> TokenTree:
    """The sequences of recorded turns, as the trainer puts them together."""
    return TokenTree([turn_tokens(turn) for turn in turns])
