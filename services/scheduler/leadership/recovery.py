"""Recovery: a new leader rebuilds the queue from the pool's records.

    1. read the term record from etcd (`term_record`)
    2. wait for every pool shard that may hold a group, at most `shard_wait_s`; take a fence and a
       number of the term above all that these shards know, write the record; complete the last move
       of groups between two shards
    3. raise the fence of each shard: from then on it refuses an earlier leader's writes
    4. scan each shard: the changes since the standby's last scan (`leadership.standby`), or the
       pending groups and the newest settled ones; add these in queue order, then the counters of
       the settled groups that the scan left out

The record names a shard before the first group is stored on it, so no shard is missed. A shard
that is unreachable in step 2 is read when it joins. Until then its groups are unknown: the head
passes no index that one of them may have, a call that names an unknown task is answered with
UNAVAILABLE, and no new task is accepted, because that shard may hold it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from forge.runtime.concurrency.tasks import first_done
from forge.runtime.coordination import Leadership
from forge.runtime.telemetry import log
from services.scheduler.leadership.standby import RegisteredGroups, ShardCopies
from services.scheduler.shards.pool_shards import Floors, PoolShards, gathered
from services.scheduler.term_record import TermRecord

_REMIND_S = 10.0
ANY = "any"
"""In place of a shard's name: no shard was ever used, and none is registered."""


async def wait_for_shards(
    shards: PoolShards,
    known: frozenset[str],
    *,
    forget_gone: Callable[[frozenset[str]], Awaitable[frozenset[str]]],
    declared: asyncio.Event,
    patience_s: float,
    awaiting: Callable[[frozenset[str]], Awaitable[None]],
) -> tuple[frozenset[str], frozenset[str]]:
    """The registered shards, and those that are gone: every known one is registered or gone, or,
    after `patience_s`, at least one is registered. `forget_gone` returns which of some shards were
    retired or declared lost. `awaiting` receives the missing ones: `ANY` if none is known, an empty
    set at the end. `declared` is set when a shard was declared lost."""
    give_up_s = time.monotonic() + patience_s
    gone = await forget_gone(known)
    while True:
        # Before the look at `live`: a shard may join while `awaiting` stores its absence.
        changed = asyncio.ensure_future(shards.changed())
        try:
            live = shards.live()
            missing = known - gone - live
            left_s = give_up_s - time.monotonic()
            if live and (not missing or left_s <= 0):
                break
            log.warning("waiting_for_pool_shards", missing=sorted(missing) or "any")
            await awaiting(missing or frozenset({ANY}))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, _REMIND_S) if live else _REMIND_S):
                    await first_done(changed, declared.wait())
        finally:
            changed.cancel()
        declared.clear()
        gone = await forget_gone(known)
    await awaiting(frozenset())
    return live, gone


async def above_floors(record: TermRecord, floors: Floors, leadership: Leadership) -> TermRecord:
    """The record that the next term continues. Raises Unavailable without leadership.

    A shard that knows a later leader than etcd shows that etcd was restored from an older snapshot.
    Then fence and number of the term rise above that leader's, and its batches are void, because a
    rewind may be unknown. No stored head counts.
    """
    is_older = floors.fence >= leadership.fence or floors.term > record.term
    if not floors.fence or not is_older:
        return record
    term = max(record.term, floors.term)
    log.warning(
        "etcd_is_older_than_pool",
        etcd_term=record.term,
        etcd_fence=leadership.fence,
        pool_term=floors.term,
        pool_fence=floors.fence,
    )
    await leadership.raise_above(floors.fence)
    return replace(record, term=term, void_before=(term + 1, 0), head=0, claims=True)


async def register_shards(
    shards: PoolShards, names: Iterable[str], copies: ShardCopies, *, term: int
) -> RegisteredGroups:
    """Raise the fence of each shard, refresh its copy, and take the groups from `copies`."""

    async def register(shard: str) -> None:
        # The fence first: after the scan, no other scheduler may write.
        await shards.raise_fence(shard, term=term)
        returned = await copies.refresh(shard, count=True)
        log.info(
            "pool_shard_registered",
            pool_shard=shard,
            groups=copies.size(shard),
            groups_read=returned,
        )

    names = frozenset(names)
    await gathered(map(register, names))
    return copies.hand_over(names)
