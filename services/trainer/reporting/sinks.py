"""Where else the metrics of each step go: TensorBoard, Weights & Biases.

Owns their names and writing. Both are optional packages, imported only when asked for; both get
what the record has, under the names of docs/training.md (`domains/code/entropy`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import Message

from forge.core.errors import ConfigError
from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2 as pb
from services.trainer.checkpoint.history import EVALUATION
from services.trainer.config import TrainerConfig


class Sink(Protocol):
    """Gets every step once per lineage, and evaluations as they end."""

    def begin(self, step: int) -> None:
        """Steps after `step` come now, and replace any that came before."""

    def write(self, metrics: pb.StepMetrics) -> None:
        """One more step."""

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        """One more evaluation ended; of a step that was written before, or of 0."""

    def close(self) -> None:
        """Nothing more comes."""


def make_sinks(config: TrainerConfig) -> list[Sink]:
    """Those that are configured. Raises `ConfigError` when a package is missing."""
    sinks: list[Sink] = []
    if config.tensorboard_dir:
        sinks.append(QueuedSink(TensorBoardSink(Path(config.tensorboard_dir))))
    if config.wandb_project:
        sinks.append(QueuedSink(WandbSink(config.wandb_project, name=config.cluster)))
    return sinks


class QueuedSink:
    """A sink on a thread of its own: neither its disk nor its network is training's concern."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._failed = False
        self._to_begin: int | None = None
        """A beginning that the sink has not taken yet: it comes with the next step that it takes.
        Training that cannot be resumed tries again and again, and no run is to be left of each."""

    def begin(self, step: int) -> None:
        self._submit(lambda: self._begin_next(step))

    def write(self, metrics: pb.StepMetrics) -> None:
        self._submit(lambda: self._begun().write(metrics))

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        self._submit(lambda: self._begun().evaluated(evaluation))

    def close(self) -> None:
        self._submit(self._sink.close)
        self._thread.shutdown()

    def _begin_next(self, step: int) -> None:
        self._to_begin = step

    def _begun(self) -> Sink:
        if self._to_begin is not None:
            self._sink.begin(self._to_begin)
            self._to_begin = None
        return self._sink

    def _submit(self, work: Callable[[], None]) -> None:
        self._thread.submit(work).add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        error = future.exception()
        # One line until it works again, not one per step.
        if error is not None and not self._failed:
            log.warning("metrics_not_written", sink=type(self._sink).__name__, error=repr(error))
        self._failed = error is not None


def scalars(metrics: Message) -> dict[str, float]:
    """Every number of a step, or evaluation, by its path; the step itself is the axis."""
    values: dict[str, float] = {}
    for field in metrics.DESCRIPTOR.fields:
        value = getattr(metrics, field.name)
        # A curve per task would be thousands.
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
            # Its own writer has a thread, and waits for it for good once a disk was full.
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
        self.close()
        # Steps that a restore took back are hidden from there on.
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(self._events.Event(step=step + 1, session_log=start))

    def write(self, metrics: pb.StepMetrics) -> None:
        self._add(scalars(metrics), metrics.step)

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        self._add(_evaluation_scalars(evaluation), evaluation.step)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _add(self, values: Mapping[str, float], step: int) -> None:
        event = self._events.Event(step=step)
        for name, value in values.items():
            event.summary.MergeFrom(self._scalar(name, value))
        self._write(event)

    def _write(self, event: Any) -> None:
        """On disk on return. What fails may be half in the file: nobody would read on after it."""
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
            # Each step tries another as long as the disk is full.
            file.unlink()
            raise
        return writer

    @staticmethod
    def _record(writer: Any, event: Any) -> None:
        event.wall_time = time.time()
        writer.write(event.SerializeToString())
        writer.flush()


class WandbSink:
    """A run of Weights & Biases; the package reads its own settings (WANDB_API_KEY, WANDB_MODE)."""

    def __init__(self, project: str, *, name: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"wandb_project = {project!r} needs the package wandb: pip install wandb"
            ) from error
        self._wandb: Any = wandb
        self._project, self._name = project, name
        self._run: Any = None
        self._step = 0

    def begin(self, step: int) -> None:
        self._step = step
        # It takes no step back: what is trained again after a restore is a run of its own.
        self.close()
        self._run = self._wandb.init(
            project=self._project, name=f"{self._name}-from-{step}", reinit="finish_previous"
        )

    def write(self, metrics: pb.StepMetrics) -> None:
        self._step = metrics.step
        self._run.log(scalars(metrics), step=metrics.step)

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        # Nor does it take an earlier step: these have an axis of their own.
        axis = f"{EVALUATION}/step"
        self._run.define_metric(f"{EVALUATION}/*", step_metric=axis)
        values = {axis: evaluation.step, **_evaluation_scalars(evaluation)}
        self._run.log(values, step=self._step)

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
