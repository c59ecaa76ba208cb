"""Sinks of the metrics of each step: TensorBoard, Weights & Biases and Trackio.

Owns the names of values and their writing. The packages are optional and imported only when
configured; all get the values of the record, named as in docs/services/trainer.md
(`domains/code/entropy`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from forge.core.errors import ConfigError
from forge.v1 import trainer_pb2 as pb
from services.trainer.batches.logged_rollouts import LoggedRollout
from services.trainer.checkpoint.history import EVALUATION
from services.trainer.config import TrainerConfig
from services.trainer.reporting.queued_sink import QueuedSink, Sink

ROLLOUTS = "rollouts"
"""Name of the table of rollouts."""
INIT_S = 20.0
"""Longest wait for Weights & Biases to begin a run."""


def make_sinks(config: TrainerConfig) -> list[Sink]:
    """The configured sinks. Raises `ConfigError` when a package is missing."""
    sinks: list[Sink] = []
    if config.tensorboard_dir:
        sinks.append(QueuedSink(TensorBoardSink(Path(config.tensorboard_dir))))
    if config.wandb_project:
        sinks.append(QueuedSink(WandbSink(config.wandb_project, name=config.cluster)))
    if config.trackio_project:
        sinks.append(QueuedSink(TrackioSink(config.trackio_project, name=config.cluster)))
    return sinks


def rollout_tables(config: TrainerConfig) -> list[str]:
    """Targets of tables of rollouts, which an erasure in the pool does not reach."""
    projects = {"Weights & Biases": config.wandb_project, "Trackio": config.trackio_project}
    return [
        f"project {project} of {tracker}"
        for tracker, project in projects.items()
        if project and config.logged_rollouts
    ]


def scalars(metrics: Message) -> dict[str, float]:
    """All numbers of a step or evaluation by path, without the step, which is the axis."""
    values: dict[str, float] = {}
    for field in metrics.DESCRIPTOR.fields:
        value = getattr(metrics, field.name)
        # One curve per task would be thousands of curves.
        if field.name in ("step", "task_outcomes") or isinstance(value, str):
            continue
        if not field.is_repeated:
            values[field.name] = float(value)
            continue
        for key, entry in value.items():
            if isinstance(entry, Message):
                values |= {f"{field.name}/{key}/{k}": v for k, v in scalars(entry).items()}
            else:
                values[f"{field.name}/{key}"] = float(entry)
    return values


def _evaluation_scalars(evaluation: pb.Evaluation) -> dict[str, float]:
    return {f"{EVALUATION}/{name}": value for name, value in scalars(evaluation).items()}


class TensorBoardSink:
    """Event files in a directory that `tensorboard --logdir` shows, one per lineage and process."""

    def __init__(self, directory: Path) -> None:
        try:
            # SummaryWriter hangs forever after its thread met a full disk: use RecordWriter.
            from tensorboardX import RecordWriter, summary
            from tensorboardX.proto import event_pb2
        except ImportError as error:
            raise ConfigError(
                f"tensorboard_dir = {str(directory)!r} needs the package tensorboardX: "
                "pip install 'forge-rl[tensorboard]'"
            ) from error
        self._make: Any = RecordWriter
        self._scalar: Any = summary.scalar
        self._events: Any = event_pb2
        self._directory = directory
        self._writer: Any = None
        self._files = 0

    def begin(self, step: int) -> None:
        """Begin a file; TensorBoard hides the rewound steps."""
        self.close()
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(self._events.Event(step=step + 1, session_log=start))

    def write(self, metrics: pb.StepMetrics) -> None:
        """Write the scalars of a step."""
        self._add(scalars(metrics), metrics.step)

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        """Write the scalars of an evaluation at its step."""
        self._add(_evaluation_scalars(evaluation), evaluation.step)

    def rollouts(self, step: int, rows: Sequence[LoggedRollout]) -> None:
        """Nothing: TensorBoard has no tables."""

    def close(self) -> None:
        """Close the file; a later write opens another."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _add(self, values: Mapping[str, float], step: int) -> None:
        event = self._events.Event(step=step)
        for name, value in values.items():
            event.summary.MergeFrom(self._scalar(name, value))
        self._write(event)

    def _write(self, event: Any) -> None:
        """Write and flush. After a failure the file may end in a partial record, which readers
        stop at: the next write opens another file."""
        writer, self._writer = self._writer or self._opened(), None
        self._record(writer, event)
        self._writer = writer

    def _opened(self) -> Any:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._files += 1
        host = f"{socket.gethostname()}.{os.getpid()}.{self._files}"
        file = self._directory / f"events.out.tfevents.{int(time.time()):010d}.{host}"
        writer = self._make(str(file))
        try:
            self._record(writer, self._events.Event(file_version="brain.Event:2"))
        except OSError:
            # Each step tries another file while the disk is full.
            file.unlink()
            raise
        return writer

    @staticmethod
    def _record(writer: Any, event: Any) -> None:
        event.wall_time = time.time()
        writer.write(event.SerializeToString())
        writer.flush()


class TrackerSink:
    """A run of a tracker with the interface of `wandb`: `init`, `log`, `Table`."""

    def __init__(self, package: str, setting: str, project: str, *, name: str) -> None:
        """Raises `ConfigError` without the package."""
        try:
            self._tracker: Any = import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"{setting} = {project!r} needs the package {package}: "
                f"pip install 'forge-rl[{package}]'"
            ) from error
        self._project, self._name = project, name
        self._options: dict[str, Any] = {}
        self._run: Any = None
        self._step = 0

    def begin(self, step: int) -> None:
        """Begin another run: steps cannot be taken back."""
        self._step = step
        self.close()
        self._run = self._tracker.init(
            project=self._project, name=f"{self._name}-from-{step}", **self._options
        )

    def write(self, metrics: pb.StepMetrics) -> None:
        """Log the scalars of a step."""
        self._step = metrics.step
        self._run.log(scalars(metrics), step=metrics.step)

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        """Log the scalars of an evaluation at its step, which is in the past."""
        self._run.log(_evaluation_scalars(evaluation), step=evaluation.step)

    def rollouts(self, step: int, rows: Sequence[LoggedRollout]) -> None:
        """Log a table; it has one row for each rollout."""
        table = self._tracker.Table(
            columns=list(LoggedRollout._fields), data=[list(row) for row in rows]
        )
        self._run.log({ROLLOUTS: table}, step=step)

    def close(self) -> None:
        """Finish the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()


class WandbSink(TrackerSink):
    """A run of Weights & Biases; the package reads its own settings (WANDB_API_KEY, WANDB_MODE)."""

    def __init__(self, project: str, *, name: str) -> None:
        super().__init__("wandb", "wandb_project", project, name=name)
        settings: dict[str, Any] = {"quiet": True}
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            # The end of the process waits for it; each step tries again.
            settings["init_timeout"] = INIT_S
        self._options = {"reinit": "finish_previous", "settings": settings}

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        """Log over an axis of its own: Weights & Biases refuses an earlier step."""
        axis = f"{EVALUATION}/step"
        self._run.define_metric(f"{EVALUATION}/*", step_metric=axis)
        values = {axis: evaluation.step, **_evaluation_scalars(evaluation)}
        self._run.log(values, step=self._step)


class TrackioSink(TrackerSink):
    """A run of Trackio; the package reads its own settings (TRACKIO_DIR, TRACKIO_SPACE_ID)."""

    def __init__(self, project: str, *, name: str) -> None:
        super().__init__("trackio", "trackio_project", project, name=name)
        # Forge has its own metrics of processes and GPUs.
        self._options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
