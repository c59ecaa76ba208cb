"""How training goes, per domain: rollouts completed and what they scored of late.

Evaluation has no part in it: what it measures is asked for by tag.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappush, heappushpop
from math import fsum, inf

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
        self.recall((domain,), ((sealed_unix_s, outcome),))

    def recall(self, domains: Iterable[str], rollouts: Iterable[Sequence[float]]) -> None:
        """`record` for all rollouts of groups: of each its domain, and when its rollouts were
        sealed, each with its outcome, the latest first."""
        oldest_unix_s: dict[str, float] = {}
        for domain, sealed in zip(domains, rollouts, strict=True):
            if not sealed:
                continue
            self._completed[domain] += len(sealed) // 2
            if sealed[0] < oldest_unix_s.get(domain, -inf):
                continue
            recent = self._note_recent(domain, sealed)
            if len(recent) == RECENT_ROLLOUTS:
                oldest_unix_s[domain] = recent[0][0]

    def recall_counted(
        self, completed: Mapping[str, int], recent: Mapping[str, Sequence[float]]
    ) -> None:
        """Rollouts of groups that are not told one by one, by domain: how many, and the last of
        them."""
        for domain, count in completed.items():
            if count:
                self._completed[domain] += count
        for domain, sealed in recent.items():
            self._note_recent(domain, sealed)

    def _note_recent(self, domain: str, sealed: Sequence[float]) -> list[tuple[float, float]]:
        recent = self._recent.setdefault(domain, [])
        for rollout in zip(sealed[::2], sealed[1::2], strict=True):
            if len(recent) < RECENT_ROLLOUTS:
                heappush(recent, rollout)
            else:
                heappushpop(recent, rollout)
        return recent

    def completed(self, domain: str) -> int:
        return self._completed[domain]

    def recent_reward(self, domain: str) -> float:
        """Mean outcome of the last rollouts; 0 before the first."""
        outcomes = [outcome for _, outcome in self._recent.get(domain, ())]
        # The same in whatever order they came.
        return fsum(outcomes) / len(outcomes) if outcomes else 0.0

    def domains(self, configured: Iterable[str]) -> list[str]:
        return sorted({*configured, *self._completed})
