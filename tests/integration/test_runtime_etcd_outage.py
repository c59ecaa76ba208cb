"""What coordination does while etcd is killed, frozen or compacted under it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import trustme
from structlog.testing import capture_logs

from forge.core.errors import Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.security.tls import Tls
from tests.support.runtime.etcd import Certificates, EtcdServer
from tests.support.runtime.waiting import LIMIT_S, until

pytestmark = pytest.mark.faults

TTL_S = 2.0
"""The shortest lease that etcd grants."""


@pytest_asyncio.fixture
async def member(own_etcd: EtcdServer) -> AsyncIterator[Coordinator]:
    """A process that registers and leads."""
    connected = await Coordinator.connect(own_etcd.endpoint, cluster="outage")
    yield connected
    await connected.close()


@pytest_asyncio.fixture
async def observer(own_etcd: EtcdServer) -> AsyncIterator[Coordinator]:
    """Another process that looks on."""
    connected = await Coordinator.connect(own_etcd.endpoint, cluster="outage")
    yield connected
    await connected.close()


async def in_thread(action: Callable[[], None]) -> None:
    await asyncio.get_running_loop().run_in_executor(None, action)


async def test_killed_etcd_leaves_the_last_known_view(
    own_etcd: EtcdServer, member: Coordinator, observer: Coordinator
) -> None:
    """While etcd is down, discovery keeps its instances, even after the TTL."""
    registration = await member.register("pool", "p", "h:1", ttl_s=TTL_S)
    discovery = observer.discover("pool")
    await discovery.wait(timeout_s=LIMIT_S)
    await in_thread(own_etcd.kill)
    await until(lambda: not registration.alive)
    # Real time: the lease runs out while etcd cannot be asked.
    await asyncio.sleep(TTL_S)
    assert [one.instance_id for one in discovery.instances] == ["p"]
    with pytest.raises(Unavailable, match=own_etcd.endpoint):
        await observer.get("config/x")


async def test_restarted_etcd_restores_discovery_without_flapping(
    own_etcd: EtcdServer, member: Coordinator, observer: Coordinator
) -> None:
    """Registrations return, discovery follows again, and it was never empty."""
    registration = await member.register("pool", "p", "h:1", ttl_s=TTL_S)
    discovery = observer.discover("pool")
    await discovery.wait(timeout_s=LIMIT_S)
    seen: list[int] = []

    async def record() -> None:
        while True:
            changed = discovery.changed()
            seen.append(len(discovery.instances))
            await changed

    recorder = asyncio.create_task(record())
    await in_thread(own_etcd.kill)
    await until(lambda: not registration.alive)
    await in_thread(own_etcd.start)
    await until(lambda: registration.alive)
    second = await member.register("pool", "q", "h:2", ttl_s=TTL_S)
    await discovery.wait(count=2, timeout_s=LIMIT_S)
    assert min(seen) == 1
    recorder.cancel()
    await second.close()
    await until(lambda: len(discovery.instances) == 1)


async def test_freeze_beyond_the_ttl_ends_leadership(
    own_etcd: EtcdServer, member: Coordinator, observer: Coordinator
) -> None:
    """A leader without an answer of etcd knows that it does not lead any more, before a rival
    can."""
    leadership = await member.campaign("scheduler", "a", ttl_s=TTL_S)
    own_etcd.freeze()
    await asyncio.wait_for(leadership.lost(), LIMIT_S)
    assert not leadership.alive
    own_etcd.thaw()
    successor = await asyncio.wait_for(observer.campaign("scheduler", "b", ttl_s=TTL_S), LIMIT_S)
    assert successor.fence > leadership.fence
    assert not leadership.alive
    await successor.resign()


async def test_registrations_survive_a_freeze_beyond_the_ttl(
    own_etcd: EtcdServer, member: Coordinator, observer: Coordinator
) -> None:
    """`alive` becomes false in time; after the thaw the entry returns, and discovery never lost
    it."""
    registration = await member.register("pool", "p", "h:1", metadata={"a": "1"}, ttl_s=TTL_S)
    discovery = observer.discover("pool")
    await discovery.wait(timeout_s=LIMIT_S)
    own_etcd.freeze()
    await until(lambda: not registration.alive)
    # Real time: etcd's own lease runs out while it is frozen.
    await asyncio.sleep(2 * TTL_S)
    lengths = [len(discovery.instances)]
    own_etcd.thaw()

    def back() -> bool:
        lengths.append(len(discovery.instances))
        return registration.alive

    await until(back)
    (found,) = await discovery.wait(timeout_s=LIMIT_S)
    assert found.metadata == {"a": "1"}
    assert set(lengths) == {1}


async def test_metadata_changed_during_an_outage_is_written_after_it(
    own_etcd: EtcdServer, member: Coordinator, observer: Coordinator
) -> None:
    """An update never fails in an outage of etcd."""
    registration = await member.register("decode", "d", "h:1", metadata={"v": "1"}, ttl_s=TTL_S)
    discovery = observer.discover("decode")
    await discovery.wait(timeout_s=LIMIT_S)
    await in_thread(own_etcd.kill)
    await registration.update({"v": "2"})
    await in_thread(own_etcd.start)
    await discovery.wait(timeout_s=LIMIT_S, where=lambda one: one.metadata["v"] == "2")


async def test_dead_instance_leaves_discovery_with_its_lease(
    own_etcd: EtcdServer, member: Coordinator, observer: Coordinator
) -> None:
    """The grace time is for outages of etcd only."""
    await member.register("pool", "p", "h:1", ttl_s=TTL_S)
    discovery = observer.discover("pool")
    await discovery.wait(timeout_s=LIMIT_S)
    await member.close()
    await until(lambda: not discovery.instances)


async def test_instance_dead_after_an_outage_is_removed_after_the_grace_time(
    own_etcd: EtcdServer, member: Coordinator, observer: Coordinator
) -> None:
    """An instance that does not return after etcd did is removed in the end."""
    await member.register("pool", "p", "h:1", ttl_s=TTL_S)
    discovery = observer.discover("pool")
    await discovery.wait(timeout_s=LIMIT_S)
    await in_thread(own_etcd.kill)
    await member.close()
    await in_thread(own_etcd.start)
    await until(lambda: not discovery.instances)


async def test_watch_from_a_compacted_revision_starts_again(
    own_etcd: EtcdServer, member: Coordinator, observer: Coordinator
) -> None:
    """Changes before a compaction that a follower missed are seen all the same."""
    await member.compare_and_swap("weights/default/latest", b"1", expected_revision=0)
    async with aclosing(observer.follow("weights/default/latest")) as values:
        first = await anext(values)
        assert first is not None
        # The follower's connection breaks; meanwhile versions pass and are compacted away.
        await in_thread(own_etcd.kill)
        await in_thread(own_etcd.start)
        for version in (b"2", b"3", b"4"):
            revision = await swap_in_the_end(member, version)
        await own_etcd.compact(revision)
        async with asyncio.timeout(LIMIT_S):
            async for value in values:
                if value is not None and value.value == b"4":
                    break


async def swap_in_the_end(member: Coordinator, value: bytes) -> int:
    """Swap as a publisher does: again until etcd, just restarted, says that it is there."""
    key = "weights/default/latest"

    async def swapped() -> int | None:
        with contextlib.suppress(Unavailable):
            found = await member.get(key)
            assert found is not None
            if found.value == value:
                return found.mod_revision
            return await member.compare_and_swap(key, value, expected_revision=found.mod_revision)
        return None

    return await until(swapped)


async def test_snapshot_overtaken_by_a_compaction_is_taken_again(
    own_etcd: EtcdServer, observer: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A watch that would begin below the compacted revision does not hang: it starts again."""
    revision = await observer.compare_and_swap("config/a", b"1", expected_revision=0)
    kv = observer._etcd._kv
    get, snapshots = kv.get, 0

    async def get_then_compact(*args: Any, **options: Any) -> Any:
        nonlocal snapshots, revision
        found = await get(*args, **options)
        if options.get("range_end") is None and args[0].endswith("config/a"):
            snapshots += 1
            if snapshots == 1:
                # Between the snapshot and its watch, others write and compact.
                for value in (b"2", b"3"):
                    revision = await observer.compare_and_swap(
                        "config/a", value, expected_revision=revision
                    )
                await own_etcd.compact(revision)
        return found

    monkeypatch.setattr(kv, "get", get_then_compact)
    async with asyncio.timeout(LIMIT_S), aclosing(observer.follow("config/a")) as values:
        seen = [await anext(values), await anext(values)]
    assert [one.value for one in seen if one is not None] == [b"1", b"3"]
    assert snapshots == 2


