"""Counters of settled groups that the scan of a pool shard left out.

Owns the conversion of the shard's counters. The shard counts all its settled groups; groups that
the standby's copy has are subtracted, because the copy counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from forge.core.queue.groups import SAME_OUTCOME, Phase
from forge.v1 import common_pb2, pool_pb2
from services.scheduler.state.stored_group import PHASES, StoredGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Left-out groups of one pool shard."""

    shard: str
    counts: Mapping[tuple[bool, Phase], int]
    """Groups by (evaluation, phase)."""
    skipped: int
    """Groups that dynamic sampling tombstoned."""
    completed: Mapping[str, int]
    """By domain: sealed rollouts of all settled training groups, left out or not."""
    recent: Mapping[str, Sequence[float]]
    """By domain: the newest of these rollouts, as `StoredGroup.outcomes` has them."""
    next_index: int
    """Above the queue index of each training group of the shard."""
    next_eval_index: int
    last_step: int
    """No left-out group was trained by a later step."""


def left_out(
    shard: str, settled: pool_pb2.SettledGroups, groups: Iterable[StoredGroup], *, last_step: int
) -> LeftOut:
    """The counts of `settled` without `groups`, which are in the copy."""
    counts: Counter[tuple[bool, Phase]] = Counter()
    completed: Counter[str] = Counter()
    skipped = 0
    for row in settled.counts:
        evaluation = row.purpose == common_pb2.PURPOSE_EVAL
        counts[evaluation, PHASES[row.state]] += row.groups
        completed[row.domain] += row.rollouts
        skipped += row.groups if row.reason == SAME_OUTCOME else 0
    for stored in groups:
        if stored.settled_unix_s:
            group = stored.group
            counts[group.spec.evaluation, group.phase] -= 1
            skipped -= group.reason == SAME_OUTCOME
    return LeftOut(
        shard=shard,
        counts=counts,
        skipped=skipped,
        completed=completed,
        recent={
            recent.domain: tuple(chain(*zip(recent.sealed_unix_s, recent.outcomes, strict=True)))
            for recent in settled.recent
        },
        next_index=settled.next_train_index,
        next_eval_index=settled.next_eval_index,
        last_step=last_step,
    )
