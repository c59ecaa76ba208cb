"""A sink on a thread of its own, so that its disk and network do not delay training.

Owns the queue between training and the sink. A sink that hangs, such as one without a network,
costs its own entries alone: the queue is bounded, and the end of the trainer waits for it a bounded
time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2 as pb
from services.trainer.batches.logged_rollouts import LoggedRollout

MOST_QUEUED = 1024
"""Entries that wait for a slow sink."""
CLOSE_S = 8.0
"""Longest wait for a sink at the end; a process has ten seconds from its drain to its end."""


class Sink(Protocol):
    """Receives each step once per lineage, and each evaluation at its end."""

    def begin(self, step: int) -> None:
        """The following steps are those after `step`; they replace earlier ones."""

    def write(self, metrics: pb.StepMetrics) -> None:
        """Write a step."""

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        """Write the evaluation of an earlier step, or of step 0."""

    def rollouts(self, step: int, rows: Sequence[LoggedRollout]) -> None:
        """Write rollouts of the newest step, if the sink has tables."""

    def close(self) -> None:
        """Write everything out and end."""


class QueuedSink:
    """Passes the calls on to a sink, in their order."""

    def __init__(self, sink: Sink, *, most: int = MOST_QUEUED, close_s: float = CLOSE_S) -> None:
        """`most`: entries that wait; `close_s`: longest wait for the sink at the end."""
        self._sink = sink
        self._most = most
        self._close_s = close_s
        self._entries: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """None: the end."""
        self._next_begin: int | None = None
        """`begin` for the next entry, so that repeated failures to resume create no empty runs."""
        self._to_begin: int | None = None
        """A beginning that has not succeeded; of the thread."""
        self._failed = False
        # A daemon: the process ends while a package waits for its network.
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Entries that wait."""
        return self._entries.qsize()

    def begin(self, step: int) -> None:
        """Keep the beginning until the next step or evaluation."""
        self._next_begin = step

    def write(self, metrics: pb.StepMetrics) -> None:
        """Queue a step."""
        self._submit(lambda: self._sink.write(metrics))

    def evaluated(self, evaluation: pb.Evaluation) -> None:
        """Queue an evaluation."""
        self._submit(lambda: self._sink.evaluated(evaluation))

    def rollouts(self, step: int, rows: Sequence[LoggedRollout]) -> None:
        """Queue a table."""
        self._submit(lambda: self._sink.rollouts(step, rows))

    def close(self) -> None:
        """Write the queued entries, close the sink and end the thread; a sink that hangs loses its
        entries after `close_s`."""
        self._entries.put(None)
        self._thread.join(self._close_s)
        if self.running:
            self._failed = False
            self._fail(f"{self.waiting} entries wait after {self._close_s:g} s")

    def _submit(self, call: Callable[[], None]) -> None:
        if self.waiting >= self._most:
            self._fail(f"{self._most} entries wait already")
            return
        begin, self._next_begin = self._next_begin, None

        def entry() -> None:
            if begin is not None:
                self._to_begin = begin
            if self._to_begin is not None:
                self._sink.begin(self._to_begin)
                self._to_begin = None
            call()

        self._entries.put(entry)

    def _work(self) -> None:
        while (entry := self._entries.get()) is not None:
            self._run(entry)
        self._run(self._sink.close)

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # a package raises what it likes
            self._fail(repr(error))
        else:
            self._failed = False

    def _fail(self, error: str) -> None:
        # One line until it works again, not one per step.
        if not self._failed:
            log.warning("metrics_not_written", sink=type(self._sink).__name__, error=error)
        self._failed = True
