"""Metrics elsewhere: TensorBoard's files, Weights & Biases, and neither in training's way."""

from __future__ import annotations

import builtins
import json
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from tensorboardX.proto import event_pb2

from forge.core.errors import ConfigError
from forge.v1 import common_pb2
from forge.v1 import trainer_pb2 as pb
from services.trainer.batches.logged_rollouts import LoggedRollout, logged_rollouts
from services.trainer.config import TrainerConfig
from services.trainer.reporting.queued_sink import QueuedSink
from services.trainer.reporting.run_record import TrainingRecord
from services.trainer.reporting.sinks import TensorBoardSink, make_sinks, rollout_tables, scalars
from tests.support.pool.records import make_turn
from tests.support.runtime.disks import full_beyond
from tests.support.runtime.waiting import until_blocking
from tests.support.trainer.trackers import Table, Tracker

STEP = pb.StepMetrics(
    step=3,
    loss=0.5,
    reward_by_domain={"code": 0.25},
    domains={"code": pb.DomainMetrics(entropy=1.5)},
)


EVALUATION = pb.Evaluation(
    step=2,
    mean_reward=0.5,
    tag="eval-s2",
    domains={"code": pb.DomainEvaluation(solved_share=0.25)},
)


def record(**settings: Any) -> TrainingRecord:
    return TrainingRecord(max_steps=9, metrics_file="", sinks=make_sinks(TrainerConfig(**settings)))


def events(directory: Path) -> Iterator[tuple[int, str, float]]:
    """Every scalar in the files TensorBoard reads, each up to where it ends or is torn."""
    for file in sorted(directory.iterdir()):
        data = file.read_bytes()
        while len(data) >= 16 and len(data) >= 16 + (size := struct.unpack("<Q", data[:8])[0]):
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            for value in event.summary.value:
                yield event.step, value.tag, value.simple_value


def test_sink_names_are_those_of_the_record() -> None:
    """Maps become paths; the step is the axis."""
    named = scalars(STEP)
    assert named["loss"] == 0.5 and named["reward_by_domain/code"] == 0.25
    assert named["domains/code/entropy"] == 1.5
    assert "step" not in named


def test_every_step_is_in_tensorboards_files(tmp_path: Path) -> None:
    """All metrics of the record, under the step's number."""
    run = record(tensorboard_dir=str(tmp_path / "board"))
    run.rewind([])
    run.append(STEP)
    run.evaluated(EVALUATION)
    run.close_sinks()
    found = list(events(tmp_path / "board"))
    assert (3, "loss", 0.5) in found and (3, "domains/code/entropy", 1.5) in found
    assert (2, "evaluation/mean_reward", 0.5) in found
    assert (2, "evaluation/domains/code/solved_share", 0.25) in found


def test_restore_keeps_earlier_tensorboard_files(tmp_path: Path) -> None:
    """The next file begins later, however soon it is opened: TensorBoard hides the undone steps."""
    run = record(tensorboard_dir=str(tmp_path))
    run.rewind([])
    for number in (1, 2):
        run.append(pb.StepMetrics(step=number, loss=number))
    run.rewind(run.history.until(1))
    run.append(pb.StepMetrics(step=2, loss=0.5))
    run.close_sinks()
    losses = [(step, value) for step, name, value in events(tmp_path) if name == "loss"]
    assert losses == [(1, 1.0), (2, 2.0), (2, 0.5)]


def test_full_disk_costs_tensorboard_the_steps_of_the_outage(tmp_path: Path) -> None:
    """Later steps are in a new file: readers stop at a torn line."""
    sink = TensorBoardSink(tmp_path)
    sink.begin(0)
    sink.write(STEP)
    (file,) = tmp_path.iterdir()
    with full_beyond(file.stat().st_size + 20), pytest.raises(OSError, match="File too large"):
        sink.write(pb.StepMetrics(step=4))
    sink.write(pb.StepMetrics(step=5))
    sink.close()
    assert {step for step, *_ in events(tmp_path)} == {3, 5}


def tracked(monkeypatch: pytest.MonkeyPatch, package: str) -> Tracker:
    """A stand-in for the package."""
    stand_in = Tracker(package)
    monkeypatch.setitem(sys.modules, package, stand_in)
    return stand_in


