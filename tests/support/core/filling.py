"""Queues of groups that batches are filled from, for tests of the window."""

from __future__ import annotations

from typing import Any

from forge.core.queue.admission import GenerationLimit, QueueSettings
from forge.core.queue.batches import Batch
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import Group, GroupSpec
from forge.core.trajectory import TaskId

LATE_S = 99.0
"""Long after the last group was added."""


def make_queue(domains: str, *, term: int = 0, **settings: Any) -> GenerationQueue:
    """One group per letter, of the domain the letter names: task `<letter><index>`. All run."""
    defaults: dict[str, Any] = {
        "concurrency": 64,
        "window": 2,
        "admission": GenerationLimit.RUNNING,
    }
    queue = GenerationQueue(QueueSettings(**(defaults | settings)), term=term)
    for index, domain in enumerate(domains):
        add(queue, f"{domain}{index}", index)
    queue.rollouts.lease(runner_id="r", max_rollouts=1000, now_s=0.0)
    return queue


def add(queue: GenerationQueue, name: str, index: int, *, shard: str = "s0") -> None:
    spec = GroupSpec(task_id=TaskId(name), index=index, domain=name[0], shard=shard, size=1)
    queue.add_group(Group(spec), now_s=0.0)


def complete(queue: GenerationQueue, *names: str) -> None:
    for name in names:
        assert queue.rollouts.complete(f"{name}:0:0")


def take(
    queue: GenerationQueue, size: int, *, trainer: str = "t", now_s: float = LATE_S
) -> Batch | None:
    return queue.take_batch(trainer_id=trainer, max_groups=size, now_s=now_s)


def taken(queue: GenerationQueue, size: int, *, trainer: str = "t") -> tuple[str, ...]:
    batch = take(queue, size, trainer=trainer)
    return batch.task_ids if batch else ()
