"""How training goes, per domain: rollouts completed and what they scored of late.

Evaluation has no part in it: what it measures is asked for by tag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import heappush, heappushpop

from forge.v1 import common_pb2

RECENT_ROLLOUTS = 64


def outcome_of(summary: common_pb2.TrajectorySummary) -> float:
    """The outcome component of its reward."""
    kind = common_pb2.REWARD_KIND_OUTCOME
    return sum(event.value for event in summary.rewards if event.kind == kind)


class Progress:
    """Completed training rollouts per domain."""

    def __init__(self) -> None:
        self._completed: Counter[str] = Counter()
        self._recent: dict[str, list[tuple[float, float]]] = {}
        """Heap of (sealed at, outcome): after a change of leader they arrive out of order."""

    def record(self, domain: str, *, sealed_unix_s: float, outcome: float) -> None:
        self._completed[domain] += 1
        recent = self._recent.setdefault(domain, [])
        if len(recent) < RECENT_ROLLOUTS:
            heappush(recent, (sealed_unix_s, outcome))
        else:
            heappushpop(recent, (sealed_unix_s, outcome))

    def completed(self, domain: str) -> int:
        return self._completed[domain]

    def recent_reward(self, domain: str) -> float:
        """Mean outcome of the last rollouts; 0 before the first."""
        outcomes = [outcome for _, outcome in self._recent.get(domain, ())]
        return sum(outcomes) / len(outcomes) if outcomes else 0.0

    def domains(self, configured: Iterable[str]) -> list[str]:
        return sorted({*configured, *self._completed})