def test_wandb_gets_steps_and_a_restore_starts_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package accepts no earlier step. However often a restore is tried, it is one run."""
    tracker = tracked(monkeypatch, "wandb")
    run = record(wandb_project="p", cluster="c")
    run.rewind([])
    run.append(STEP)
    for _ in range(3):
        run.rewind([])
    run.append(STEP)
    run.close_sinks()
    assert [one.name for one in tracker.runs] == ["c-from-0"] * 2
    for one in tracker.runs:
        assert [(step, values["loss"]) for step, values in one.logged] == [(3, 0.5)]
        assert one.finished


ROLLOUT = LoggedRollout("t:0:0", "code", 1.0, '{"tests": 1.0}', 2, "[]")


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_trackers_get_a_table_of_rollouts(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns are those of a row; both packages have one interface."""
    tracker = tracked(monkeypatch, package)
    kept = record(**{f"{package}_project": "p"})
    kept.rewind([])
    kept.append(STEP)
    kept.show_rollouts([ROLLOUT])
    kept.close_sinks()
    columns = ["trajectory_id", "domain", "reward", "components", "turns", "conversation"]
    (run,) = tracker.runs
    assert run.logged[1] == (3, {"rollouts": Table(columns, [list(ROLLOUT)])})


def test_trackio_gets_an_evaluation_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes earlier steps, unlike Weights & Biases."""
    tracker = tracked(monkeypatch, "trackio")
    kept = record(trackio_project="p")
    kept.rewind([])
    kept.append(STEP)
    kept.evaluated(EVALUATION)
    kept.close_sinks()
    (run,) = tracker.runs
    assert [step for step, _ in run.logged] == [3, 2]
    assert run.logged[1][1]["evaluation/mean_reward"] == 0.5


def test_rollouts_of_many_groups_come_first() -> None:
    """One of each group, before the second of any; without messages on record there is no text."""
    turn = make_turn(
        messages_json='{"messages": [{"role": "user", "content": "2+2"}], '
        '"answer": {"role": "assistant", "content": "4"}}'
    )
    groups = [
        [common_pb2.Trajectory(trajectory_id=f"{task}:{at}:0", turns=[turn]) for at in range(2)]
        for task in "ab"
    ]
    groups[1][0].ClearField("turns")
    rows = logged_rollouts(groups, 3)
    assert [row.trajectory_id for row in rows] == ["a:0:0", "b:0:0", "a:1:0"]
    assert json.loads(rows[0].conversation)[-1]["content"] == "4" and rows[1].conversation == ""
    assert logged_rollouts(groups, 0) == ()


def test_sink_that_fails_at_start_begins_with_a_later_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An outage as training starts costs the steps of the outage, not the run."""
    calls: list[Any] = []

    def init(**settings: Any) -> Any:
        calls.append(settings["name"])
        if len(calls) < 3:
            raise ConnectionError("no network")
        return SimpleNamespace(log=lambda values, step: calls.append(step), finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = record(wandb_project="p", cluster="c")
    run.rewind([])
    for number in (1, 2, 3, 4):
        run.append(pb.StepMetrics(step=number))
    run.close_sinks()
    assert calls == ["c-from-0", "c-from-0", "c-from-0", 3, 4]


def test_wandb_run_that_cannot_be_finished_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run after a restore loses a step by it, and begins its own."""
    calls: list[Any] = []

    def finish() -> None:
        raise ConnectionError("no network")

    def init(**settings: Any) -> Any:
        calls.append(settings["name"])
        return SimpleNamespace(log=lambda values, step: calls.append(step), finish=finish)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = record(wandb_project="p", cluster="c")
    for _ in range(2):
        run.rewind([])
        for number in (1, 2):
            run.append(pb.StepMetrics(step=number))
    run.close_sinks()
    assert calls == ["c-from-0", 1, 2, "c-from-0", 2]


def test_full_disk_of_a_sink_stops_neither_training_nor_its_end(tmp_path: Path) -> None:
    """One line says so, and no empty files are left."""
    with structlog.testing.capture_logs() as logged, full_beyond(0):
        run = record(tensorboard_dir=str(tmp_path))
        run.rewind([])
        for number in range(1, 30):
            run.append(pb.StepMetrics(step=number))
        run.close_sinks()
    assert [line["event"] for line in logged] == ["metrics_not_written"]
    assert run.step == 29 and not list(tmp_path.iterdir())


def test_failing_sink_is_one_line_and_stops_nothing(tmp_path: Path) -> None:
    """For any number of failed steps."""
    (tmp_path / "file").touch()
    with structlog.testing.capture_logs() as logged:
        run = record(tensorboard_dir=str(tmp_path / "file" / "board"))
        run.rewind([])
        for _ in range(3):
            run.append(STEP)
        run.close_sinks()
    assert [line["event"] for line in logged] == ["metrics_not_written"]
    assert run.step == 3


def test_trackers_with_rollouts_are_named() -> None:
    """An erasure does not reach these; curves have no prompt."""
    config = TrainerConfig(model_path="m", wandb_project="w", trackio_project="t")
    places = rollout_tables(replace(config, logged_rollouts=1))
    assert places == ["project w of Weights & Biases", "project t of Trackio"]
    assert rollout_tables(config) == []
    board = TrainerConfig(model_path="m", logged_rollouts=1, tensorboard_dir="x")
    assert rollout_tables(board) == []


@pytest.mark.parametrize(
    ("settings", "missing", "install"),
    [
        ({"tensorboard_dir": "x"}, "tensorboardX", r"pip install 'forge-rl\[tensorboard\]'"),
        ({"wandb_project": "x"}, "wandb", r"pip install 'forge-rl\[wandb\]'"),
        ({"trackio_project": "x"}, "trackio", r"pip install 'forge-rl\[trackio\]'"),
    ],
)
def test_missing_sink_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], missing: str, install: str
) -> None:
    """Naming the setting and the package to install."""
    real: Callable[..., Any] = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == missing:
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} = 'x' .*{install}"):
        make_sinks(TrainerConfig(**settings))


def test_evaluation_has_its_own_axis_in_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after later steps, and the package accepts no earlier step."""
    tracker = tracked(monkeypatch, "wandb")
    run = record(wandb_project="p", cluster="c")
    run.rewind([])
    run.append(STEP)
    run.evaluated(EVALUATION)
    run.close_sinks()
    (one,) = tracker.runs
    assert one.axes == {"evaluation/*": "evaluation/step"}
    step, values = one.logged[-1]
    assert (step, values["evaluation/step"], values["evaluation/mean_reward"]) == (3, 2, 0.5)
    assert not any("tag" in name for name in values)


class HangingSink(TensorBoardSink):
    """A sink whose package waits for its network, until it is released."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.entered, self.released = threading.Event(), threading.Event()

    def begin(self, step: int) -> None:
        self.entered.set()
        assert self.released.wait(60)
        super().begin(step)


def test_sink_that_hangs_costs_a_bounded_queue_and_wait(tmp_path: Path) -> None:
    """Steps beyond the queue are lost with one line, and the end of training waits no longer than
    its limit. What waited is written if the network returns in time, after its beginning."""
    hanging = HangingSink(tmp_path)
    with structlog.testing.capture_logs() as logged:
        sink = QueuedSink(hanging, most=2, close_s=0.0)
        sink.begin(0)
        sink.write(pb.StepMetrics(step=1, loss=1))
        assert hanging.entered.wait(60)
        for number in range(2, 9):
            sink.write(pb.StepMetrics(step=number, loss=number))
        sink.begin(6)
        sink.close()
    assert [line["error"] for line in logged] == [
        "2 entries wait already",
        "3 entries wait after 0 s",
    ]
    hanging.released.set()
    until_blocking(lambda: not sink.running)
    assert [step for step, name, _ in events(tmp_path) if name == "loss"] == [1, 2, 3]


def test_beginning_is_not_lost_with_a_full_queue(tmp_path: Path) -> None:
    """Steps after a restore never continue the run before it."""
    hanging = HangingSink(tmp_path)
    sink = QueuedSink(hanging, most=1, close_s=60.0)
    sink.begin(0)
    sink.write(pb.StepMetrics(step=5, loss=5))
    assert hanging.entered.wait(60)
    sink.write(pb.StepMetrics(step=6, loss=6))
    sink.begin(3)
    sink.write(pb.StepMetrics(step=4, loss=4))
    hanging.released.set()
    until_blocking(lambda: not sink.waiting)
    sink.write(pb.StepMetrics(step=5, loss=0.5))
    sink.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_rows_have_no_half_of_a_surrogate_pair() -> None:
    """An agent can send one as JSON; a tracker would drop the table."""
    turn = make_turn(
        messages_json='{"messages": [{"role": "user", "content": "a\\ud800b"}], '
        '"answer": {"role": "assistant", "content": "4"}}'
    )
    trajectory = common_pb2.Trajectory(trajectory_id="t:0:0", turns=[turn])
    (row,) = logged_rollouts([[trajectory]], 1)
    assert json.loads(row.conversation)[0]["content"] == "a?b"
