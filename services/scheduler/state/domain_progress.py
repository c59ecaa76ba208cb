"""Progress of training by domain: completed rollouts and their recent outcomes.

Evaluation does not count; its results are listed by tag.
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


class DomainProgress:
    """Completed training rollouts per domain."""

    def __init__(self) -> None:
        self._completed: Counter[str] = Counter()
        self._recent: dict[str, list[tuple[float, float]]] = {}
        """Heap of (sealed at, outcome): after an election, rollouts arrive out of order."""

    def record(self, domain: str, *, sealed_unix_s: float, outcome: float) -> None:
        """Count one sealed rollout."""
        self.recall((domain,), ((sealed_unix_s, outcome),))

    def recall(self, domains: Iterable[str], rollouts: Iterable[Sequence[float]]) -> None:
        """`record` for groups: the domain of each, and its rollouts as `StoredGroup.outcomes` has
        them."""
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
        """Rollouts of groups that are not in memory, by domain: their number and the newest."""
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
        """Sealed training rollouts."""
        return self._completed[domain]

    def recent_reward(self, domain: str) -> float:
        """Mean outcome of recent rollouts; 0 before the first."""
        outcomes = [outcome for _, outcome in self._recent.get(domain, ())]
        # fsum: the result does not depend on their order.
        return fsum(outcomes) / len(outcomes) if outcomes else 0.0

    def domains(self, configured: Iterable[str]) -> list[str]:
        """Configured domains and those with rollouts."""
        return sorted({*configured, *self._completed})
