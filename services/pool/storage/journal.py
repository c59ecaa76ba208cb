"""A replica's account of its shard: its position, and the records that each commit changed.

Owns two tables that are never sent: `replica`, the state below, and `journal`, the keys (not
values) that each of the last commits changed. A returning replica gets the present values of every
record that either side changed since both were last equal: no log of values is kept, and
unacknowledged writes of a deposed leader are overwritten.

A commit is identified by its position and the leadership that made it, as two leaders may each have
made one at the same position. `follow` applies a leader's steps; until it has caught up, its
records are of no single moment (`copying`). An interrupted catch-up by journal resumes from the
same commit, a whole copy after its last page.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from forge.core.errors import DataLoss, FailedPrecondition
from forge.v1 import replica_pb2 as pb
from services.pool.storage.environment.migrations import SCHEMA_VERSION
from services.pool.storage.records import Records, open_value
from services.pool.storage.tables import LOCAL, Key, Table

JOURNAL_BYTES = 256 << 20
"""Size limit of the journal; a follower that needs older entries gets a full copy."""
TOUCHED_BYTES = 1 << 20
"""Most bytes of keys in one message; a follower with more asks for a whole copy."""
PAGE_BYTES = 1 << 20

SENT = tuple(table for table in Table if table not in LOCAL)

_STATE_KEY = b"state"
_POSITION = struct.Struct(">Q")
_TABLES = {table.value: table for table in SENT}

Changes = Mapping[Key, bytes | None]
"""Records as they lie on disk after a commit; None for those it deleted."""


class ReplicaState(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Position and history of a replica."""

    replica_id: str = ""
    """Identity of the data directory; empty for a shard that was never replicated."""
    lineage: str = ""
    """Lineage of the shard; empty until it follows or leads."""
    position: int = 0
    """Position of the newest commit."""
    agreed_position: int = 0
    """Newest one that another replica is known to have had as well."""
    journal_from: int = 0
    """The journal has every commit after this one."""
    journal_bytes: int = 0
    copying: bool = False
    schema_version: int = 0
    resumable: bool = False
    """While copying: applied commits also enter the journal, so that an interrupted catch-up by
    journal continues by journal, without a whole copy."""
    copied: bytes = b""
    """While a whole copy is made: the CopyProgress of its last page."""
    terms: tuple[tuple[int, int], ...] = ()
    """Leaderships that made its commits, oldest first, as far back as the journal: the term, and
    the position behind which it began. Term 0 has no leader."""

    def term_at(self, position: int) -> int:
        """The leadership that made the commit at `position`."""
        return next((term for term, after in reversed(self.terms) if after < position), 0)


_encoder = msgspec.msgpack.Encoder()
_state_decoder = msgspec.msgpack.Decoder(ReplicaState)
_keys_decoder = msgspec.msgpack.Decoder(list[tuple[str, bytes]])


def replica_state(records: Records) -> ReplicaState:
    """The stored state; the default before the first."""
    stored = records.get(Table.REPLICA, _STATE_KEY)
    return ReplicaState() if stored is None else _state_decoder.decode(stored)


def _keep(records: Records, state: ReplicaState) -> ReplicaState:
    records.put(Table.REPLICA, _STATE_KEY, _encoder.encode(state))
    return state


def begin_replication(records: Records, *, replica_id: str) -> ReplicaState:
    """The state under `replica_id`; called when a replicated shard is opened."""
    state = replica_state(records)
    if state.replica_id == replica_id and state.schema_version == SCHEMA_VERSION:
        return state
    # A migration is in no journal, and a copy of the files is another, maybe old, replica:
    # followers must copy everything.
    own = msgspec.structs.replace(state, replica_id=replica_id, schema_version=SCHEMA_VERSION)
    return _keep(records, _cut_off(records, own))


def leave_replication(records: Records) -> None:
    """Stops counting commits: a later follower copies everything."""
    _keep(records, _cut_off(records, replica_state(records)))


def _cut_off(records: Records, state: ReplicaState) -> ReplicaState:
    records.clear(Table.JOURNAL)
    position = state.position + 1
    return msgspec.structs.replace(
        state,
        position=position,
        agreed_position=0,
        journal_from=position,
        journal_bytes=0,
        terms=((0, state.position),),
    )


def adopt(records: Records, lineage: str, *, term: int) -> ReplicaState:
    """Leads a lineage from here on, or becomes its first leader."""
    state = replica_state(records)
    made = [each for each in state.terms if each[1] < state.position]
    begun = (*made, (term, state.position))
    # Commits from before the journal are never requested.
    older = [index for index, (_, after) in enumerate(begun) if after < state.journal_from]
    terms = begun[older[-1] if older else 0 :]
    return _keep(records, msgspec.structs.replace(state, lineage=lineage, terms=terms))


