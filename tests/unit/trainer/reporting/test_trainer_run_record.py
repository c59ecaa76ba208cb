"""The record of a run, and the yield computed from it."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import pytest
import structlog

from forge.core.errors import Unavailable
from forge.v1 import trainer_pb2 as pb
from services.trainer.checkpoint.history import Entry, from_json
from services.trainer.reporting.run_record import TrainingRecord
from services.trainer.reporting.step_metrics import domain_yield, training_yield
from tests.support.runtime.disks import full_beyond


def step(number: int, *, reward: float = 0.0) -> pb.StepMetrics:
    return pb.StepMetrics(
        step=number,
        mean_reward=reward,
        reward_by_domain={"code": reward},
        domains={"code": pb.DomainMetrics(entropy=reward)},
        trained_tokens=100,
        trajectories=10,
        step_s=1.0,
        wait_s=0.5,
        publish_s=0.5,
    )


def evaluation(step: int, *, reward: float = 0.5) -> pb.Evaluation:
    own = pb.DomainEvaluation(mean_reward=reward, rollouts=2, task_outcomes={"7": reward})
    return pb.Evaluation(step=step, mean_reward=reward, tag=f"eval-s{step}", domains={"code": own})


def record(metrics_file: Path | str = "") -> TrainingRecord:
    return TrainingRecord(max_steps=9, metrics_file=str(metrics_file))


def kept(metrics_file: Path) -> list[Entry]:
    """As a checkpoint's history is read, too."""
    return [from_json(json.loads(line)) for line in metrics_file.read_text().splitlines()]


async def test_watcher_gets_past_and_current_steps() -> None:
    """Every step once, in order."""
    one = record()
    one.append(step(1))
    one.append(step(2))
    watch = one.watch(1)
    assert (await anext(watch)).step == 2
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    one.append(step(3))
    assert (await waiting).step == 3


async def test_repeated_steps_are_sent_again() -> None:
    """After a restore, a watcher gets the surviving lineage."""
    one = record()
    for number in (1, 2, 3):
        one.append(step(number))
    watch = one.watch(0)
    assert [(await anext(watch)).step for _ in range(3)] == [1, 2, 3]
    history = one.history.until(1)
    one.rewind(history)
    one.append(step(2, reward=0.5))
    again = await anext(watch)
    assert (again.step, again.mean_reward) == (2, 0.5)
    assert one.step == 2


def test_nan_metric_survives_a_checkpoint(tmp_path: Path) -> None:
    """Draft heads may diverge for a step; the stored form is JSON."""
    one = record(tmp_path / "metrics.jsonl")
    one.append(step(1, reward=float("inf")))
    one.append(pb.StepMetrics(step=2, mtp_loss=float("nan")))
    one.rewind(kept(tmp_path / "metrics.jsonl"))
    first, second = one.steps
    assert first == step(1, reward=float("inf"))
    assert second.step == 2 and math.isnan(second.mtp_loss)


def test_full_disk_of_the_metrics_file_stops_no_step(tmp_path: Path) -> None:
    """One line says so, and the missing steps are written with the next one that fits."""
    file = tmp_path / "metrics.jsonl"
    one = record(file)
    with structlog.testing.capture_logs() as logged:
        with full_beyond(10):
            one.rewind([step(1)])
            one.append(step(2))
        assert not file.exists()
        one.append(step(3))
        with full_beyond(file.stat().st_size + 10):
            one.append(step(4))
            one.evaluated(evaluation(4))
        one.append(step(5))
        one.append(step(6))
    assert [each.step for each in kept(file)] == [1, 2, 3, 4, 4, 5, 6]
    assert [line["event"] for line in logged] == ["metrics_not_written"] * 2


async def test_watchers_end_with_the_trainer() -> None:
    """A stream does not delay the end of the process."""
    one = record()
    waiting = asyncio.ensure_future(anext(one.watch(0)))
    await asyncio.sleep(0)
    one.close()
    with pytest.raises(Unavailable):
        await waiting


