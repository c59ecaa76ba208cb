"""Means of named rewards."""

from __future__ import annotations

from forge.v1 import common_pb2 as pb
from services.trainer.samples import reward_components as components
from services.trainer.samples.reward_components import named_rewards, reward_components

OUTCOME, PROCESS = pb.REWARD_KIND_OUTCOME, pb.REWARD_KIND_PROCESS


def trajectory(*rewards: pb.RewardEvent) -> tuple[tuple[str, float], ...]:
    return named_rewards(pb.Trajectory(rewards=rewards))


def reward(name: str, value: float, kind: pb.RewardKind.ValueType = PROCESS) -> pb.RewardEvent:
    return pb.RewardEvent(event_id=name, name=name, value=value, kind=kind)


def test_mean_is_over_the_trajectories_that_have_the_reward() -> None:
    """Several of one trajectory are one sum; what agents say of themselves is no component."""
    found = reward_components(
        [
            trajectory(
                reward("tests", 1.0, OUTCOME), reward("calls", -0.5), reward("calls", -0.25)
            ),
            trajectory(reward("tests", 0.0, OUTCOME), reward("mine", 1.0, pb.REWARD_KIND_AGENT)),
        ]
    )
    assert found == {"calls": -0.75, "tests": 0.5}


def test_number_of_names_is_bounded() -> None:
    """The most frequent ones stay, whatever graders write."""
    many = [trajectory(reward(f"n{number}", 1.0)) for number in range(90)]
    found = reward_components([*many, trajectory(reward("n77", 0.0))])
    assert len(found) == components.MOST_NAMES and found["n77"] == 0.5
