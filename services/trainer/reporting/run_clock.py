"""The time of a run, over all its processes.

    run_s = now - beginning of the run - time of intended stops

So the time that a crash costs, until training resumes, is part of the run; a weekend without a
process after a stop is not. Within a process the monotonic clock counts, between processes the wall
clock.

Owns the file with the beginning and the stops, beside the checkpoints.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from forge.runtime.files.private import replace_private_file
from forge.runtime.telemetry import log

FILE_NAME = "run-clock.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """Content of the file. Unix times in seconds."""

    began_unix_s: float
    away_s: float = 0.0
    """Total time between intended stops and the starts after them."""
    stopped_unix_s: float | None = None
    """Time of the newest intended stop, until the next start."""


class RunClock:
    """The run's clock in one process. Not thread-safe."""

    def __init__(
        self,
        file: Path | None = None,
        *,
        unix_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a file the clock does not include earlier processes."""
        self._file = file
        self._unix_s = unix_s
        self._monotonic_s = monotonic_s
        self._started_unix_s = unix_s()
        self._kept: _Kept | None = None
        self._base_s = 0.0
        """Time of the run at the zero of the monotonic clock."""

    def now_s(self) -> float:
        """Monotonic time, for differences within this process."""
        return self._monotonic_s()

    def run_s(self) -> float:
        """Seconds of the run so far; 0 before `begin`."""
        return self._base_s + self._monotonic_s() if self._kept else 0.0

    def begin(self, last_run_s: float) -> None:
        """Training begins or resumes in this process; only the first call counts.

        `last_run_s` is the time at the end of the newest step, 0 without one. A run without a file
        continues from it.
        """
        if self._kept is not None:
            return
        now_s = self._unix_s()
        kept = self._read() or _Kept(began_unix_s=now_s - last_run_s)
        if kept.stopped_unix_s is not None:
            # The stop ends with the start of the process, so loading counts.
            away_s = max(0.0, self._started_unix_s - kept.stopped_unix_s)
            kept = replace(kept, away_s=kept.away_s + away_s, stopped_unix_s=None)
        self._kept = kept
        # A clock that was set back must not make a step end before the step before it.
        run_s = max(last_run_s, now_s - kept.began_unix_s - kept.away_s)
        self._base_s = run_s - self._monotonic_s()
        self._write(kept)

    def stop(self) -> None:
        """Training stops as intended, with all steps saved; only the first call counts."""
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
        """Write the file; a failure is logged and makes only a later run time inexact."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            replace_private_file(self._file, json.dumps(asdict(kept)))
        except OSError as error:
            log.warning("run_clock_not_written", file=str(self._file), error=str(error))
