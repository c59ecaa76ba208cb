"""Counters of settled groups, for schedulers, which do not read those groups.

    groups and rollouts   by purpose, state, domain and reason
    recent rollouts       by domain: the last `RECENT_ROLLOUTS` of training groups, by seal time
    commits               by batch id: the step, and the number of groups it trained here

A rewind removes rollouts from the recent ones without replacement: more recent rollouts are then in
pending groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from forge.core.queue.groups import COUNTED_REASONS
from forge.v1 import common_pb2
from services.pool.storage.records import Payload, Records
from services.pool.storage.tables import Table

RECENT_ROLLOUTS = 64
"""At least as many as a scheduler's progress is the mean of."""

_GROUPS, _RECENT, _COMMITS = b"g", b"r", b"b"
_DIGEST_BYTES = 16
_encoder = msgspec.msgpack.Encoder()


class CountedRollout(NamedTuple):
    """A rollout that is counted."""

    sealed_unix_s: float
    trajectory: bytes
    """Key of the trajectory."""


class CountKey(NamedTuple):
    """The key of a counter."""

    purpose: int
    state: int
    domain: str
    reason: str
    """One of `COUNTED_REASONS`, or ""."""


class GroupCount(msgspec.Struct, array_like=True, frozen=True):
    """One counter as stored."""

    purpose: int
    state: int
    domain: str
    reason: str
    groups: int
    rollouts: int


class RecentRollouts(msgspec.Struct, array_like=True, frozen=True):
    """The last rollouts of a domain."""

    domain: str
    rollouts: list[tuple[float, bytes]]
    """The latest first."""


class Commit(msgspec.Struct, array_like=True, frozen=True):
    """The groups that one batch trained."""

    batch_id: str
    groups: dict[int, int]
    """Groups trained, by step."""

    @property
    def step(self) -> int:
        """Step by which the batch counts as committed."""
        return max(self.groups)


_count_decoder = msgspec.msgpack.Decoder(GroupCount)
_recent_decoder = msgspec.msgpack.Decoder(RecentRollouts)
_commit_decoder = msgspec.msgpack.Decoder(Commit)


class SettledCounts:
    """Changes of the counters, stored together."""

    def __init__(self) -> None:
        self._groups: defaultdict[CountKey, int] = defaultdict(int)
        self._rollouts: defaultdict[CountKey, int] = defaultdict(int)
        self._commits: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._gone: defaultdict[str, set[bytes]] = defaultdict(set)
        """Trajectories by domain."""
        self._come: defaultdict[str, dict[bytes, float]] = defaultdict(dict)

    def enter(
        self,
        group: common_pb2.GroupRecord,
        state: common_pb2.GroupRecord,
        rollouts: Sequence[CountedRollout],
    ) -> None:
        """Counts a group that is now settled in `state`."""
        come = self._come[group.task.domain]
        for rollout in rollouts:
            come[rollout.trajectory] = rollout.sealed_unix_s
        if len(come) > 16 * RECENT_ROLLOUTS:
            self._come[group.task.domain] = dict(
                sorted(come.items(), key=_latest_first)[:RECENT_ROLLOUTS]
            )
        self._add(group, state, rollouts, 1)

    def leave(
        self,
        group: common_pb2.GroupRecord,
        state: common_pb2.GroupRecord,
        rollouts: Sequence[CountedRollout],
    ) -> None:
        """Uncounts a group that was settled in `state`."""
        self._gone[group.task.domain] |= {rollout.trajectory for rollout in rollouts}
        self._add(group, state, rollouts, -1)

    def _add(
        self,
        group: common_pb2.GroupRecord,
        state: common_pb2.GroupRecord,
        rollouts: Sequence[CountedRollout],
        sign: int,
    ) -> None:
        task = group.task
        reason = state.reason if state.reason in COUNTED_REASONS else ""
        key = CountKey(task.purpose, state.state, task.domain, reason)
        self._groups[key] += sign
        self._rollouts[key] += sign * len(rollouts)
        if state.state == common_pb2.GROUP_STATE_TRAINED:
            self._commits[state.batch_id, state.step] += sign

    def store(self, records: Records) -> None:
        """Adds the changes to the stored counters."""
        for key, groups in self._groups.items():
            if groups or self._rollouts[key]:
                _add_groups(records, key, groups, self._rollouts[key])
        for (batch_id, step), groups in self._commits.items():
            if groups:
                _add_commit(records, batch_id, step, groups)
        for domain in self._gone.keys() | self._come.keys():
            _change_recent(records, domain, self._gone[domain], self._come[domain])

    def rows(self) -> dict[CountKey, tuple[int, int]]:
        """Groups and rollouts entered, minus those that left."""
        return {key: (groups, self._rollouts[key]) for key, groups in self._groups.items()}

    def commits(self) -> dict[tuple[str, int], int]:
        """Groups entered, minus those that left, by batch and step."""
        return dict(self._commits)


