"""Home workers of sessions: the worker with the history of a session, and the number of live
sessions of each worker.

A session is live from its first request until it has been silent for much longer than sessions
usually are between two requests. The live sessions of a worker are its load of the next minutes;
those that run at this moment are a noisy sample of it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

_SILENT_GAPS = 3.0
"""Mean gaps after which a session counts as over."""
_LEAST_SILENCE_S = 2.0
_GAP_MEMORY = 256.0
_MOST_SESSIONS = 65_536


@dataclass(slots=True)
class _Session:
    worker: str
    seen_s: float
    rests: bool = False
    """Between two requests."""


class Homes:
    """Live sessions and their workers."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        """The longest silent first."""
        self._living: Counter[str] = Counter()
        self._gap_s = 0.0
        self._gaps = 0.0

    def live(self, worker: str) -> int:
        """Return the number of live sessions of a worker."""
        return self._living[worker]

    def home(self, session: str) -> str | None:
        """Return the worker of a live session."""
        found = self._sessions.get(session)
        return None if found is None else found.worker

    def settle(self, session: str, worker: str, *, now_s: float) -> None:
        """Note a request of a session on a worker."""
        if not session:
            return
        found = self._sessions.pop(session, None)
        if found is not None:
            self._living[found.worker] -= 1
            if found.rests:
                self._observe_gap(now_s - found.seen_s)
        self._sessions[session] = _Session(worker, now_s)
        self._living[worker] += 1
        while len(self._sessions) > _MOST_SESSIONS:
            self._end_oldest()

    def rest(self, session: str, *, now_s: float) -> None:
        """Note the end of a session's answer: its silence begins."""
        found = self._sessions.get(session)
        if found is not None:
            found.seen_s, found.rests = now_s, True
            self._sessions.move_to_end(session)

    def expire(self, *, now_s: float) -> None:
        """End the sessions that have been silent for long."""
        mean_s = self._gap_s / self._gaps if self._gaps else 10.0
        silence_s = max(_LEAST_SILENCE_S, _SILENT_GAPS * mean_s)
        while self._sessions and now_s - next(iter(self._sessions.values())).seen_s > silence_s:
            self._end_oldest()

    def _observe_gap(self, gap_s: float) -> None:
        keep = 1 - 1 / _GAP_MEMORY
        self._gap_s = self._gap_s * keep + gap_s
        self._gaps = self._gaps * keep + 1

    def _end_oldest(self) -> None:
        _, session = self._sessions.popitem(last=False)
        self._living[session.worker] -= 1
