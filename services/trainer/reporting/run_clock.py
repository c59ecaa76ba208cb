"""The time of a run, over all the processes that took part in it.

    run_s = now - beginning of the run - time it was stopped on purpose

So the time that a crash lost, until training resumed, is part of the run; a weekend for which it
was stopped is not. Within a process the monotonic clock counts, between two of them the machine's.

Owns the file that keeps the beginning and the stops, beside the checkpoints.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from forge.runtime.telemetry import log

FILE_NAME = "run-clock.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What the file holds. Unix times in seconds."""

    began_unix_s: float
    away_s: float = 0.0
    """Between a stop on purpose and the next start, all of them together."""
    stopped_unix_s: float | None = None
    """Of the newest stop, until the next start."""


class RunClock:
    """Of one process. Not for several threads."""

    def __init__(
        self,
        file: Path | None = None,
        *,
        unix_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a file nothing is known of earlier processes."""
        self._file = file
        self._unix_s = unix_s
        self._monotonic_s = monotonic_s
        self._started_unix_s = unix_s()
        self._kept: _Kept | None = None
        self._base_s = 0.0
        """Of the run, where the monotonic clock is 0."""

    def now_s(self) -> float:
        """For differences within this process."""
        return self._monotonic_s()

    def run_s(self) -> float:
        """Seconds of the run so far; 0 before `begin`."""
        return self._base_s + self._monotonic_s() if self._kept else 0.0

    def begin(self, last_run_s: float) -> None:
        """Training begins or resumes in this process; only the first call counts.

        `last_run_s` is the time at the end of the newest step that is left, 0 without one. A run
        whose file is gone, or that is older than the file, continues from there.
        """
        if self._kept is not None:
            return
        now_s = self._unix_s()
        kept = self._read() or _Kept(began_unix_s=now_s - last_run_s)
        if kept.stopped_unix_s is not None:
            # The start itself counts: from the process on, not from the end of loading.
            away_s = max(0.0, self._started_unix_s - kept.stopped_unix_s)
            kept = replace(kept, away_s=kept.away_s + away_s, stopped_unix_s=None)
        self._kept = kept
        # A machine's clock that was set back makes no step end before the one before it.
        run_s = max(last_run_s, now_s - kept.began_unix_s - kept.away_s)
        self._base_s = run_s - self._monotonic_s()
        self._write(kept)

    def stop(self) -> None:
        """Everything taken is saved, and training stops on purpose; the first call counts."""
        if self._kept is not None and self._kept.stopped_unix_s is None:
            self._kept = replace(self._kept, stopped_unix_s=self._unix_s())
            self._write(self._kept)

    def _read(self) -> _Kept | None:
        if self._file is None or not self._file.exists():
            return None
        try:
            kept = _Kept(**json.loads(self._file.read_text()))
            if not math.isfinite(kept.began_unix_s + kept.away_s + (kept.stopped_unix_s or 0.0)):
                raise ValueError("a time is not finite")
        except (OSError, ValueError, TypeError) as error:
            log.warning("run_clock_unreadable", file=str(self._file), error=str(error))
            return None
        return kept

    def _write(self, kept: _Kept) -> None:
        """A disk that is full costs the measure of the next crash, and no training."""
        if self._file is None:
            return
        unfinished = self._file.with_suffix(".new")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Write beside and rename: a kill in between leaves the former times.
            unfinished.write_text(json.dumps(asdict(kept)))
            unfinished.replace(self._file)
        except OSError as error:
            log.warning("run_clock_not_written", file=str(self._file), error=str(error))
