"""Runners that an operator drains: they get no lease.

Owns the rule of when a drain ends, and the messages. The term record stores the drains, so each
later leader has them. A drain is of one process, which its start id names: a restart ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forge.core.errors import NotFound, ResourceExhausted

MOST_DRAINED = 1024
"""Runners in the term record, which one etcd value holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRunnerDraining:
    """To commits: drain a runner, or end its drain. Answered by the number of its leases."""

    runner_id: str
    draining: bool
    live: Mapping[str, str]
    """Start ids of the runners in discovery, by runner id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyDrains:
    """To the queue: the drains in the term record. Answered by the number of leases of a runner."""

    start_ids: Mapping[str, str]
    """By runner id."""
    runner_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IsDraining:
    """To the queue: whether a process of a runner is drained."""

    runner_id: str
    start_id: str


class DrainingRunners:
    """The drains of a term."""

    def __init__(self, start_ids: Mapping[str, str]) -> None:
        self.start_ids = start_ids
        """By runner id; a drained process may have ended."""

    def holds(self, runner_id: str, start_id: str) -> bool:
        """True if this process of the runner gets no leases."""
        return self.start_ids.get(runner_id) == start_id


def changed_drains(drains: Mapping[str, str], ask: SetRunnerDraining) -> dict[str, str]:
    """The drains after a change, without those of processes that were restarted.

    Raises NotFound for a runner that is not in discovery, ResourceExhausted.
    """
    kept = {
        runner_id: start_id
        for runner_id, start_id in drains.items()
        if ask.live.get(runner_id, start_id) == start_id
    }
    if not ask.draining:
        kept.pop(ask.runner_id, None)
        return kept
    if ask.runner_id not in ask.live:
        raise NotFound(f"runner {ask.runner_id} is not in discovery")
    kept[ask.runner_id] = ask.live[ask.runner_id]
    if len(kept) > MOST_DRAINED:
        # An absent runner may be back after an outage of its own; it loses its drain only for room.
        kept = {
            runner_id: start_id for runner_id, start_id in kept.items() if runner_id in ask.live
        }
    if len(kept) > MOST_DRAINED:
        raise ResourceExhausted(
            f"{MOST_DRAINED} runners are drained already: stop or resume some", retry_after_s=5.0
        )
    return kept
