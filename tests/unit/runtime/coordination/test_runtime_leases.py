"""The local deadline of a lease, and missing instances in discovery; no etcd, no clock."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.errors import Unavailable
from forge.runtime.coordination.directory import (
    GRACE_S,
    SILENCE_S,
    Contact,
    Directory,
    Instance,
)
from forge.runtime.coordination.etcd import Etcd
from forge.runtime.coordination.leader_election import Leadership
from forge.runtime.coordination.leases import EtcdLease
from tests.support.runtime.unused import unused


@dataclass
class FakeTime:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeStore:
    """An etcd whose answers take time and can be switched off."""

    clock: FakeTime
    answer_s: float = 0.0
    up: bool = True
    gone: bool = False
    expires_s: float = 0.0
    ttl_s: float = 0.0

    def _answer(self) -> None:
        if not self.up:
            raise Unavailable("etcd does not answer")

    async def grant(self, ttl_s: float, *, timeout_s: float) -> int:
        self._answer()
        self.clock.now_s += self.answer_s
        self.ttl_s, self.expires_s = ttl_s, self.clock.now_s + ttl_s
        return 7

    async def renew(self, lease_id: int, *, timeout_s: float) -> bool:
        self._answer()
        self.clock.now_s += self.answer_s
        self.gone = self.gone or self.clock.now_s > self.expires_s
        self.expires_s = self.clock.now_s + self.ttl_s
        return not self.gone

    async def revoke(self, lease_id: int, *, timeout_s: float) -> None:
        self._answer()
        self.gone = True


async def granted(store: FakeStore, ttl_s: float = 5.0) -> EtcdLease:
    return await EtcdLease.grant(store, ttl_s=ttl_s, timeout_s=1, clock=store.clock)


async def test_lease_ends_locally_before_it_ends_in_etcd() -> None:
    """Without a renewal `alive` becomes false a margin before the TTL."""
    store = FakeStore(FakeTime())
    lease = await granted(store)
    store.clock.now_s += 3.9
    assert lease.alive
    store.clock.now_s += 0.2
    assert not lease.alive
    assert store.clock.now_s < store.expires_s


async def test_lease_deadline_counts_from_the_send_time() -> None:
    """A slow answer does not lengthen the lease: etcd may count from the first moment."""
    store = FakeStore(FakeTime(), answer_s=3.0)
    lease = await granted(store)
    assert lease.left_s == pytest.approx(1.0)


async def test_only_an_answered_renewal_moves_the_deadline() -> None:
    """An outage leaves the deadline unchanged."""
    store = FakeStore(FakeTime())
    lease = await granted(store)
    store.clock.now_s += 2.0
    assert await lease.renew(timeout_s=1)
    assert lease.left_s == pytest.approx(4.0)
    store.up = False
    with pytest.raises(Unavailable):
        await lease.renew(timeout_s=1)
    assert lease.left_s == pytest.approx(4.0)


async def test_lease_unknown_to_etcd_ends_at_once() -> None:
    """No later renewal revives it."""
    store = FakeStore(FakeTime(), gone=True)
    lease = await granted(store)
    assert not await lease.renew(timeout_s=1)
    assert not lease.alive


async def test_leadership_with_a_failed_renewal_is_lost() -> None:
    """Also after a defect in the renewal: `lost` returns."""

    class Broken(FakeStore):
        async def renew(self, lease_id: int, *, timeout_s: float) -> bool:
            raise ValueError("a defect")

    lease = await granted(Broken(clock=FakeTime()), ttl_s=0.04)
    leadership = Leadership(unused(Etcd), lease, name="scheduler", fence=1, revision=1)
    async with asyncio.timeout(30):
        await leadership.lost()
    assert not leadership.alive


async def test_revocation_in_an_outage_ends_the_lease_locally() -> None:
    """In etcd it expires by itself."""
    store = FakeStore(FakeTime(), up=False)
    store.up = True
    lease = await granted(store)
    store.up = False
    await lease.revoke()
    assert not lease.alive


@given(
    ttl_s=st.floats(2, 60),
    steps=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 3), st.booleans()), max_size=30),
)
async def test_lease_is_never_alive_locally_and_expired_in_etcd(
    ttl_s: float, steps: list[tuple[float, float, bool]]
) -> None:
    """For slow, late and lost renewals."""
    store = FakeStore(FakeTime())
    lease = await granted(store, ttl_s)
    for wait_s, answer_s, up in steps:
        store.clock.now_s += wait_s
        store.answer_s, store.up = answer_s, up
        assert not lease.alive or store.clock.now_s < store.expires_s
        try:
            if not await lease.renew(timeout_s=1):
                assert not lease.alive
                return
        except Unavailable:
            pass
        assert not lease.alive or store.clock.now_s < store.expires_s


def instance(instance_id: str, *, revision: int = 1, address: str = "h:1") -> Instance:
    return Instance(
        kind="pool", instance_id=instance_id, address=address, metadata={}, revision=revision
    )


def names(directory: Directory) -> list[str]:
    return [one.instance_id for one in directory.instances]


def test_vanished_instance_is_removed_at_once_while_etcd_answers() -> None:
    """A crash is visible as soon as the lease has expired."""
    directory = Directory()
    directory.put(instance("a"))
    directory.remove("a", now_s=0, in_doubt=False)
    assert names(directory) == []


def test_instance_that_vanishes_in_an_outage_is_kept_for_the_grace_time() -> None:
    """An outage of etcd does not empty the view; an absent instance is removed in the end."""
    directory = Directory()
    directory.put(instance("a"))
    directory.remove("a", now_s=10, in_doubt=True)
    assert directory.expire(10 + GRACE_S - 0.1) == 10 + GRACE_S
    assert names(directory) == ["a"]
    assert directory.expire(10 + GRACE_S) is None
    assert names(directory) == []


def test_instance_that_returns_within_the_grace_time_stays() -> None:
    """A registration renewed after an outage does not flap."""
    directory = Directory()
    directory.put(instance("a", revision=1))
    directory.remove("a", now_s=0, in_doubt=True)
    directory.put(instance("a", revision=2, address="h:2"))
    assert directory.expire(1000) is None
    assert directory.instances[0].address == "h:2"


def test_second_outage_does_not_lengthen_the_grace_time() -> None:
    """An unstable etcd cannot keep dead instances forever."""
    directory = Directory()
    directory.put(instance("a"))
    directory.remove("a", now_s=0, in_doubt=True)
    directory.replace({}, now_s=GRACE_S - 1, in_doubt=True)
    directory.expire(GRACE_S)
    assert names(directory) == []


def test_snapshot_replaces_the_view_also_with_a_lower_revision() -> None:
    """An etcd that lost its data restarts its revisions; its current state is valid."""
    directory = Directory()
    directory.put(instance("a", revision=90, address="old:1"))
    directory.replace({"a": instance("a", revision=3, address="new:1")}, now_s=0, in_doubt=False)
    assert directory.instances[0].address == "new:1"


def test_late_event_does_not_undo_a_newer_event() -> None:
    """Events of one etcd are ordered by revision, in any order of arrival."""
    directory = Directory()
    directory.put(instance("a", revision=5, address="new:1"))
    directory.put(instance("a", revision=4, address="old:1"))
    assert directory.instances[0].address == "new:1"


def test_contact_is_in_doubt_until_the_grace_time_after_silence() -> None:
    """Doubt begins with silence and ends a grace time after the first answer."""
    contact = Contact(0)
    assert not contact.in_doubt(SILENCE_S)
    assert contact.in_doubt(SILENCE_S + 1)
    contact.heard(SILENCE_S + 10)
    assert contact.in_doubt(SILENCE_S + 10 + GRACE_S - 0.1)
    for passed_s in range(int(GRACE_S) + 1):
        contact.heard(SILENCE_S + 10 + passed_s)
    assert not contact.in_doubt(SILENCE_S + 10 + GRACE_S)
