"""Speed beside outcomes: what it may add to an advantage, and what it must leave alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forge.core.credit.completion_time import BASELINE_STEPS
from forge.core.credit.rewards import speed_reward
from forge.core.token_columns import float32_array
from forge.runtime.settings import load
from forge.v1 import common_pb2 as pb
from forge.v1 import trainer_pb2
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.reporting.run_record import TrainingRecord
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.samples import BatchSamples, build_samples
from services.trainer.samples.speed import speed_baselines
from tests.support.trainer.trajectories import outcome, reward, trajectory, turn

PRESETS = ("cispo", "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce_pp", "reinforce")
BASELINE_S = 2.0


def rules_of(algorithm: str, *options: str) -> CreditRules:
    argv = ["--objective.algorithm", algorithm, *options]
    return load(TrainerConfig, service="trainer", argv=argv, environ={}).credit_rules()


def told(solved: float, completion_s: float) -> pb.Trajectory:
    """A rollout that reports its own speed."""
    speed = reward(pb.REWARD_KIND_SPEED, speed_reward(completion_s, BASELINE_S))
    return trajectory([turn(0, [1, 2], [3])], [outcome(solved), speed])


def timed(
    agent_s: Sequence[float], *, tokens: int = 1, closing_s: float = 0.0, domain: str = "code"
) -> pb.Trajectory:
    """A solved rollout whose turns come one after the other, with so much tool time before each."""
    turns = []
    for index, seconds in enumerate(agent_s):
        one = turn(index, [1, 2], [3] * tokens)
        one.timings.agent_s, one.turns_before = seconds, index
        turns.append(one)
    made = trajectory(turns, [outcome(1)], domain=domain)
    made.closing_agent_s = closing_s
    return made


def credit(*group: pb.Trajectory, baseline_s: float = 4.0) -> BatchSamples:
    """With a speed step of a hundredth, an advantage of as many hundredths as the speeds differ."""
    rules = rules_of(
        "cispo",
        "--rewards.beta=1",
        "--rewards.speed-step=0.01",
        "--nominal-tokens-per-s=10",
    )
    return build_samples([group], rules, baselines_s={"code": baseline_s})


def advantages(batch: BatchSamples) -> Sequence[float]:
    return [float(float32_array(sample.advantages)[0]) for sample in batch.samples]


@pytest.mark.parametrize("algorithm", PRESETS)
def test_tool_time_differences_of_50_us_are_no_advantage(algorithm: str) -> None:
    """Four equally correct rollouts whose tools differ by 50 us are a flat group."""
    group = [told(1, 1.0 + 50e-6 * late) for late in range(4)]
    batch = build_samples([group], rules_of(algorithm))
    assert advantages(batch) == pytest.approx([0.0] * 4, abs=1e-9)
    assert batch.flat_groups == 1


@pytest.mark.parametrize("algorithm", ["cispo", "grpo", "dr_grpo", "dapo", "gspo", "rloo"])
def test_group_that_differs_only_in_speed_is_flat(algorithm: str) -> None:
    """With drop_flat_groups it is not trained."""
    group = [told(1, seconds) for seconds in (1.0, 2.0, 4.0, 9.0)]
    batch = build_samples([group], rules_of(algorithm, "--advantages.drop-flat-groups"))
    assert (batch.flat_groups, batch.samples) == (1, ())


@pytest.mark.parametrize("algorithm", PRESETS)
def test_speed_reward_does_not_depend_on_the_spread_of_outcomes(algorithm: str) -> None:
    """At 2 s and 6 s of 2 s speeds are 1/2 and 1/4, a group mean of 3/8: beta times an eighth, in
    steps of 0.05, is 0.01 more for the fast one and 0.01 less for the slow one."""
    rules = rules_of(algorithm)
    plain = replace(rules, weights=replace(rules.weights, beta=0.0))
    for outcomes in ((1, 1), (1, 0), (0, 1)):
        group = [told(outcomes[0], 2.0), told(outcomes[1], 6.0)]
        without = advantages(build_samples([group], plain))
        found = advantages(build_samples([group], rules))
        gained = [one - other for one, other in zip(found, without, strict=True)]
        assert gained == pytest.approx([0.01, -0.01], abs=1e-6)


def test_speed_reward_is_credited_to_the_last_turn() -> None:
    """Discounted towards the first turn; a rollout without turns has none."""
    rules = rules_of("cispo", "--rewards.gamma=0.5", "--rewards.beta=1")
    fast = trajectory(
        [turn(0, [1], [2]), turn(1, [3], [4], parent=0, prefix=2)],
        [reward(pb.REWARD_KIND_SPEED, 0.75)],
    )
    slow = trajectory([turn(0, [1], [5])], [reward(pb.REWARD_KIND_SPEED, 0.5)])
    found = advantages(build_samples([[fast, slow, trajectory([], [])]], rules))
    assert found == pytest.approx([0.05, 0.1, -0.1])


def test_critic_target_includes_the_speed_reward() -> None:
    """Its target is the return-to-go plus the speed reward."""
    batch = build_samples([[told(1, 2.0), told(1, 6.0)]], rules_of("ppo"))
    returns = [float(float32_array(sample.returns)[0]) for sample in batch.samples]
    assert returns == pytest.approx([1.01, 0.99])


def test_tool_time_counts_as_completion_time() -> None:
    """For any agent: tools of 4 s and 12 s alone have speeds 1/2 and 1/4."""
    batch = credit(timed([4.0], tokens=0), timed([12.0], tokens=0))
    assert batch.completions_s == {"code": [4.0, 12.0]}
    # No token was sampled, so nothing is trained.
    assert advantages(batch) == []
    found = advantages(credit(timed([3.9]), timed([11.9])))
    assert found == pytest.approx([0.12, -0.12])


def test_long_answers_count_as_completion_time() -> None:
    """40 tokens at 10 a second are 4 s, as 4 s of tools are."""
    batch = credit(timed([0.0], tokens=40), timed([3.9], tokens=1), timed([0.0], tokens=120))
    assert batch.completions_s == {"code": [4.0, 4.0, 12.0]}
    found = advantages(batch)
    assert found[0] == found[1] > 0 > found[2]


def test_time_after_the_last_answer_counts_as_completion_time() -> None:
    """What it does after its last answer."""
    batch = credit(timed([1.0], tokens=10), timed([1.0], tokens=10, closing_s=4.0))
    assert batch.completions_s == {"code": [2.0, 6.0]}


def test_records_without_times_have_no_speed() -> None:
    """They are counted, and not compared; also in a domain without a baseline."""
    old, unclosed = timed([1.0]), timed([1.0])
    old.turns[0].ClearField("turns_before")
    unclosed.ClearField("closing_agent_s")
    batch = credit(old, unclosed, timed([3.9]), timed([11.9]))
    assert advantages(batch) == pytest.approx([0.0, 0.0, 0.12, -0.12])
    assert batch.untimed == 2
    rules = rules_of("cispo", "--rewards.beta=1")
    assert advantages(build_samples([[timed([1.0]), timed([9.0])]], rules)) == [0.0, 0.0]


def test_impossible_times_give_no_speed() -> None:
    """A turn before its predecessor: no speed, and the rollout is trained."""
    odd = timed([1.0])
    odd.turns[0].turns_before = 3
    batch = credit(odd, timed([1.0]))
    assert (batch.untimed, batch.trajectories, batch.excluded) == (1, 2, 0)


def test_speed_of_the_task_replaces_the_measured_speed() -> None:
    """For the whole group; the formula of earlier runners does not."""
    own, other = timed([99.0]), timed([1.0])
    own.rewards.append(reward(pb.REWARD_KIND_SPEED, 0.9))
    assert advantages(credit(own, other, timed([3.0]))) == [0.0] * 3
    other.rewards.append(reward(pb.REWARD_KIND_SPEED, 0.5))
    assert advantages(credit(own, other)) == pytest.approx([0.2, -0.2])
    for one in (own, other):
        one.rewards[-1].name = "completion_time"
    found = advantages(credit(own, other))
    assert found[0] < 0 < found[1]


def step(number: int = 0, **domains: tuple[int, float]) -> trainer_pb2.StepMetrics:
    """Per domain how many rollouts have a completion time, and the median."""
    metrics = trainer_pb2.StepMetrics(step=number)
    for name, (timed_trajectories, median_s) in domains.items():
        own = metrics.domains[name]
        own.timed_trajectories, own.completion_s = timed_trajectories, median_s
    return metrics


def test_restart_has_the_speed_baselines_of_its_checkpoint(tmp_path: Path) -> None:
    """Of the steps up to it; a checkpoint of an earlier version has none."""
    steps = [step(number, code=(8, float(number))) for number in range(1, 6)]
    before = trainer_pb2.StepMetrics(step=1)
    before.domains["code"].mean_reward = 1.0
    for history, expected in ((steps, {"code": 2.0}), ([before] * 3, {})):
        store = CheckpointStore(tmp_path / str(len(history)))
        kept = CheckpointHistory(history)
        store.save(lambda path: None, step=3, weight_version=3, history=kept)
        (checkpoint,) = CheckpointStore(tmp_path / str(len(history))).newest_first()
        record = TrainingRecord(max_steps=0, metrics_file="")
        record.rewind(checkpoint.history)
        assert speed_baselines(record.steps) == expected


def test_speed_baseline_is_measured_in_earlier_steps() -> None:
    """Per domain, over the last steps, once two groups of eight are known."""
    assert speed_baselines([step(code=(15, 3.0))]) == {}
    steps = [step(code=(8, 3.0), qa=(8, 1.0)), step(code=(8, 5.0)), step(qa=(0, 0.0))]
    assert speed_baselines(steps) == {"code": 4.0}
    assert speed_baselines([*steps, *[step(code=(8, 9.0))] * BASELINE_STEPS]) == {"code": 9.0}
