"""Checks that a closed trajectory still has the records it was closed with.

A checksum guards one record and not against its loss. So the header of a closed trajectory keeps
the number of turns and rewards and a digest of each: BLAKE2b over keys and checksums, in order of
key. Turns never change after the close; a later reward updates count and digest in its transaction.
Headers of older versions have no digests and are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain

import msgspec

from forge.v1 import common_pb2
from services.pool.metrics import CLOSED_READS
from services.pool.storage.keys import index_of_turn_key, name_of_trajectory_key
from services.pool.storage.records import DamagedRecord, Payload, Records, TrajectoryHeader
from services.pool.storage.tables import Table

_DIGEST_BYTES = 8
_NAMED = 8
"""Most records that an error lists."""
_VERIFIED = CLOSED_READS.labels("verified")
_UNVERIFIED = CLOSED_READS.labels("unverified")
_DAMAGED = CLOSED_READS.labels("damaged")

Mark = tuple[bytes, bytes]
"""Key and checksum of a record."""


def digest_of(marks: Iterable[Mark]) -> bytes:
    """Digest of records in order of key."""
    return blake2b(b"".join(chain.from_iterable(marks)), digest_size=_DIGEST_BYTES).digest()


def marks_of(records: Records, table: Table, trajectory: bytes) -> list[Mark]:
    """Marks of all turns or rewards of a trajectory."""
    return [(key, checksum) for key, checksum, _ in records.scan_stored(table, prefix=trajectory)]


def with_turns(header: TrajectoryHeader, turns: Sequence[Mark]) -> TrajectoryHeader:
    """`header` with the digest of all turns; `summaries` counts them."""
    return msgspec.structs.replace(header, turns_digest=digest_of(turns))


def with_rewards(header: TrajectoryHeader, rewards: Sequence[Mark]) -> TrajectoryHeader:
    """`header` with count and digest of all rewards."""
    return msgspec.structs.replace(
        header, reward_events=len(rewards), rewards_digest=digest_of(rewards)
    )


def is_compared(header: TrajectoryHeader) -> bool:
    """True if the header keeps digests: closed, by a version that wrote them."""
    return bool(header.turns_digest) and not header.freed


def turns_damage(header: TrajectoryHeader, turns: Sequence[Mark]) -> str:
    """Describes the damage to the turns of a closed trajectory; empty if there is none."""
    if not is_compared(header) or digest_of(turns) == header.turns_digest:
        return ""
    there = {index_of_turn_key(key) for key, _ in turns}
    if len(there) == header.turns:
        return "has other turns than it was closed with"
    if header.state == common_pb2.TRAJECTORY_STATE_SEALED:
        missing = [index for index in range(header.turns) if index not in there]
        return f"lacks {len(missing)} of its {header.turns} turns: {listed(map(str, missing))}"
    # The indexes of an abandoned trajectory are unknown.
    return f"has {len(there)} of its {header.turns} turns: {listed(map(str, sorted(there)))}"


def rewards_damage(trajectory: bytes, header: TrajectoryHeader, rewards: Sequence[Mark]) -> str:
    """Describes the damage to its rewards; empty if there is none."""
    if not is_compared(header) or digest_of(rewards) == header.rewards_digest:
        return ""
    if len(rewards) == header.reward_events:
        return "has other rewards than it was closed with"
    there = listed(key[len(trajectory) :].decode(errors="replace") for key, _ in rewards)
    return f"has {len(rewards)} of its {header.reward_events} rewards: {there}"


def checked_rewards(records: Records, trajectory: bytes, header: TrajectoryHeader) -> list[Payload]:
    """All rewards. Raises `DamagedRecord` if they differ from those that `header` counts."""
    marks, rewards = _stored(records, Table.REWARDS, trajectory)
    _require(trajectory, rewards_damage(trajectory, header, marks))
    return rewards


def checked_turns(records: Records, trajectory: bytes, header: TrajectoryHeader) -> list[Payload]:
    """All turns. Raises as `checked_rewards` does; counts the comparison."""
    marks, turns = _stored(records, Table.TURNS, trajectory)
    _require(trajectory, turns_damage(header, marks))
    if not header.is_open:
        (_VERIFIED if is_compared(header) else _UNVERIFIED).inc()
    return turns


def _stored(records: Records, table: Table, trajectory: bytes) -> tuple[list[Mark], list[Payload]]:
    marks: list[Mark] = []
    payloads: list[Payload] = []
    for key, checksum, payload in records.scan_stored(table, prefix=trajectory):
        marks.append((key, checksum))
        payloads.append(payload)
    return marks, payloads


def _require(trajectory: bytes, damage: str) -> None:
    if damage:
        _DAMAGED.inc()
        message = f"{name_of_trajectory_key(trajectory)} {damage}"
        raise DamagedRecord(message, table=Table.TRAJECTORIES, key=trajectory)


def listed(names: Iterable[str]) -> str:
    """The first names of records, for an error; "none" without one."""
    every = list(names)
    return (", ".join(every[:_NAMED]) + (", ..." if len(every) > _NAMED else "")) or "none"
