"""Rollback, canary and promotion: what is in etcd, in memory and on disk after each, and after a
failure between them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from forge.core.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from forge.runtime.rpc.server import RpcServer
from forge.runtime.weights import FULL_NAME, HeldWeights, WeightHold, WeightServicer, hold_key
from forge.v1 import inference_pb2_grpc as rpc
from services.trainer.actors.steering import (
    Promote,
    ResumeHold,
    RollBack,
    StartCanary,
)
from services.trainer.published.canary_rules import chosen_workers
from services.trainer.published.publisher import Superseded
from tests.support.inference.bulk_sources import bulk_source
from tests.support.inference.weight_sources import SECURITY, announcement_of
from tests.support.trainer.published_weights import FakeRegister, snapshot
from tests.support.trainer.steering import WORKERS, SteeredTrainer, worker


def roll_back(version: int) -> RollBack:
    return RollBack(version=version, subject="ann@host")


def canary(version: int, share: float = 0.25) -> StartCanary:
    return StartCanary(version=version, share=share, subject="ann@host")


async def test_rollback_holds_a_version_over_later_publications(tmp_path: Path) -> None:
    """It is on disk before it is in etcd, stays in memory, and is announced beside the newest."""
    trainer = SteeredTrainer(FakeRegister(), tmp_path / "held")
    await trainer.publish(1, 2)
    await trainer.ask(roll_back(1))
    await trainer.publish(3, 4, 5)
    hold = trainer.hold
    assert hold.versions == (1,) and hold.subject == "ann@host" and hold.since_unix_s > 0
    assert trainer.register.manifest["weight_version"] == 5
    assert trainer.files == ["version-00000001"]
    assert [one.weight_version for one in trainer.versions.published] == [1, 4, 5]
    assert await trainer.first_byte(1) == 1


async def test_promotion_ends_the_hold_and_frees_its_versions(tmp_path: Path) -> None:
    """Memory and disk have the newest versions alone; a second promotion changes nothing."""
    trainer = SteeredTrainer(FakeRegister(), tmp_path / "held")
    await trainer.publish(1, 2)
    await trainer.ask(roll_back(1))
    await trainer.publish(3, 4)
    for _ in range(2):
        await trainer.ask(Promote(subject="ann@host"))
    assert trainer.hold.versions == ()
    assert trainer.register.entries[hold_key()].mod_revision == 2
    assert not (tmp_path / "held").exists()
    assert [one.weight_version for one in trainer.versions.published] == [3, 4]


async def test_restarted_trainer_serves_the_held_versions(tmp_path: Path) -> None:
    """From their files, under its own address and fence, before it publishes."""
    register, directory = FakeRegister(), tmp_path / "held"
    killed = SteeredTrainer(register, directory)
    await killed.publish(1, 2)
    await killed.ask(canary(2))
    (directory / "version-00000009.unfinished").mkdir()
    restarted = SteeredTrainer(register, directory, fence=2, source="host:2")
    await restarted.ask(ResumeHold())
    hold = restarted.hold
    assert hold.base is not None and hold.canary is not None
    assert (hold.base.source, hold.canary.source, hold.fence) == ("host:2", "host:2", 2)
    assert hold.canary_workers == ("d0",)
    assert [await restarted.first_byte(version) for version in (1, 2)] == [1, 2]
    assert restarted.files == ["version-00000001", "version-00000002"]
    await restarted.publish(3)
    assert restarted.versions.published[-1].weight_version == 3
    with pytest.raises(Superseded):
        await SteeredTrainer(register, directory, fence=1).ask(roll_back(1))


async def test_damaged_held_version_is_not_served(tmp_path: Path) -> None:
    """One byte differs: the trainer starts without it, and says so by refusing to hold it again."""
    register, directory = FakeRegister(), tmp_path / "held"
    trainer = SteeredTrainer(register, directory)
    await trainer.publish(1, 2)
    await trainer.ask(roll_back(1))
    (directory / "version-00000001" / "tensors.bin").write_bytes(b"\x01\x01\x02\x04")
    restarted = SteeredTrainer(register, directory, fence=2)
    await restarted.ask(ResumeHold())
    assert 1 not in restarted.versions.weights
    await restarted.publish(3)
    with pytest.raises(NotFound, match=r"version 1 is not held; held: \[3\]"):
        await restarted.ask(canary(1))
    await restarted.ask(Promote(subject="ann@host"))
    assert restarted.hold.versions == ()


async def test_trainer_of_another_host_gets_held_versions_from_workers(tmp_path: Path) -> None:
    """One that ends its stream or sends other data is left; the version is then on disk here."""
    register = FakeRegister()
    killed = SteeredTrainer(register, tmp_path / "there")
    await killed.publish(1, 2)
    await killed.ask(canary(2))
    weights = dict(killed.versions.weights)
    damaged = replace(weights[1], tensors=snapshot(9).tensors)
    async with serving({1: damaged}) as wrong, serving({}) as without, serving(weights) as right:
        workers = [
            worker("decode", "d0", 1, address=wrong),
            worker("decode", "d1", 1, address=without),
            worker("decode", "d2", 1, address=right),
            worker("decode", "d3", 2, address=right),
        ]
        here = tmp_path / "here"
        other = SteeredTrainer(register, here, fence=2, source="host:2", workers=workers)
        await other.ask(ResumeHold())
    assert other.hold.versions == (1, 2)
    assert [await other.first_byte(version) for version in (1, 2)] == [1, 2]
    assert other.files == ["version-00000001", "version-00000002"]
    assert [one.on_disk for one in other.versions.published] == [True, True]
    again = SteeredTrainer(register, tmp_path / "here", fence=3, workers=[])
    await again.ask(ResumeHold())
    assert await again.first_byte(1) == 1


async def test_trainer_of_another_host_gets_held_versions_over_bulk_connections(
    tmp_path: Path,
) -> None:
    """From a worker that has them; the data is verified as of the call."""
    weights = {"a": bytes(range(256)) * 8192, "b": b"norm"}
    async with bulk_source(weights) as (source, address):
        announced = announcement_of(1, weights, source="host:1")
        register = FakeRegister()
        hold = WeightHold(base=announced, subject="ann@host")
        await register.compare_and_swap(hold_key(), hold.encode(), expected_revision=0)
        other = SteeredTrainer(
            register,
            tmp_path / "held",
            fence=2,
            workers=[worker("decode", "d0", 1, address=address)],
        )
        await other.ask(ResumeHold())
        assert [request.bulk for request in source.requests] == [True]
    (held,) = other.versions.weights.values()
    assert {one.name: bytes(one.data) for one in held.tensors} == weights


@asynccontextmanager
async def serving(held: Mapping[int, HeldWeights]) -> AsyncIterator[str]:
    """The address of a worker with these versions."""
    server = RpcServer(service="inference", host="127.0.0.1", port=0, security=SECURITY)
    server.add_service(
        rpc.add_WeightServiceServicer_to_server, WeightServicer(lambda: held), full_name=FULL_NAME
    )
    try:
        yield await server.start()
    finally:
        await server.stop(grace_s=0)


async def test_hold_with_an_unknown_outcome_keeps_both_versions(tmp_path: Path) -> None:
    """etcd stored it and its answer was lost: the repeated call finds it there."""
    register = FakeRegister()
    trainer = SteeredTrainer(register, tmp_path / "held")
    await trainer.publish(1, 2)
    await trainer.ask(roll_back(2))
    register.lose_answer = True
    with pytest.raises(Unavailable):
        await trainer.ask(roll_back(1))
    register.lose_answer = False
    await trainer.publish(3, 4, 5)
    assert {1, 2} <= trainer.versions.weights.keys()
    await trainer.ask(roll_back(1))
    assert trainer.hold.versions == trainer.versions.hold.versions == (1,)


async def test_full_disk_changes_no_hold(tmp_path: Path) -> None:
    """The version is not on disk, so it is not held."""
    blocked = tmp_path / "held"
    blocked.write_text("")
    trainer = SteeredTrainer(FakeRegister(), blocked)
    await trainer.publish(1, 2)
    with pytest.raises(ResourceExhausted, match="version-00000001"):
        await trainer.ask(roll_back(1))
    assert hold_key() not in trainer.register.entries


async def test_canary_keeps_the_base_of_a_hold(tmp_path: Path) -> None:
    """Without a hold the base is the version before; a rollback to the base ends the canary."""
    trainer = SteeredTrainer(FakeRegister(), tmp_path / "held")
    await trainer.publish(1, 2)
    await trainer.ask(canary(2))
    assert trainer.hold.versions == (1, 2)
    await trainer.publish(3, 4)
    await trainer.ask(canary(4, share=0.5))
    hold = trainer.hold
    assert hold.versions == (1, 4) and hold.canary_workers == ("d0", "d1")
    assert [hold.wanted(one, None) for one in ("d1", "d2", "p0")] == [
        hold.canary,
        hold.base,
        hold.base,
    ]
    await trainer.ask(roll_back(1))
    assert list(trainer.hold.versions) == [1] and not trainer.hold.canary_workers
    assert trainer.files == ["version-00000001"]


async def test_impossible_canaries_are_refused(tmp_path: Path) -> None:
    """A share that is none, a single worker, no other version, no version."""
    trainer = SteeredTrainer(FakeRegister(), tmp_path / "held")
    await trainer.publish(1)
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(InvalidArgument, match="share"):
            await trainer.ask(canary(1, share))
    with pytest.raises(FailedPrecondition, match="no version before 1"):
        await trainer.ask(canary(1))
    with pytest.raises(InvalidArgument, match="weight_version = 0"):
        await trainer.ask(roll_back(0))
    await trainer.ask(roll_back(1))
    with pytest.raises(FailedPrecondition, match="version 1 is held for all"):
        await trainer.ask(canary(1))
    alone = SteeredTrainer(FakeRegister(), tmp_path / "other", workers=WORKERS[3:])
    await alone.publish(1, 2)
    with pytest.raises(FailedPrecondition, match="1 workers decode"):
        await alone.ask(canary(2))
    starting = SteeredTrainer(FakeRegister(), tmp_path / "starting", source="")
    with pytest.raises(Unavailable, match="starting"):
        await starting.ask(Promote(subject=""))


def test_canary_takes_a_share_of_each_role() -> None:
    """At least one that decodes, never all; workers that have the version come first."""
    decode = [worker("decode", f"d{n}", version=7 if n == 3 else 6) for n in range(4)]
    prefill = [worker("prefill", f"p{n}") for n in range(2)]
    assert chosen_workers(decode, 7, 0.01) == ("d3",)
    assert chosen_workers(decode, 7, 0.99) == ("d0", "d1", "d3")
    assert chosen_workers([*decode, *prefill], 7, 0.5) == ("d0", "d3", "p0")
