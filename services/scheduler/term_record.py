"""The term record: one small key in etcd, from each leader of a cluster to the next.

Owns its format and its changes: by compare-and-swap, and only by the leader of the term it names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from forge.core.errors import StaleFence, Unavailable
from forge.core.queue.activity import Activity
from forge.runtime.coordination import Coordinator

TERM_KEY = "scheduler/term"


Counts = Mapping[str, int]
"""Settled groups by purpose and phase, as `count_key` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Groups that move from a pool shard to another, and may be on both."""

    source: str
    """Authoritative for each group that is not MOVED there."""
    target: str
    task_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TermRecord:
    """The record as it stood at one revision."""

    term: int = -1
    """Counts leaders from 0; part of every attempt number and batch id."""
    shards: frozenset[str] = frozenset()
    """Every pool shard that may hold groups."""
    claims: bool = False
    """Whether runners may hold leases of this or an earlier term."""
    activity: Activity = Activity.RUNNING
    """Set by an operator."""
    void_before: tuple[int, int] = (0, 0)
    """Term and number: a rewind voided the batches granted before."""
    head: int | None = None
    """Every group with a lower queue index was consumed; None before a leader stored it."""
    trainer_fence: int = 0
    """Highest fence of a trainer that rewound."""
    retiring: frozenset[str] = frozenset()
    """Pool shards that an operator retires: they get no new groups, and theirs move away."""
    move: Move | None = None
    """The last move. A new leader completes it before it scans one of the two shards."""
    losing: Mapping[str, Counts] = field(default_factory=dict)
    """By pool shard that is being declared lost: its settled groups without a record elsewhere."""
    lost: Counts = field(default_factory=dict)
    """The sum over all lost shards; every leader counts these groups."""
    draining_runners: Mapping[str, str] = field(default_factory=dict)
    """Start ids of the runners that an operator drains, by runner id."""
    revision: int = 0
    """Revision of the key in etcd; 0 before the first write."""

    @classmethod
    async def read(cls, coordinator: Coordinator) -> TermRecord:
        """The record in etcd, or the default before the first write."""
        stored = await coordinator.get(TERM_KEY)
        if stored is None:
            return cls()
        # Missing fields, of an earlier release, have their defaults.
        record = msgspec.json.decode(stored.value, type=cls)
        return replace(record, revision=stored.mod_revision)

    async def write(self, coordinator: Coordinator) -> TermRecord:
        """The written record. Raises StaleFence if another leader wrote since the read."""
        fields = {
            "term": self.term,
            "shards": sorted(self.shards),
            "claims": self.claims,
            "activity": self.activity.value,
            "void_before": self.void_before,
            "head": self.head,
            "trainer_fence": self.trainer_fence,
            "retiring": sorted(self.retiring),
            "move": None if self.move is None else asdict(self.move),
            "losing": self.losing,
            "lost": self.lost,
            "draining_runners": self.draining_runners,
        }
        revision = await coordinator.compare_and_swap(
            TERM_KEY, json.dumps(fields).encode(), expected_revision=self.revision
        )
        return replace(self, revision=revision)

    def without(self, gone: Collection[str]) -> TermRecord:
        """The record without pool shards that were retired or lost."""
        lost = dict(self.lost)
        for shard in self.losing.keys() & set(gone):
            for key, groups in self.losing[shard].items():
                lost[key] = lost.get(key, 0) + groups
        move = self.move
        return replace(
            self,
            shards=self.shards - set(gone),
            retiring=self.retiring - set(gone),
            move=None if move is not None and {move.source, move.target} & set(gone) else move,
            losing={shard: counts for shard, counts in self.losing.items() if shard not in gone},
            lost=lost,
        )


class OwnRecord:
    """The record, as the leader of one term changes it."""

    def __init__(self, coordinator: Coordinator, term: int) -> None:
        self._coordinator = coordinator
        self._term = term

    async def amend(self, **changes: Any) -> TermRecord:
        """Change fields; durable on return. Raises Unavailable once another term has begun."""
        return await self._change(lambda record: replace(record, **changes))

    async def raise_trainer_fence(self, fence: int) -> None:
        """Refuse former trainers from now on. Raises StaleFence for a lower fence than the stored
        one, Unavailable."""
        stored = (await TermRecord.read(self._coordinator)).trainer_fence
        if fence < stored:
            raise StaleFence(
                f"fence {fence} of this trainer is below {stored}: a later trainer has rewound"
            )
        if fence > stored:
            await self.amend(trainer_fence=fence)

    async def read(self) -> TermRecord:
        """The record. Raises Unavailable."""
        return await TermRecord.read(self._coordinator)

    async def remove_shards(self, gone: Collection[str]) -> None:
        """Remove shards that were retired or lost. Raises Unavailable."""
        await self._change(lambda record: record.without(gone))

    async def add_shards(self, joined: frozenset[str]) -> None:
        """Add shards, before the first group is stored on them. Raises Unavailable."""
        # Only one task of the term changes this field, so no update is lost between the reads.
        record = await TermRecord.read(self._coordinator)
        await self.amend(shards=record.shards | joined)

    async def _change(self, changed: Callable[[TermRecord], TermRecord]) -> TermRecord:
        while True:
            record = await TermRecord.read(self._coordinator)
            if record.term != self._term:
                raise Unavailable(f"term {self._term} is over: term {record.term} has begun")
            try:
                return await changed(record).write(self._coordinator)
            except StaleFence:
                # Another actor of this leader wrote in between; the next read shows a new leader.
                continue
