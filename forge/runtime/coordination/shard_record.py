"""The durable record of a pool shard in etcd: which store its name belongs to.

    pool/shards/<shard>     written by the pool when a store is served under the name, and by the
                            scheduler's leader when the shard is retired or declared lost

Owns format and key. A record with `gone` belongs to a store that is refused from then on; its name
is free for another store.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from forge.core.errors import StaleFence
from forge.runtime.coordination.coordinator import Coordinator

SHARDS_PREFIX = "pool/shards/"
RETIRED = "retired"
LOST = "declared lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """The store that a shard's name belongs to."""

    lineage: str
    directory_id: str
    """Identity of the data directory that serves it; empty while it is replicated."""
    data_dir: str
    """Path of that directory at its last start, for messages."""
    host: str
    instance_id: str
    gone: str = ""
    """`RETIRED` or `LOST`; "" for a shard that may be served."""
    gone_unix_s: float = 0.0

    def __str__(self) -> str:
        """For messages."""
        return f"the store in {self.data_dir} of host {self.host} (instance {self.instance_id})"

    @property
    def gone_text(self) -> str:
        """Describe what happened to the shard, with the time."""
        when = datetime.fromtimestamp(self.gone_unix_s, UTC)
        return f"was {self.gone} on {when:%Y-%m-%d %H:%M} UTC"

    def encoded(self) -> bytes:
        """The value in etcd."""
        return json.dumps(asdict(self)).encode()


def record_key(shard: str) -> str:
    """The key, relative to the cluster."""
    return f"{SHARDS_PREFIX}{shard}"


def decoded(value: bytes) -> ShardRecord:
    """The record of a value; fields of later versions are ignored."""
    known = {each.name for each in fields(ShardRecord)}
    stored: dict[str, Any] = json.loads(value)
    return ShardRecord(**{name: stored[name] for name in known & stored.keys()})


async def read_record(coordinator: Coordinator, shard: str) -> tuple[ShardRecord | None, int]:
    """The record and its revision; None and 0 before a shard is first served. Raises
    Unavailable."""
    stored = await coordinator.get(record_key(shard))
    if stored is None:
        return None, 0
    return decoded(stored.value), stored.mod_revision


async def mark_gone(
    coordinator: Coordinator, shard: str, *, gone: str, lineage: str, now_unix_s: float
) -> None:
    """Marks the store of a shard as `RETIRED` or `LOST`, unless another store has the name by now.
    Idempotent. Raises Unavailable."""
    while True:
        found, revision = await read_record(coordinator, shard)
        if found is None:
            found = ShardRecord(
                lineage=lineage, directory_id="", data_dir="", host="", instance_id=""
            )
        if found.gone or found.lineage != lineage:
            return
        marked = replace(found, gone=gone, gone_unix_s=now_unix_s)
        try:
            await coordinator.compare_and_swap(
                record_key(shard), marked.encoded(), expected_revision=revision
            )
        except StaleFence:
            continue
        return


async def gone_shards(coordinator: Coordinator, shards: frozenset[str]) -> dict[str, ShardRecord]:
    """The records of those shards that were retired or declared lost. Raises Unavailable."""
    found = {}
    for shard in sorted(shards):
        record, _ = await read_record(coordinator, shard)
        if record is not None and record.gone:
            found[shard] = record
    return found


async def gone_text(coordinator: Coordinator, shard: str) -> str:
    """When and how a shard was retired or declared lost; "" if it was not. Raises Unavailable."""
    record, _ = await read_record(coordinator, shard)
    return record.gone_text if record is not None and record.gone else ""
