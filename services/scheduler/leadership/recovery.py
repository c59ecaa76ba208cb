"""How a new leader takes office: the pool's records become the queue again.

    1. read the term record from etcd, add one, write it back (`services.scheduler.term_record`)
    2. wait for every pool shard that ever held a group, but begin without one that stays away
    3. fence each shard, so that an earlier leader's writes are refused from then on
    4. scan each shard: what was changed on it since this instance, standing by, scanned it last
       (`services.scheduler.leadership.standby`), or what is pending and the newest settled groups;
       add these in queue order, and the counters of the settled groups that are left out

A shard is entered in the record before the first group is put on it, so none can be forgotten. One
that is away in step 2 is read when it comes, in mid-term. Until then its groups are unknown: the
head does not pass an index that may be one's, a call that names an unknown task is answered
UNAVAILABLE, and no task is accepted, which that shard might hold already.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable

from forge.runtime.telemetry import log
from services.scheduler.leadership.standby import Enlisted, ShardCopies
from services.scheduler.pool_shards import PoolShards, gathered

_REMIND_S = 10.0
ANY = "any"
"""Instead of the name of a shard: no shard was ever used, and none is there."""


async def wait_for_shards(
    shards: PoolShards,
    known: frozenset[str],
    *,
    lost: frozenset[str],
    patience_s: float,
    awaiting: Callable[[frozenset[str]], Awaitable[None]],
) -> frozenset[str]:
    """The shards that are registered: every known one but the lost, or, after `patience_s`, at
    least one. `awaiting` is told which are missing, `ANY` for the first of all, none in the end."""
    give_up_s = time.monotonic() + patience_s
    while not (live := shards.live()) or known - lost - live:
        left_s = give_up_s - time.monotonic()
        if live and left_s <= 0:
            break
        missing = known - lost - live
        log.warning("waiting_for_pool_shards", missing=sorted(missing) or "any")
        await awaiting(missing or frozenset({ANY}))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, _REMIND_S) if live else _REMIND_S):
                await shards.changed()
    await awaiting(frozenset())
    return live


async def enlist(shards: PoolShards, names: Iterable[str], copies: ShardCopies) -> Enlisted:
    """Fence shards, and bring their copies up to date; what is taken from `copies`."""

    async def enlist_one(shard: str) -> None:
        # The fence first: after the scan, no other scheduler may write.
        await shards.raise_fence(shard)
        returned = await copies.refresh(shard, count=True)
        log.info("pool_shard_enlisted", pool_shard=shard, groups=copies.held(shard), told=returned)

    names = frozenset(names)
    await gathered(map(enlist_one, names))
    return copies.take(names)
