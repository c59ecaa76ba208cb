"""Sealed trajectories of chosen tokens and rewards."""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.token_columns import float32_bytes, int32_bytes
from forge.v1 import common_pb2 as pb


def turn(
    index: int, prompt: Sequence[int], sampled: Sequence[int], *, parent: int = -1, prefix: int = 0
) -> pb.Turn:
    return pb.Turn(
        turn_index=index,
        parent_turn=parent,
        prefix_tokens=prefix,
        prompt_ids=int32_bytes(prompt),
        sampled=pb.SampledTokens(
            ids=int32_bytes(sampled),
            logprobs=float32_bytes([-0.5 - n for n in range(len(sampled))]),
            weight_versions=int32_bytes([3] * len(sampled)),
        ),
        finish_reason=pb.FINISH_REASON_STOP,
        temperature=0.7,
    )


def reward(kind: pb.RewardKind.ValueType, value: float, turn_index: int = -1) -> pb.RewardEvent:
    return pb.RewardEvent(event_id=f"{kind}-{turn_index}", kind=kind, value=value,
                          turn_index=turn_index)  # fmt: skip


def outcome(value: float) -> pb.RewardEvent:
    return reward(pb.REWARD_KIND_OUTCOME, value)


def trajectory(
    turns: Sequence[pb.Turn], rewards: Sequence[pb.RewardEvent], *, domain: str = "code"
) -> pb.Trajectory:
    return pb.Trajectory(
        trajectory_id="task:0:0",
        domain=domain,
        state=pb.TRAJECTORY_STATE_SEALED,
        turns=turns,
        rewards=rewards,
    )
