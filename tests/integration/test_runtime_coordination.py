"""Coordination over a real etcd in good health."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from forge.client.operator import Operator
from forge.core.errors import ConfigError, StaleFence, Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from tests.support.runtime.etcd import Certificates, EtcdServer, free_port
from tests.support.runtime.waiting import LIMIT_S


async def test_registered_instance_is_discovered_with_address_and_metadata(
    etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> None:
    """What one process registers, another one finds, with all it said about itself."""
    registration = await coordinator.register(
        "pool", "pool-0", "127.0.0.1:7001", metadata={"shard": "a"}
    )
    other = await Coordinator.connect(etcd.endpoint, cluster=cluster)
    (found,) = await other.discover("pool").wait(timeout_s=LIMIT_S)
    assert (found.kind, found.instance_id, found.address) == ("pool", "pool-0", "127.0.0.1:7001")
    assert found.metadata == {"shard": "a"}
    assert registration.alive
    await registration.close()
    await other.close()


async def test_discovery_knows_the_initial_view(coordinator: Coordinator) -> None:
    """Empty is an answer once etcd has answered, and none before."""
    await coordinator.register("pool", "pool-0", "127.0.0.1:7001")
    pools, trainers = coordinator.discover("pool"), coordinator.discover("trainer")
    assert not pools.instances
    await pools.known()
    await trainers.known()
    assert [pool.instance_id for pool in pools.instances] == ["pool-0"]
    assert not trainers.instances


async def test_registration_survives_a_pause_during_its_start(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that expires before it holds a key is replaced."""
    etcd = coordinator._etcd
    swap = etcd.swap
    leases: list[int] = []

    async def paused_once(
        key: str, value: bytes, *, expected_revision: int, lease_id: int = 0
    ) -> int | None:
        leases.append(lease_id)
        if len(leases) == 1:
            await etcd.revoke(lease_id, timeout_s=LIMIT_S)
            # Real time: by its own clock the lease runs out, too.
            await asyncio.sleep(1.0)
        return await swap(key, value, expected_revision=expected_revision, lease_id=lease_id)

    monkeypatch.setattr(etcd, "swap", paused_once)
    registration = await coordinator.register("pool", "pool-0", "127.0.0.1:7001", ttl_s=1.0)
    assert len(leases) > 1
    await coordinator.discover("pool").wait(timeout_s=LIMIT_S)
    await registration.close()


async def test_updated_metadata_reaches_discovery(coordinator: Coordinator) -> None:
    """An update replaces the metadata that others see, under a later revision."""
    registration = await coordinator.register("decode", "d", "h:1", metadata={"version": "1"})
    discovery = coordinator.discover("decode")
    (before,) = await discovery.wait(timeout_s=LIMIT_S)
    await registration.update({"version": "2"})
    (after,) = await discovery.wait(
        timeout_s=LIMIT_S, where=lambda one: one.metadata["version"] == "2"
    )
    assert after.revision > before.revision
    await registration.close()


async def test_closed_registration_leaves_discovery_at_once(coordinator: Coordinator) -> None:
    """Without a wait for its lease."""
    registration = await coordinator.register("pool", "p", "h:1", ttl_s=300)
    discovery = coordinator.discover("pool")
    await discovery.wait(timeout_s=LIMIT_S)
    await registration.close()
    while discovery.instances:
        await asyncio.wait_for(discovery.changed(), LIMIT_S)
    assert not registration.alive


async def test_wait_for_a_kind_names_it_at_its_deadline(coordinator: Coordinator) -> None:
    """In one line."""
    with pytest.raises(Unavailable, match="0 of 2 fitting trainer instances"):
        await coordinator.discover("trainer").wait(count=2, timeout_s=0.2)


async def test_clusters_on_one_etcd_do_not_see_each_other(
    etcd: EtcdServer, coordinator: Coordinator
) -> None:
    """The cluster's name is part of every key."""
    stranger = await Coordinator.connect(etcd.endpoint, cluster="stranger")
    theirs = await stranger.register("pool", "p", "h:1")
    mine = await coordinator.register("pool", "q", "h:2")
    (found,) = await coordinator.discover("pool").wait(timeout_s=LIMIT_S)
    assert found.instance_id == "q"
    await theirs.close()
    await mine.close()
    await stranger.close()


async def test_compare_and_swap_refuses_an_old_revision(
    coordinator: Coordinator,
) -> None:
    """Of two publications from one revision, exactly one succeeds."""
    key = "weights/default/latest"
    first = await coordinator.compare_and_swap(key, b"1", expected_revision=0)
    with pytest.raises(StaleFence, match="weights/default/latest"):
        await coordinator.compare_and_swap(key, b"other", expected_revision=0)
    second = await coordinator.compare_and_swap(key, b"2", expected_revision=first)
    with pytest.raises(StaleFence):
        await coordinator.compare_and_swap(key, b"3", expected_revision=first)
    latest = await coordinator.get(key)
    assert latest is not None
    assert (latest.value, latest.mod_revision) == (b"2", second)
    assert second > first


