"""What training has done so far: phase, versions, the metrics of every step.

Owns the history, its file, and who waits for news of it. Lives on the event loop; the learner and
the RPCs meet here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from forge.core.errors import Unavailable
from forge.v1 import trainer_pb2 as pb
from services.trainer.sinks import Sink


class TrainingRecord:
    """The one account of a training run that everybody reads."""

    def __init__(self, *, max_steps: int, metrics_file: str, sinks: Sequence[Sink] = ()) -> None:
        self.phase = pb.TRAINER_PHASE_LOADING
        self.weight_version = 0
        self.checkpoint_step = 0
        self.oldest_checkpoint_step = 0
        """0 while training is being resumed: then any checkpoint may turn out to be the one."""
        self._max_steps = max_steps
        self._steps: list[pb.StepMetrics] = []
        self._rewinds: list[int] = []
        self._news = asyncio.Event()
        self._closed = False
        self._file = Path(metrics_file) if metrics_file else None
        self._sinks = sinks

    @property
    def step(self) -> int:
        """Of the newest step taken."""
        return self._steps[-1].step if self._steps else 0

    @property
    def steps(self) -> Sequence[pb.StepMetrics]:
        """All steps, oldest first."""
        return self._steps

    def append(self, metrics: pb.StepMetrics) -> None:
        """One more step was taken."""
        self._steps.append(metrics)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(_to_json(metrics)) + "\n")
        for sink in self._sinks:
            sink.write(metrics)
        self._wake()

    def rewind(self, history: Sequence[dict[str, Any]]) -> None:
        """Training goes on from a checkpoint with this history: later steps never were."""
        self._steps = [json_format.ParseDict(entry, pb.StepMetrics()) for entry in history]
        self._rewinds.append(self.step)
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(_to_json(metrics)) + "\n" for metrics in self._steps)
            temporary = self._file.with_name(self._file.name + ".new")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._file)
        for sink in self._sinks:
            sink.begin(self.step)
        self._wake()

    def history(self) -> list[dict[str, Any]]:
        """What `rewind` takes, as JSON values."""
        return [_to_json(metrics) for metrics in self._steps]

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