def is_empty(records: Records) -> bool:
    """True if the shard has no groups and no trajectories."""
    return not records.count(Table.GROUPS) and not records.count(Table.TRAJECTORIES)


# The leader's side


def log_commit(records: Records, changes: Changes, *, confirmed_position: int) -> int:
    """Adds the changes of this transaction as the next commit; its position."""
    state = replica_state(records)
    agreed = max(state.agreed_position, min(confirmed_position, state.position))
    state = msgspec.structs.replace(state, agreed_position=agreed)
    return _enter(records, state, changes.keys()).position


def _enter(records: Records, state: ReplicaState, keys: Iterable[Key]) -> ReplicaState:
    position = state.position + 1
    entry = _encoder.encode([(table.value, key) for table, key in keys])
    records.put(Table.JOURNAL, _POSITION.pack(position), entry)
    size_bytes, oldest = state.journal_bytes + len(entry), state.journal_from
    while size_bytes > JOURNAL_BYTES and oldest < position:
        oldest += 1
        dropped = records.get(Table.JOURNAL, _POSITION.pack(oldest))
        size_bytes -= len(dropped) if dropped is not None else 0
        records.delete(Table.JOURNAL, _POSITION.pack(oldest))
    return _keep(
        records,
        msgspec.structs.replace(
            state, position=position, journal_from=oldest, journal_bytes=size_bytes
        ),
    )


def can_catch_up(state: ReplicaState, follower: pb.FollowerState) -> bool:
    """Whether the journal reaches back to where the follower was equal to this replica."""
    return (
        follower.lineage == state.lineage
        and state.journal_from <= follower.agreed_position <= state.position
        and follower.agreed_position > 0
        and follower.agreed_term == state.term_at(follower.agreed_position)
    )


def can_continue_copy(state: ReplicaState, follower: pb.FollowerState, *, term: int) -> bool:
    """Whether the journal has every change in the follower's part of a copy.

    Another leadership's may not: its unacknowledged commits are in no journal.
    """
    copied = follower.copied
    return (
        follower.HasField("copied")
        and copied.term == term
        and follower.lineage == state.lineage
        and state.journal_from <= copied.complete_position <= state.position
    )


def keys_changed(records: Records, *, after: int, up_to: int) -> tuple[list[pb.RecordKey], int]:
    """A page of keys changed by the commits after `after`, and the last commit read.

    Raises `FailedPrecondition` if the journal no longer has one of them.
    """
    found: dict[tuple[str, bytes], None] = {}
    size_bytes = 0
    while after < up_to and size_bytes < PAGE_BYTES:
        payload = records.get(Table.JOURNAL, _POSITION.pack(after + 1))
        if payload is None:
            raise FailedPrecondition(f"the journal no longer has commit {after + 1}: copy all")
        size_bytes += len(payload)
        found.update(dict.fromkeys(_keys_decoder.decode(payload)))
        after += 1
    return [pb.RecordKey(table=table, key=key) for table, key in found], after


def present_values(records: Records, keys: Sequence[pb.RecordKey]) -> tuple[pb.RecordChanges, int]:
    """The present records of `keys`, up to a page, and the number of keys read."""
    page = pb.RecordChanges(position=replica_state(records).position)
    size_bytes = 0
    for taken, key in enumerate(keys):
        if size_bytes >= PAGE_BYTES:
            return page, taken
        value = records.get_checksummed(_table(key), key.key)
        page.changes.add(record=key, value=value or b"")
        size_bytes += len(key.key) + len(value or b"")
    return page, len(keys)


def all_records(records: Records, *, after: pb.RecordKey | None) -> tuple[pb.RecordChanges, bool]:
    """A page of all records after that one, and whether there are more."""
    page = pb.RecordChanges(position=replica_state(records).position)
    size_bytes = 0
    number, last = (0, b"") if after is None else (SENT.index(_table(after)), after.key)
    for table in SENT[number:]:
        for key, value in records.scan_checksummed(table, after=last):
            page.changes.add(record=record_key(table, key), value=value)
            size_bytes += len(key) + len(value)
            if size_bytes >= PAGE_BYTES:
                return page, True
        last = b""
    return page, False


def commit_message(position: int, changes: Changes) -> bytes:
    """A serialized FollowStep of one commit."""
    step = pb.FollowStep(commit=pb.RecordChanges(position=position))
    for (table, key), value in changes.items():
        step.commit.changes.add(record=record_key(table, key), value=value or b"")
    return step.SerializeToString()


