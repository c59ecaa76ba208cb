"""Leaves the turns of other models out of a trajectory: only the policy is trained.

Such a turn has no tokens and no turn extends it, so the rest is a trajectory of its own. Rewards of
an omitted turn count for the policy's turn before it, which made the call.
"""

from __future__ import annotations

from bisect import bisect_left

from forge.v1 import common_pb2 as pb


def policy_turns(trajectory: pb.Trajectory) -> list[int]:
    """The indices of the policy's turns, by their place in its part of the trajectory."""
    return [turn.turn_index for turn in trajectory.turns if not turn.HasField("other_model")]


def policy_part(trajectory: pb.Trajectory) -> tuple[pb.Trajectory, int]:
    """Returns the trajectory of the policy's turns, and the number of omitted turns."""
    own = [turn for turn in trajectory.turns if not turn.HasField("other_model")]
    omitted = len(trajectory.turns) - len(own)
    if not omitted:
        return trajectory, 0
    indices = [turn.turn_index for turn in own]
    places = {index: place for place, index in enumerate(indices)}
    part = pb.Trajectory()
    part.CopyFrom(trajectory)
    del part.turns[:]
    for place, turn in enumerate(own):
        kept = part.turns.add()
        kept.CopyFrom(turn)
        kept.turn_index = place
        # A parent that is no turn of the policy makes the trajectory inconsistent.
        kept.parent_turn = places.get(turn.parent_turn, turn.parent_turn)
        kept.ClearField("turns_before")
    for reward in part.rewards:
        if reward.turn_index >= 0:
            before = bisect_left(indices, reward.turn_index + 1) - 1
            reward.turn_index = max(0, before)
    return part, omitted
