"""A group as a pool stores it, for tests that rebuild a queue from durable states."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.core.queue.groups import AttemptState, Group, GroupSpec, Phase, StoredAttempt


@dataclass
class Durable:
    """One group as the pool has it."""

    spec: GroupSpec
    phase: Phase = Phase.QUEUED
    batch_id: str = ""
    step: int = 0
    attempts: dict[tuple[int, int], AttemptState] = field(default_factory=dict)
    """By rollout index and attempt."""

    def restored(self) -> Group:
        group = Group(self.spec)
        group.recall(StoredAttempt(*key, state) for key, state in self.attempts.items())
        group.phase = self.phase
        if not self.phase.open:
            group.batch_id, group.step = self.batch_id, self.step
            group.close()
        return group