def _latest_first(entry: tuple[bytes, float]) -> tuple[float, bytes]:
    return -entry[1], entry[0]


def _key(kind: bytes, name: str) -> bytes:
    return kind + blake2b(name.encode(), digest_size=_DIGEST_BYTES).digest()


def _count_key(key: CountKey) -> bytes:
    return _key(_GROUPS, "\0".join(map(str, key)))


def _add_groups(records: Records, key: CountKey, groups: int, rollouts: int) -> None:
    at = _count_key(key)
    stored = records.get(Table.SETTLED_COUNTS, at)
    if stored is not None:
        before = _count_decoder.decode(stored)
        groups, rollouts = groups + before.groups, rollouts + before.rollouts
    if groups:
        records.put(Table.SETTLED_COUNTS, at, _encoder.encode(GroupCount(*key, groups, rollouts)))
    else:
        records.delete(Table.SETTLED_COUNTS, at)


def _add_commit(records: Records, batch_id: str, step: int, groups: int) -> None:
    at = _key(_COMMITS, batch_id)
    stored = records.get(Table.SETTLED_COUNTS, at)
    by_step = {} if stored is None else _commit_decoder.decode(stored).groups
    by_step[step] = by_step.get(step, 0) + groups
    if not by_step[step]:
        del by_step[step]
    if by_step:
        records.put(Table.SETTLED_COUNTS, at, _encoder.encode(Commit(batch_id, by_step)))
    else:
        records.delete(Table.SETTLED_COUNTS, at)


def _change_recent(
    records: Records, domain: str, gone: set[bytes], come: dict[bytes, float]
) -> None:
    if not gone and not come:
        return
    at = _key(_RECENT, domain)
    stored = records.get(Table.SETTLED_COUNTS, at)
    before = [] if stored is None else _recent_decoder.decode(stored).rollouts
    kept = {key: sealed for sealed, key in before if key not in gone} | come
    newest = sorted(kept.items(), key=_latest_first)[:RECENT_ROLLOUTS]
    rollouts = [(sealed_unix_s, key) for key, sealed_unix_s in newest]
    if rollouts == before:
        return
    if rollouts:
        value = _encoder.encode(RecentRollouts(domain, rollouts))
        records.put(Table.SETTLED_COUNTS, at, value)
    else:
        records.delete(Table.SETTLED_COUNTS, at)


# Reads


def group_counts(records: Records) -> Iterator[GroupCount]:
    """Every counter of groups."""
    for _, payload in records.scan(Table.SETTLED_COUNTS, prefix=_GROUPS):
        yield _count_decoder.decode(payload)


def recent_rollouts(records: Records) -> Iterator[RecentRollouts]:
    """The recent rollouts of every domain."""
    for _, payload in records.scan(Table.SETTLED_COUNTS, prefix=_RECENT):
        yield _recent_decoder.decode(payload)


def commits(records: Records) -> Iterator[Commit]:
    """Every commit."""
    for _, payload in records.scan(Table.SETTLED_COUNTS, prefix=_COMMITS):
        yield _commit_decoder.decode(payload)


def commit_of(records: Records, batch_id: str) -> Commit | None:
    """None if that batch trained no group of this shard."""
    stored: Payload | None = records.get(Table.SETTLED_COUNTS, _key(_COMMITS, batch_id))
    return None if stored is None else _commit_decoder.decode(stored)
