"""Weights & Biases, offline, and Trackio: the real packages, by `make test-trackers`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog

from forge.v1 import trainer_pb2 as pb
from services.trainer.batches.logged_rollouts import LoggedRollout
from services.trainer.config import TrainerConfig
from services.trainer.reporting import sinks
from services.trainer.reporting.queued_sink import QueuedSink
from services.trainer.reporting.run_record import TrainingRecord
from tests.support.runtime.waiting import LIMIT_S, until_blocking
from tests.support.trainer.wandb_file import history

# Not imported before the fixture: Trackio reads its directory as it is imported.
pytestmark = pytest.mark.skipif(
    not (find_spec("wandb") and find_spec("trackio")), reason="runs by `make test-trackers`"
)

ROLLOUT = LoggedRollout("t:0:0", "code", 1.0, '{"tests": 1.0}', 2, '[{"role": "user"}]')
EVALUATION = pb.Evaluation(step=2, mean_reward=0.5)
NO_VALUE = float("nan")
RUNS = "wandb/offline-run-*/run-*.wandb"


@pytest.fixture(scope="module", autouse=True)
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where both packages write; neither calls anything. They read their variables once. Sinks get
    more time for their end than in a process that stops: a package starts processes of its own."""
    folder = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("WANDB_MODE", "offline"),
            ("WANDB_DIR", str(folder)),
            ("TRACKIO_DIR", str(folder)),
            ("HF_HUB_OFFLINE", "1"),
        ):
            patch.setenv(name, value)
        patch.setattr(sinks, "QueuedSink", partial(QueuedSink, close_s=LIMIT_S))
        yield folder


@pytest.fixture
def earlier(directory: Path) -> set[Path]:
    """The runs of Weights & Biases of earlier tests."""
    return set(directory.glob(RUNS))


def step(number: int, loss: float = 0.5) -> pb.StepMetrics:
    return pb.StepMetrics(step=number, loss=loss, reward_by_domain={"code": 0.25})


def record(package: str) -> TrainingRecord:
    config = TrainerConfig(**{f"{package}_project": "forge", "cluster": "c"})  # type: ignore[arg-type]
    return TrainingRecord(max_steps=9, metrics_file="", sinks=sinks.make_sinks(config))


def train(package: str) -> list[Any]:
    """Three steps, one of them without a loss, a table, an evaluation of step 2, and step 4; then a
    restore to step 2. Returns the warnings."""
    with structlog.testing.capture_logs() as logged:
        run = record(package)
        run.rewind([])
        for number, loss in enumerate((0.5, NO_VALUE, 0.25), 1):
            run.append(step(number, loss))
        run.show_rollouts([ROLLOUT])
        run.evaluated(EVALUATION)
        run.append(step(4))
        run.rewind(run.history.until(2))
        run.append(step(3, 0.125))
        run.close_sinks()
    return logged


def test_wandb_keeps_every_step(directory: Path, earlier: set[Path]) -> None:
    """With the table at its step, the evaluation over an axis of its own, and a run of its own for
    the steps after a restore."""
    assert train("wandb") == []
    files = set(directory.glob(RUNS)) - earlier
    # The package's own process writes the last records after the end of the run.
    until_blocking(lambda: sum(len(history(file)) for file in files) == 5)
    first, second = sorted(map(history, files), key=len, reverse=True)
    assert [row["_step"] for row in first] == [1, 2, 3, 4]
    assert [row["loss"] for row in first[::2]] == [0.5, 0.25]
    assert first[0]["reward_by_domain/code"] == 0.25
    assert (first[2]["evaluation/step"], first[2]["evaluation/mean_reward"]) == (2, 0.5)
    assert [(row["_step"], row["loss"]) for row in second] == [(3, 0.125)]
    (table,) = directory.glob("wandb/*/files/media/table/rollouts_*.json")
    shown = json.loads(table.read_text())
    assert shown["columns"] == list(ROLLOUT._fields) and shown["data"] == [list(ROLLOUT)]


def test_trackio_keeps_every_step(directory: Path) -> None:
    """The same, with the evaluation at its own step."""
    assert train("trackio") == []
    file = directory / "forge.db"
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_id, step, metrics from metrics order by id").fetchall()
    runs = list(dict.fromkeys(run for run, *_ in rows))
    assert len(runs) == 2
    first = [(number, json.loads(values)) for run, number, values in rows if run == runs[0]]
    assert [number for number, _ in first] == [1, 2, 3, 3, 2, 4]
    assert first[0][1]["loss"] == 0.5 and first[0][1]["reward_by_domain/code"] == 0.25
    assert first[3][1]["rollouts"]["_value"] == [ROLLOUT._asdict()]
    assert first[4][1]["evaluation/mean_reward"] == 0.5
    second = [
        (number, json.loads(values)["loss"]) for run, number, values in rows if run == runs[1]
    ]
    assert second == [(3, 0.125)]


def test_lost_process_of_wandb_costs_its_run_alone(directory: Path, earlier: set[Path]) -> None:
    """One line, whatever the package raises; training continues to its end."""
    with structlog.testing.capture_logs() as logged:
        run = record("wandb")
        run.rewind([])
        run.append(step(1))
        until_blocking(lambda: set(directory.glob(RUNS)) - earlier)
        for process in psutil.Process().children(recursive=True):
            if "wandb" in process.name():
                process.kill()
        for number in range(2, 6):
            run.append(step(number))
        run.close_sinks()
    assert {line["event"] for line in logged} == {"metrics_not_written"} and len(logged) == 1
    assert run.step == 5


UNREACHABLE = """
import sys
from forge.v1 import trainer_pb2 as pb
from services.trainer.reporting.queued_sink import QueuedSink
from services.trainer.reporting.sinks import WandbSink

sink = QueuedSink(WandbSink("forge", name="c"), most=2, close_s=0.5)
sink.begin(0)
for number in range(1, 6):
    sink.write(pb.StepMetrics(step=number))
sink.close()
print("closed")
"""


def test_process_ends_while_wandb_is_unreachable(directory: Path) -> None:
    """Its queue is bounded, and so is the wait for it: the package tries for minutes otherwise."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # Without the variable by which W&B's process of this test would serve that one, too.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_SERVICE")}
        environment = inherited | {
            "WANDB_MODE": "online",
            "WANDB_API_KEY": "0" * 40,
            "WANDB_BASE_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "WANDB_INIT_TIMEOUT": "2",
        }
        ended = subprocess.run(
            [sys.executable, "-c", UNREACHABLE],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert "closed" in ended.stdout and ended.returncode != -signal.SIGKILL
    assert "2 entries wait already" in ended.stdout + ended.stderr
    assert "entries wait after 0.5 s" in ended.stdout + ended.stderr
