"""The state of a run so far: phase, versions, the metrics of every step, evaluations.

Owns the history, its file and the watchers of new steps. Used on the event loop alone, by training
and by the RPCs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from forge.core.errors import Unavailable
from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2 as pb
from services.trainer.batches.logged_rollouts import LoggedRollout
from services.trainer.checkpoint.history import CheckpointHistory, Entry, Extent, extend
from services.trainer.reporting.queued_sink import Sink

MOST_EVALUATIONS = 1000
"""Evaluations in one answer."""


class TrainingRecord:
    """The record of a training run, read by RPCs, evaluation and metrics."""

    def __init__(self, *, max_steps: int, metrics_file: str, sinks: Sequence[Sink] = ()) -> None:
        self.phase = pb.TRAINER_PHASE_LOADING
        self.weight_version = 0
        self.checkpoint_step = 0
        self.oldest_checkpoint_step = 0
        """0 while training resumes, since any checkpoint may be restored."""
        self.evaluating = False
        """An evaluation is in flight."""
        self._max_steps = max_steps
        self.history = CheckpointHistory()
        """History of the current lineage."""
        self.steps: list[pb.StepMetrics] = []
        """All steps, oldest first."""
        self.evaluations: list[pb.Evaluation] = []
        """Evaluations in the order of their ends."""
        self._rewinds: list[int] = []
        self._news = asyncio.Event()
        self._closed = False
        self._file = Path(metrics_file) if metrics_file else None
        self._kept: Extent | None = None
        """Valid length of the file; None while it holds another lineage."""
        self._failing = False
        """The last write to the file failed; this was logged."""
        self._sinks = sinks

    @property
    def step(self) -> int:
        """Newest step taken."""
        return self.steps[-1].step if self.steps else 0

    @property
    def run_s(self) -> float:
        """Time of the run at the end of the newest step; 0 if not recorded."""
        return self.steps[-1].run_s if self.steps else 0.0

    def append(self, metrics: pb.StepMetrics) -> None:
        """Append a step."""
        self.steps.append(metrics)
        self.history.add(metrics)
        self._keep()
        for sink in self._sinks:
            sink.write(metrics)
        self._wake()

    def show_rollouts(self, rows: Sequence[LoggedRollout]) -> None:
        """Give rollouts of the newest step to the sinks."""
        for sink in self._sinks:
            sink.rollouts(self.step, rows)

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        """Append an evaluation that ended."""
        self.evaluations.append(evaluation)
        self.history.add(evaluation)
        self._keep()
        for sink in self._sinks:
            sink.evaluated(evaluation)

    def rewind(self, entries: Sequence[Entry]) -> None:
        """Training continues from a checkpoint with this history; later steps are dropped."""
        self.steps = [each for each in entries if isinstance(each, pb.StepMetrics)]
        saved = {each.step: each for each in entries if isinstance(each, pb.Evaluation)}
        # The evaluation of a kept step may have ended after the checkpoint.
        ended = [
            each for each in self.evaluations if each.step <= self.step and each.step not in saved
        ]
        self.evaluations = [*saved.values(), *ended]
        self.history = CheckpointHistory([*entries, *ended])
        self._rewinds.append(self.step)
        self._kept = None
        self._keep()
        for sink in self._sinks:
            sink.begin(self.step)
        self._wake()

    def status(self, *, with_evaluations: bool = False) -> pb.GetTrainerStatusResponse:
        """The current state of training; `with_evaluations`: also the newest ones, in brief."""
        status = pb.GetTrainerStatusResponse(
            phase=self.phase,
            step=self.step,
            max_steps=self._max_steps,
            weight_version=self.weight_version,
            checkpoint_step=self.checkpoint_step,
            oldest_checkpoint_step=self.oldest_checkpoint_step,
            latest=self.steps[-1] if self.steps else None,
            latest_evaluation=self.evaluations[-1] if self.evaluations else None,
            evaluating=self.evaluating,
        )
        if with_evaluations:
            status.evaluations.extend(self.evaluations[-MOST_EVALUATIONS:])
            for evaluation in status.evaluations:
                for domain in evaluation.domains.values():
                    # Thousands of lines.
                    domain.ClearField("task_outcomes")
        return status

    async def watch(self, after_step: int) -> AsyncGenerator[pb.StepMetrics, None]:
        """Every step after `after_step`, then each new one; repeated steps are yielded again.

        Raises `Unavailable` when this process is stopping.
        """
        last, seen = after_step, len(self._rewinds)
        while True:
            news = self._news
            last = min([last, *self._rewinds[seen:]])
            seen = len(self._rewinds)
            for metrics in [each for each in self.steps if each.step > last]:
                last = metrics.step
                yield metrics
            if self._closed:
                raise Unavailable("the trainer is stopping; watch again after its restart")
            await news.wait()

    def close(self) -> None:
        """No more steps follow; watchers end with an error."""
        self._closed = True
        self._wake()

    def close_sinks(self) -> None:
        """Close the sinks after the last append; blocks until they have written all entries."""
        for sink in self._sinks:
            sink.close()

    def _keep(self) -> None:
        """Append missing entries to the file. A failure is logged and does not stop training."""
        if self._file is None:
            return
        try:
            if self._kept is None:
                self._kept = self._rewritten(self._file)
            else:
                missing = self.history.until(self.step, after=self._kept.entries)
                self._kept = extend(self._file, self._kept, missing)
        except OSError as error:
            # One line until it works again, not one per step.
            if not self._failing:
                log.warning("metrics_not_written", file=str(self._file), error=str(error))
            self._failing = True
        else:
            self._failing = False

    def _rewritten(self, file: Path) -> Extent:
        """Replace the file atomically: readers see the former lineage or this one."""
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(file.name + ".new")
        extent = extend(unfinished, Extent(), self.history.until(self.step))
        unfinished.replace(file)
        return extent

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
