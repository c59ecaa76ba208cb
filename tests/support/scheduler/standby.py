"""Shards that a standby scans, in one process, and everything that a term keeps, to be compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Callable
from enum import Enum
from typing import Any, TypeVar

from forge.core.errors import Unavailable
from forge.v1 import pool_pb2
from services.pool.store import PoolStore
from services.scheduler.shards.pool_shards import PoolShards
from services.scheduler.state.domain_progress import DomainProgress
from tests.support.pool.servicer import make_servicer

T = TypeVar("T")


class AtOnce:
    """Readers that read on the caller's thread."""

    async def run(self, read: Callable[[], T]) -> T:
        return read()


class StoreScans(PoolShards):
    """What `ShardScans` promises, of stores in this process."""

    def __init__(self, stores: dict[str, PoolStore]) -> None:
        self.stores = stores
        self.break_after: int | None = None
        """So many responses into a scan, the shard is gone."""
        self.sent: list[int] = []
        """Groups in each scan."""

    def live(self) -> frozenset[str]:
        return frozenset(self.stores)

    async def scan(
        self, shard: str, **options: Any
    ) -> AsyncGenerator[pool_pb2.ScanGroupsResponse, None]:
        store = self.stores[shard]
        servicer = make_servicer(store, readers=AtOnce())
        request = pool_pb2.ScanGroupsRequest(**options)
        self.sent.append(0)
        number = 0
        async for response in servicer.ScanGroups(request, None):
            if number == self.break_after:
                raise Unavailable("gone")
            number += 1
            self.sent[-1] += response.HasField("group")
            yield response


class WholeScans(StoreScans):
    """The same of shards of an earlier version, which leave nothing out."""

    async def scan(
        self, shard: str, *, since: str = "", **_: Any
    ) -> AsyncGenerator[pool_pb2.ScanGroupsResponse, None]:
        async for response in super().scan(shard, since=since):
            yield response


def everything_in(thing: Any) -> Any:
    """All that can be reached from `thing`, in the order it is kept in, as plain values."""
    return _plain(thing, {})


def _plain(thing: Any, seen: dict[int, int]) -> Any:
    if thing is None or isinstance(thing, bool | int | float | str | bytes):
        return repr(thing)
    if isinstance(thing, Enum):
        return thing.name
    if id(thing) in seen:
        return f"seen {seen[id(thing)]}"
    if not isinstance(thing, list | tuple | set | frozenset) and not callable(thing):
        seen[id(thing)] = len(seen)
    if isinstance(thing, Counter):
        # The order in which kinds came, and those that went, mean nothing.
        return sorted((_plain(key, seen), count) for key, count in thing.items() if count)
    if isinstance(thing, DomainProgress):
        recent = {domain: sorted(heap) for domain, heap in thing._recent.items()}
        return sorted(thing._completed.items()), sorted(recent.items())
    if isinstance(thing, dict):
        return [(_plain(key, seen), _plain(value, seen)) for key, value in thing.items()]
    if isinstance(thing, set | frozenset):
        return sorted(repr(each) for each in thing)
    if callable(thing):
        return "callable"
    if hasattr(thing, "__iter__"):
        return [_plain(each, seen) for each in thing]
    names = getattr(thing, "__dict__", None) or _slots(type(thing))
    return type(thing).__name__, [(name, _plain(getattr(thing, name), seen)) for name in names]


def _slots(kind: type) -> list[str]:
    return [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