async def test_registrations_survive_a_lost_data_directory(
    own_etcd: EtcdServer, member: Coordinator, observer: Coordinator
) -> None:
    """An etcd without data gets its registrations back, on the same watch."""
    registration = await member.register("pool", "p", "h:1", ttl_s=TTL_S)
    discovery = observer.discover("pool")
    await discovery.wait(timeout_s=LIMIT_S)
    await in_thread(own_etcd.kill)
    await until(lambda: not registration.alive)
    own_etcd.forget()
    await in_thread(own_etcd.start)
    await until(lambda: registration.alive)
    second = await member.register("pool", "q", "h:2", ttl_s=TTL_S)
    await discovery.wait(count=2, timeout_s=LIMIT_S)
    await second.close()


async def test_watch_leaves_a_member_without_a_leader(tmp_path: Path) -> None:
    """It would miss every change of the others without an error."""
    first, *others = await asyncio.to_thread(EtcdServer.members, tmp_path, 3)
    observer = await Coordinator.connect(first.endpoint, cluster="outage")
    try:
        with capture_logs() as logs:
            watched = asyncio.Event()
            watching = asyncio.create_task(watch(observer, "config/x", watched))
            await watched.wait()
            for other in others:
                other.kill()
            await until(lambda: any("no leader" in line.get("error", "") for line in logs))
        watching.cancel()
        await asyncio.wait({watching})
    finally:
        await observer.close()
        first.kill()
        for other in others:
            other.kill()