def test_metrics_file_follows_the_lineage(tmp_path: Path) -> None:
    """A line per step; a restore removes the lines of undone steps."""
    path = tmp_path / "run" / "metrics.jsonl"
    one = record(path)
    one.rewind([])
    for number in (1, 2, 3):
        one.append(step(number, reward=0.25))
    other = record(path)
    other.rewind(one.history.until(2))
    other.append(step(3, reward=0.75))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[2]["mean_reward"] == 0.75 and lines[0]["reward_by_domain"] == {"code": 0.25}
    assert lines[0]["domains"]["code"]["entropy"] == 0.25
    assert other.steps[0].domains["code"].entropy == 0.25


def test_evaluations_have_own_lines_and_follow_the_lineage(tmp_path: Path) -> None:
    """An evaluation of an undone step is removed; one that ended after the checkpoint of a later
    step stays."""
    path = tmp_path / "metrics.jsonl"
    one = record(path)
    one.rewind([])
    one.evaluated(evaluation(0))
    for number in (1, 2):
        one.append(step(number))
    history = kept(path)
    one.evaluated(evaluation(1, reward=0.75))
    one.append(step(3))
    one.evaluated(evaluation(3))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("step") for line in lines] == [None, 1, 2, None, 3, None]
    assert lines[3]["evaluation"]["domains"]["code"] == {
        "mean_reward": 0.75, "solved_share": 0.0, "length_tokens": 0.0, "rollouts": 2, "failed": 0,
        "mean_reward_low": 0.0, "mean_reward_high": 0.0, "task_outcomes": {"7": 0.75},
    }  # fmt: skip

    one.rewind(history)
    assert [(each.step, each.mean_reward) for each in one.evaluations] == [(0, 0.5), (1, 0.75)]
    assert one.status().latest_evaluation == evaluation(1, reward=0.75)
    other = record(path)
    other.rewind(history)
    assert list(other.evaluations) == [evaluation(0)] and other.step == 2
    assert kept(path) == history


def test_status_has_the_latest_step() -> None:
    """Before the first step there is none."""
    one = record()
    assert not one.status().HasField("latest")
    one.append(step(4))
    status = one.status()
    assert (status.step, status.max_steps, status.latest.step) == (4, 9, 4)


def test_status_has_every_evaluation_on_request() -> None:
    """Oldest first and without outcomes per task; the record keeps those."""
    one = record()
    for number in (0, 1):
        one.evaluated(evaluation(number, reward=0.5))
    assert not one.status().evaluations
    found = one.status(with_evaluations=True).evaluations
    assert [each.step for each in found] == [0, 1]
    assert found[1].domains["code"].mean_reward == 0.5
    assert not found[1].domains["code"].task_outcomes
    assert one.evaluations[1].domains["code"].task_outcomes


def test_yield_is_throughput_times_gain_per_trajectory() -> None:
    """100 tokens in 2 s a step; reward from .2 to .6 over 40 trajectories: 50 * .4 / 40."""
    steps = [step(1, reward=0.2), step(2, reward=0.2), step(3, reward=0.6), step(4, reward=0.6)]
    assert training_yield(steps).j == pytest.approx(50 * 0.4 / 40)


def test_domain_yield_has_its_own_tokens_and_the_whole_time() -> None:
    """qa has 30 tokens and 4 trajectories in two of four steps: 60/8 * (.5 - .1) / 8."""
    steps = [step(number) for number in range(1, 5)]
    for index, reward in ((0, 0.1), (3, 0.5)):
        own = pb.DomainMetrics(mean_reward=reward, trained_tokens=30, trajectories=4)
        steps[index].domains["qa"].CopyFrom(own)
    assert domain_yield(steps, "qa").j == pytest.approx(60 / 8 * 0.4 / 8)
    assert domain_yield(steps, "code").j == 0.0


def test_yield_needs_two_steps() -> None:
    """A loss of reward is a negative yield."""
    assert training_yield([]).j == training_yield([step(1, reward=0.5)]).j == 0.0
    assert training_yield([step(1, reward=0.5), step(2, reward=0.1)]).j < 0
