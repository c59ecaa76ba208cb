"""Workers that may continue an answer, by their weight versions. Pure.

The versions of an answer's tokens do not fall while a worker that is new enough is near: an answer
with tokens of version v waits for a worker with v or newer, at most `wait_s` from the moment the
first worker had v. Then an older worker continues it, so that a worker without the newest weights
does not stop a fleet; each token has its true version in any case. During a hold no worker will
have a version above the held ones, so no answer waits for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forge.core.errors import Unavailable
from services.inference.router.fleet.workers import Worker

_KEPT = 16


class TooOld(Unavailable):
    """All workers have older weights than the answer; newer ones are expected: ask again."""


@dataclass(slots=True, kw_only=True)
class Versions:
    """The versions in service, each with the time of its first worker."""

    wait_s: float
    newest_held: int | None = None
    """Newest version of a hold; None without one."""
    _since_s: dict[int, float] = field(default_factory=dict)

    def seen(self, version: int, *, now_s: float) -> None:
        """Observe a version in service, in discovery or on a token."""
        if version not in self._since_s:
            self._since_s[version] = now_s
            for old in sorted(self._since_s)[:-_KEPT]:
                del self._since_s[old]

    def fitting(
        self, workers: Sequence[Worker], *, floor: int, now_s: float
    ) -> tuple[Sequence[Worker], bool]:
        """Return the workers that may continue an answer with tokens of version `floor`, and
        whether they are older. Raises TooOld while a newer one may still come."""
        if self.newest_held is not None:
            floor = min(floor, self.newest_held)
        new = [worker for worker in workers if worker.version >= floor]
        if new or not workers:
            return new, False
        self.seen(floor, now_s=now_s)
        if now_s - self._since_s.get(floor, 0.0) < self.wait_s:
            raise TooOld(f"no worker with weights {floor} or newer is available yet")
        return workers, True