async def test_follow_yields_absence_then_the_latest_values(coordinator: Coordinator) -> None:
    """It begins with the current value, or none, and ends with the last."""
    async with aclosing(coordinator.follow("config/x")) as values:
        assert await anext(values) is None
        revision = await coordinator.compare_and_swap("config/x", b"a", expected_revision=0)
        first = await anext(values)
        assert first is not None
        assert (first.value, first.mod_revision) == (b"a", revision)
        await coordinator.compare_and_swap("config/x", b"b", expected_revision=revision)
        second = await anext(values)
        assert second is not None
        assert second.value == b"b"


async def test_one_leader_at_a_time_with_growing_fence(
    etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> None:
    """The second candidate waits for the first to end, and gets a higher fence."""
    first = await coordinator.campaign("scheduler", "a")
    rival = await Coordinator.connect(etcd.endpoint, cluster=cluster)
    waiting = asyncio.create_task(rival.campaign("scheduler", "b"))
    assert first.alive
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    assert not done
    await first.resign()
    assert not first.alive
    await first.lost()
    second = await asyncio.wait_for(waiting, LIMIT_S)
    assert second.alive
    assert second.fence > first.fence
    await second.resign()
    await rival.close()


async def test_every_candidate_is_elected_in_turn(coordinator: Coordinator) -> None:
    """For many simultaneous campaigns there is never more than one leader, and none is
    forgotten."""
    leaders = 0
    fences: list[int] = []

    async def lead_once(index: int) -> None:
        nonlocal leaders
        leadership = await coordinator.campaign("scheduler", f"candidate-{index}")
        leaders += 1
        assert leaders == 1
        fences.append(leadership.fence)
        await asyncio.sleep(0)
        leaders -= 1
        await leadership.resign()

    await asyncio.wait_for(asyncio.gather(*(lead_once(index) for index in range(6))), LIMIT_S)
    assert fences == sorted(set(fences))
    assert len(fences) == 6


@pytest.mark.parametrize("entered", ["discovery", "leadership"])
async def test_cancelled_registration_leaves_no_entry(
    entered: str, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before etcd's answer, an instance is neither found nor waited for."""
    etcd = coordinator._etcd
    original = etcd.swap
    written = asyncio.Event()

    async def unanswered(*args: Any, **options: Any) -> None:
        await original(*args, **options)
        written.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(etcd, "swap", unanswered)
        entering = asyncio.create_task(
            coordinator.register("pool", "pool-0", "h:1", ttl_s=600.0)
            if entered == "discovery"
            else coordinator.campaign("scheduler", "a", ttl_s=600.0)
        )
        await asyncio.wait_for(written.wait(), LIMIT_S)
        entering.cancel()
        await asyncio.wait({entering})
    assert entering.cancelled()
    assert await coordinator.get("services/pool/pool-0") is None
    assert await coordinator.get("leader/scheduler") is None
    leadership = await asyncio.wait_for(coordinator.campaign("scheduler", "b"), LIMIT_S)
    await leadership.resign()


async def test_unreachable_etcd_is_one_line_with_the_setting() -> None:
    """The error names the endpoints and the setting to change."""
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match=f"no etcd answers at {endpoint}") as caught:
        await Coordinator.connect(endpoint, cluster="c", timeout_s=0.5)
    assert "--etcd" in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_etcd_over_mutual_tls(tmp_path: Path) -> None:
    """https:// endpoints are reached with the host's own certificates, and only with them."""
    tls = Certificates.issue(tmp_path)
    server = EtcdServer(tmp_path / "etcd", tls=tls)
    await asyncio.to_thread(server.start)
    try:
        endpoint = f"https://{server.endpoint}"
        security = Security(
            Keyring.from_bytes(b"k" * 32), tls_cert=tls.cert, tls_key=tls.key, tls_ca=tls.ca
        )
        credentials = security.etcd_credentials(endpoint)
        coordinator = await Coordinator.connect(endpoint, cluster="c", credentials=credentials)
        assert await coordinator.compare_and_swap("config/x", b"1", expected_revision=0)
        await coordinator.close()
        await (await Operator.connect(endpoint, cluster="c", security=security)).close()
        with pytest.raises(ConfigError, match="is TLS, so tls_ca must be set"):
            await Coordinator.connect(endpoint, cluster="c")
        with pytest.raises(Unavailable):
            await Coordinator.connect(server.endpoint, cluster="c", timeout_s=0.5)
    finally:
        await asyncio.to_thread(server.stop)


async def test_coordinator_works_while_one_endpoint_answers(etcd: EtcdServer) -> None:
    """The address of a cluster lists all members; some may be down. Host names are resolved."""
    dead = f"127.0.0.1:{free_port()}"
    living = etcd.endpoint.replace("127.0.0.1", "localhost")
    coordinator = await Coordinator.connect(f"{dead}, {living}", cluster="several")
    assert await coordinator.compare_and_swap("config/x", b"1", expected_revision=0)
    await coordinator.close()


async def test_unreadable_entry_does_not_hide_the_others(
    etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> None:
    """A foreign value in the folder is logged and passed over."""
    discovery = coordinator.discover("pool")
    await coordinator.compare_and_swap("services/pool/junk", b"not json", expected_revision=0)
    registration = await coordinator.register("pool", "p", "h:1")
    (found,) = await discovery.wait(timeout_s=LIMIT_S)
    assert found.instance_id == "p"
    await registration.close()
