"""What training has done so far: phase, versions, the metrics of every step, evaluations.

Owns the history, its file, and who waits for news of it. Lives on the event loop; the learner and
the RPCs meet here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from forge.core.errors import Unavailable
from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2 as pb
from services.trainer.sinks import Sink

_EVALUATION = "evaluation"
"""Of an entry of the history that is no step's: its one key."""


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
        self._steps: list[pb.StepMetrics] = []
        self._evaluations: list[pb.Evaluation] = []
        self._rewinds: list[int] = []
        self._news = asyncio.Event()
        self._closed = False
        self._file = Path(metrics_file) if metrics_file else None
        self._behind = False
        """The file could not take all that there is."""
        self._sinks = sinks

    @property
    def step(self) -> int:
        """Of the newest step taken."""
        return self._steps[-1].step if self._steps else 0

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
        self._keep(_to_json(metrics))
        for sink in self._sinks:
            sink.write(metrics)
        self._wake()

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        """One more evaluation ended."""
        self._evaluations.append(evaluation)
        self._keep({_EVALUATION: _to_json(evaluation)})
        for sink in self._sinks:
            sink.evaluated(evaluation)

    def rewind(self, history: Sequence[dict[str, Any]]) -> None:
        """Training goes on from a checkpoint with this history: later steps never were."""
        self._steps = [
            _filled(pb.StepMetrics(), entry) for entry in history if _EVALUATION not in entry
        ]
        told = [
            _filled(pb.Evaluation(), entry[_EVALUATION])
            for entry in history
            if _EVALUATION in entry
        ]
        # Of a step that stays, one may have ended after the checkpoint was taken.
        known = {each.step: each for each in [*told, *self._evaluations] if each.step <= self.step}
        self._evaluations = list(known.values())
        self._rewinds.append(self.step)
        self._keep(None)
        for sink in self._sinks:
            sink.begin(self.step)
        self._wake()

    def history(self) -> list[dict[str, Any]]:
        """What `rewind` takes, as JSON values."""
        steps = [_to_json(metrics) for metrics in self._steps]
        return [*steps, *({_EVALUATION: _to_json(each)} for each in self._evaluations)]

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

    def _keep(self, newest: dict[str, Any] | None) -> None:
        """The newest entry, or every one, in the file. A full disk is told and stops nothing."""
        if self._file is None:
            return
        entries = self.history() if newest is None or self._behind else [newest]
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
        try:
            if newest is None or self._behind:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                temporary = self._file.with_name(self._file.name + ".new")
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(self._file)
            else:
                with self._file.open("a", encoding="utf-8") as lines:
                    lines.write(text)
        except OSError as error:
            if not self._behind:
                log.warning("metrics_not_written", file=str(self._file), error=str(error))
            self._behind = True
        else:
            self._behind = False

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _to_json(metrics: Message) -> dict[str, Any]:
    """Numbers as numbers and every field, which protobuf's own JSON has neither of."""
    fields: dict[str, Any] = {}
    for field in metrics.DESCRIPTOR.fields:
        value = getattr(metrics, field.name)
        if field.is_repeated:
            value = {
                key: _to_json(entry) if isinstance(entry, Message) else entry
                for key, entry in value.items()
            }
        fields[field.name] = value
    return fields


def _filled(metrics: Any, fields: Mapping[str, Any]) -> Any:
    """`metrics` with what `_to_json` made of another: protobuf's own parser takes no NaN."""
    for name, value in fields.items():
        if not isinstance(value, dict):
            setattr(metrics, name, value)
            continue
        entries = getattr(metrics, name)
        for key, entry in value.items():
            if isinstance(entry, dict):
                _filled(entries[key], entry)
            else:
                entries[key] = entry
    return metrics