async def test_any_member_with_a_certificate_of_its_own_replaces_a_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three hosts, a certificate for each: two are killed in turn, and the leases live on."""
    authority = trustme.CA()
    members = await asyncio.to_thread(EtcdServer.members, tmp_path, 3, authority=authority)
    tls = Certificates.issue(tmp_path / "tls-client", authority=authority)
    endpoints = ",".join(f"https://{member.endpoint}" for member in members)
    credentials = Tls(cert=tls.cert, key=tls.key, ca=tls.ca).etcd_credentials(endpoints)
    connected = await Coordinator.connect(
        endpoints, cluster="outage", timeout_s=LIMIT_S, credentials=credentials
    )
    try:
        registration = await connected.register("pool", "p", "h:1", ttl_s=TTL_S)
        for number, lost in enumerate(members):
            await in_thread(lost.kill)

            async def written(key: str = f"config/{number}") -> bool:
                with suppress(Unavailable):
                    return bool(await connected.compare_and_swap(key, b"1", expected_revision=0))
                return False

            await until(written)
            await until(lambda: registration.alive)
            # A new process that tries the lost one first.
            monkeypatch.setattr("random.randrange", lambda _, lost=number: lost)
            await (
                await Coordinator.connect(
                    endpoints, cluster="outage", timeout_s=LIMIT_S, credentials=credentials
                )
            ).close()
            await in_thread(lost.start)
    finally:
        await connected.close()
        for member in members:
            member.kill()


async def watch(observer: Coordinator, key: str, watched: asyncio.Event) -> None:
    async with aclosing(observer.follow(key)) as values:
        async for _ in values:
            watched.set()
