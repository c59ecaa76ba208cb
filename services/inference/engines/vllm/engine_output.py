"""The standard error of vLLM's processes: passed on, and searched for the cause of an end.

vLLM reports the end of its process without the cause ("See stack trace (above) for the root
cause"). The cause is in the output of the process alone, as is the message of an abort in C++.
"""

from __future__ import annotations

import os
import re
import select
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock, Thread

_STDERR = 2
_KEPT_LINES = 400
_MOST_CHARACTERS = 500
"""Most characters of a cause: a line may have a whole configuration."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\)\s*)?([A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d [^\]]*\] ?)?")
"""Prefix of a line by vLLM's logger."""
_CAUSE = re.compile(
    r"[A-Za-z_][\w.]*(Error|Exception|Interrupt)(: .*|$)|Fatal Python error: .*|what\(\): .*"
)


class EngineOutput:
    """Reads what vLLM's processes write to standard error, and writes it to this process's own."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest = b""
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._own = os.dup(_STDERR)
        self._taking = Lock()
        # Ends with the last process that has the other end.
        Thread(target=self._pass_on, daemon=True, name="vllm-output").start()

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Processes that start in this block write here. Use it once."""
        os.dup2(self._writer, _STDERR)
        os.close(self._writer)
        try:
            yield
        finally:
            os.dup2(self._own, _STDERR)

    def cause(self, exit_codes: Iterable[int | None]) -> str:
        """Return why processes ended: how, if not by an exception, and the last error that they
        wrote; empty if neither is known."""
        # What a process wrote before its end may still be in the pipe.
        self._take()
        ends = sorted({end for end in map(end_of, exit_codes) if end})
        error = last_error(tuple(self._lines))
        if ends and error:
            error = f"last error of its output: {error}"
        return "; ".join(filter(None, [*ends, error]))

    def _pass_on(self) -> None:
        while self._take():
            select.select([self._reader], [], [])

    def _take(self) -> bool:
        """Read the available output; return False at the end."""
        with self._taking:
            while True:
                try:
                    chunk = os.read(self._reader, 1 << 16)
                except BlockingIOError:
                    return True
                if not chunk:
                    return False
                # vLLM continues if the reader of its output has ended.
                with suppress(OSError):
                    os.write(self._own, chunk)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                self._lines.extend(line.decode(errors="replace") for line in lines)


def last_error(lines: Iterable[str]) -> str:
    """Return the last line that names an error, without the logger's prefix; empty if none does."""
    found = ""
    for line in lines:
        text = _PREFIX.sub("", _COLOR.sub("", line)).strip()
        if _CAUSE.fullmatch(text):
            found = text
    return found[:_MOST_CHARACTERS]


def end_of(exit_code: int | None) -> str:
    """Return how a process ended, in words; empty for an unknown end and for exit code 1, which
    follows an exception."""
    if exit_code is None or exit_code == 1:
        return ""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return name