def caught_up_message(position: int, terms: Iterable[tuple[int, int]]) -> bytes:
    """A serialized FollowStep that ends a catch-up."""
    made = [pb.Term(term=term, after_position=after) for term, after in terms]
    return pb.FollowStep(caught_up_position=position, terms=made).SerializeToString()


def record_key(table: Table, key: bytes) -> pb.RecordKey:
    """A key in its message."""
    return pb.RecordKey(table=table.value, key=key)


# The follower's side


def follower_state(records: Records, *, shard: str) -> pb.FollowerState:
    """The state that a leader needs to bring this replica up to date."""
    state = replica_state(records)
    lineage = state.lineage or ("" if is_empty(records) else "unreplicated")
    found = pb.FollowerState(
        pool_shard=shard,
        replica_id=state.replica_id,
        lineage=lineage,
        schema_version=SCHEMA_VERSION,
    )
    if state.copying and not state.resumable:
        if state.copied:
            found.copied.ParseFromString(state.copied)
        return found
    after = state.agreed_position
    if state.journal_from <= after:
        while after < state.position:
            keys, after = keys_changed(records, after=after, up_to=state.position)
            found.touched.extend(keys)
            if found.ByteSize() > TOUCHED_BYTES:
                del found.touched[:]
                return found
        found.agreed_position = state.agreed_position
        found.agreed_term = state.term_at(state.agreed_position)
    return found


def follow(records: Records, steps: Sequence[pb.FollowStep]) -> int:
    """Applies a leader's steps in order; the position reached, 0 while copying.

    Raises `DataLoss`, and applies nothing, if a record or a commit was lost on the way.
    """
    state = replica_state(records)
    _check(state, steps)
    for step in steps:
        state = _follow_step(records, state, step)
    _keep(records, state)
    return 0 if state.copying else state.position


def _check(state: ReplicaState, steps: Sequence[pb.FollowStep]) -> None:
    copying, position = state.copying, state.position
    for step in steps:
        for change in (*step.copy.changes, *step.commit.changes):
            table = _table(change.record)
            if change.value:
                open_value(table, change.record.key, change.value)
        kind = step.WhichOneof("step")
        if kind == "commit" and not copying:
            if step.commit.position != position + 1:
                raise DataLoss(f"commit {step.commit.position} came after commit {position}")
            position += 1
        elif kind == "caught_up_position":
            copying, position = False, step.caught_up_position
        elif kind == "begin":
            copying = True


def _follow_step(records: Records, state: ReplicaState, step: pb.FollowStep) -> ReplicaState:
    match step.WhichOneof("step"):
        case "begin":
            if step.begin.from_scratch:
                for table in SENT:
                    records.clear(table)
            return msgspec.structs.replace(
                state,
                lineage=step.begin.lineage,
                copying=True,
                resumable=not (step.begin.from_scratch or step.begin.continues_copy),
                copied=b"" if step.begin.from_scratch else state.copied,
            )
        case "caught_up_position":
            position = step.caught_up_position
            records.clear(Table.JOURNAL)
            return msgspec.structs.replace(
                state,
                position=position,
                agreed_position=position,
                journal_from=position,
                journal_bytes=0,
                copying=False,
                resumable=False,
                copied=b"",
                terms=tuple((each.term, each.after_position) for each in step.terms),
            )
        case "copy":
            return _copy(records, state, step.copy)
        case _:
            return _follow_commit(records, state, step.commit)


def _follow_commit(records: Records, state: ReplicaState, commit: pb.RecordChanges) -> ReplicaState:
    if state.copying:
        return _copy(records, state, commit)
    _take(records, commit)
    entered = _enter(records, state, _keys_of(commit))
    return msgspec.structs.replace(entered, agreed_position=commit.position)


def _copy(records: Records, state: ReplicaState, changes: pb.RecordChanges) -> ReplicaState:
    _take(records, changes)
    if changes.HasField("copied"):
        state = msgspec.structs.replace(state, copied=changes.copied.SerializeToString())
    # Another leader may lack what this one sent: it must be asked for all of that, too.
    return _enter(records, state, _keys_of(changes)) if state.resumable else state


def _keys_of(changes: pb.RecordChanges) -> list[Key]:
    return [(_table(change.record), change.record.key) for change in changes.changes]


def _take(records: Records, changes: pb.RecordChanges) -> None:
    for change in changes.changes:
        records.put_checksummed(_table(change.record), change.record.key, change.value or None)


def _table(key: pb.RecordKey) -> Table:
    try:
        return _TABLES[key.table]
    except KeyError:
        raise DataLoss(f"a replica sent a record of table {key.table!r}, unknown here") from None
