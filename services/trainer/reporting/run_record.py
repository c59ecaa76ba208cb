"""What training has done so far: phase, versions, the metrics of every step, evaluations.

Owns the history as it grows, its file, and who waits for news of it. Lives on the event loop; the
learner and the RPCs meet here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from forge.core.errors import Unavailable
from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2 as pb
from services.trainer.checkpoint.history import Entry, Extent, History, extend
from services.trainer.reporting.sinks import Sink


class TrainingRecord:
    """The one account of a training run that everybody reads."""

    def __init__(self, *, max_steps: int, metrics_file: str, sinks: Sequence[Sink] = ()) -> None:
        self.phase = pb.TRAINER_PHASE_LOADING
        self.weight_version = 0
        self.checkpoint_step = 0
        self.oldest_checkpoint_step = 0
        """0 while training is being resumed: then any checkpoint may turn out to be the one."""
        self.evaluating = False
        """An evaluation is in flight."""
        self._max_steps = max_steps
        self._history = History()
        self._steps: list[pb.StepMetrics] = []
        self._evaluations: list[pb.Evaluation] = []
        self._rewinds: list[int] = []
        self._news = asyncio.Event()
        self._closed = False
        self._file = Path(metrics_file) if metrics_file else None
        self._kept: Extent | None = None
        """Of the file; None while it is another lineage's."""
        self._failing = False
        """The file did not take what came last, and that was told."""
        self._sinks = sinks

    @property
    def history(self) -> History:
        """Of the lineage that training is on."""
        return self._history

    @property
    def step(self) -> int:
        """Of the newest step taken."""
        return self._steps[-1].step if self._steps else 0

    @property
    def run_s(self) -> float:
        """Of the run at the end of that step; 0 where it was not recorded."""
        return self._steps[-1].run_s if self._steps else 0.0

    @property
    def steps(self) -> Sequence[pb.StepMetrics]:
        """All steps, oldest first."""
        return self._steps

    @property
    def evaluations(self) -> Sequence[pb.Evaluation]:
        """Those that ended, in that order."""
        return self._evaluations

    def append(self, metrics: pb.StepMetrics) -> None:
        """One more step was taken."""
        self._steps.append(metrics)
        self._history.add(metrics)
        self._keep()
        for sink in self._sinks:
            sink.write(metrics)
        self._wake()

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        """One more evaluation ended."""
        self._evaluations.append(evaluation)
        self._history.add(evaluation)
        self._keep()
        for sink in self._sinks:
            sink.evaluated(evaluation)

    def rewind(self, entries: Sequence[Entry]) -> None:
        """Training goes on from a checkpoint with this history: later steps never were."""
        self._steps = [each for each in entries if isinstance(each, pb.StepMetrics)]
        told = {each.step: each for each in entries if isinstance(each, pb.Evaluation)}
        # Of a step that stays, one may have ended after the checkpoint was taken.
        ended = [
            each for each in self._evaluations if each.step <= self.step and each.step not in told
        ]
        self._evaluations = [*told.values(), *ended]
        self._history = History([*entries, *ended])
        self._rewinds.append(self.step)
        self._kept = None
        self._keep()
        for sink in self._sinks:
            sink.begin(self.step)
        self._wake()

    def status(self) -> pb.GetTrainerStatusResponse:
        """Where training stands."""
        return pb.GetTrainerStatusResponse(
            phase=self.phase,
            step=self.step,
            max_steps=self._max_steps,
            weight_version=self.weight_version,
            checkpoint_step=self.checkpoint_step,
            oldest_checkpoint_step=self.oldest_checkpoint_step,
            latest=self._steps[-1] if self._steps else None,
            latest_evaluation=self._evaluations[-1] if self._evaluations else None,
            evaluating=self.evaluating,
        )

    async def watch(self, after_step: int) -> AsyncGenerator[pb.StepMetrics, None]:
        """Every step after `after_step`, then each new one; steps taken again come again.

        Raises `Unavailable` when this process is about to end.
        """
        last, seen = after_step, len(self._rewinds)
        while True:
            news = self._news
            last = min([last, *self._rewinds[seen:]])
            seen = len(self._rewinds)
            for metrics in [each for each in self._steps if each.step > last]:
                last = metrics.step
                yield metrics
            if self._closed:
                raise Unavailable("the trainer is stopping; watch again once it is back")
            await news.wait()

    def close(self) -> None:
        """Nothing more will happen here: whoever waits is told."""
        self._closed = True
        self._wake()

    def close_sinks(self) -> None:
        """Once nothing more can be appended; blocks until they have written what they got."""
        for sink in self._sinks:
            sink.close()

    def _keep(self) -> None:
        """What the file lacks is added to it. A full disk is told and stops nothing."""
        if self._file is None:
            return
        try:
            if self._kept is None:
                self._kept = self._written_anew(self._file)
            else:
                lacking = self._history.until(self.step, after=self._kept.entries)
                self._kept = extend(self._file, self._kept, lacking)
        except OSError as error:
            # One line until it works again, not one per step.
            if not self._failing:
                log.warning("metrics_not_written", file=str(self._file), error=str(error))
            self._failing = True
        else:
            self._failing = False

    def _written_anew(self, file: Path) -> Extent:
        """All of it at once: whoever reads sees the former lineage or this one."""
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(file.name + ".new")
        extent = extend(unfinished, Extent(), self._history.until(self.step))
        unfinished.replace(file)
        return extent

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
