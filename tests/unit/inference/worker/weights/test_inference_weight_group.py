"""A version that a group receives: the worker verifies it, and fetches what is missing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from forge.core.errors import ConfigError, FailedPrecondition
from forge.runtime.settings.weight_group_settings import WeightGroupSettings
from forge.runtime.weights import group_process
from forge.runtime.weights.group_process import GroupError
from forge.runtime.weights.version_files import starts_of
from forge.v1 import inference_pb2 as pb
from services.inference.config import InferenceConfig
from services.inference.worker.weights.group import GroupMember, group_member
from tests.support.inference.weight_sources import Source, Weights, Worker
from tests.support.runtime.waiting import until

Observe = Callable[[Mapping[str, Any]], Awaitable[None]]
WEIGHTS: Weights = {name: name.encode() * 100 for name in ("a", "b", "c", "d")}
GROUP = ("group/gloo",)


class Trainer(Source):
    """A source that forms groups."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.joined: list[pb.JoinGroupRequest] = []
        self._refuses = refuses

    async def JoinGroup(self, request: pb.JoinGroupRequest, context: Any) -> pb.JoinGroupResponse:
        self.joined.append(request)
        if self._refuses:
            raise FailedPrecondition("no group forms for weights 1")
        return pb.JoinGroupResponse(port=7, rank=1, ranks=2)


class Process:
    """A `GroupProcess` without a process: it receives these weights, tensor after tensor."""

    def __init__(self, weights: Weights, *, until: int | None = None, ready: bool = True) -> None:
        """`until`: number of the tensor at which the group fails."""
        self.settings = WeightGroupSettings(backend="gloo")
        self.ready = ready
        self.revived = False
        self.orders: list[Mapping[str, Any]] = []
        self.go_on = asyncio.Event()
        self.go_on.set()
        self._weights = list(weights.values())
        self._until = until

    def start(self) -> None: ...

    def revive(self) -> None:
        self.revived = True

    async def close(self) -> None: ...

    async def broadcast(self, file: int, order: Mapping[str, Any], observe: Observe) -> None:
        self.orders.append(order)
        starts = starts_of([len(data) for data in self._weights])
        for number, data in enumerate(self._weights):
            if number == self._until:
                raise GroupError("no data for 10 s")
            os.pwrite(file, data, starts[number])
            await observe({"received_bytes": starts[number] + len(data)})
            await self.go_on.wait()
        await observe({"received_bytes": order["size_bytes"]})


async def received(trainer: Trainer, process: Process, *, ways: tuple[str, ...] = GROUP) -> Weights:
    """The weights that a worker serves after a publication."""
    trainer.held[1] = WEIGHTS
    worker = Worker(silence_s=60.0)
    worker.follower._group = GroupMember(cast(Any, process), worker.channels, instance_id="self")
    worker.publish(1, WEIGHTS, source=await trainer.start(), ways=ways)
    served = await worker.until_serving(1)
    await worker.stop()
    await trainer.stop()
    return served


def fallbacks(reason: str) -> float:
    name = "forge_inference_weight_group_fallbacks_total"
    return REGISTRY.get_sample_value(name, {"reason": reason}) or 0.0


def by_group() -> float:
    name = "forge_inference_weight_versions_total"
    return REGISTRY.get_sample_value(name, {"way": "group"}) or 0.0


async def test_version_is_received_in_a_group() -> None:
    """Nothing but the manifest comes from the source; the way is counted."""
    trainer, process, before = Trainer(), Process(WEIGHTS), by_group()
    assert await received(trainer, process) == WEIGHTS
    assert not trainer.requests and by_group() == before + 1
    ((request,), (order,)) = trainer.joined, process.orders
    assert (request.weight_version, request.instance_id) == (1, "self")
    assert order["address"] == ("127.0.0.1", 7) and (order["rank"], order["ranks"]) == (1, 2)


async def test_fetch_continues_at_the_first_missing_tensor() -> None:
    """After a group that fails; the tensors before it stay."""
    trainer, before, counted = Trainer(), fallbacks("failed"), by_group()
    assert await received(trainer, Process(WEIGHTS, until=2)) == WEIGHTS
    assert [one.from_tensor for one in trainer.requests] == [2]
    assert fallbacks("failed") == before + 1 and by_group() == counted


async def test_damaged_tensor_is_fetched() -> None:
    """The worker stays in the group to its end, and adopts nothing from that tensor on."""
    trainer, before = Trainer(), fallbacks("damaged")
    process = Process({**WEIGHTS, "b": WEIGHTS["b"][:-1] + b"x"})
    assert await received(trainer, process) == WEIGHTS
    assert [one.from_tensor for one in trainer.requests] == [1]
    assert fallbacks("damaged") == before + 1


async def test_version_without_a_group_is_fetched() -> None:
    """The worker is late, its process is not ready, or the trainer forms none of its backend."""
    for reason, trainer, process in (
        ("refused", Trainer(refuses=True), Process(WEIGHTS)),
        ("not_ready", Trainer(), Process(WEIGHTS, ready=False)),
    ):
        before = fallbacks(reason)
        assert await received(trainer, process) == WEIGHTS
        assert [one.from_tensor for one in trainer.requests] == [0] and not process.orders
        assert fallbacks(reason) == before + 1 and process.revived is (reason == "not_ready")
    trainer = Trainer()
    assert await received(trainer, Process(WEIGHTS), ways=("group/nccl",)) == WEIGHTS
    assert not trainer.joined and trainer.requests


async def test_newer_version_waits_for_the_end_of_a_group() -> None:
    """A member that left would cost the others the rest; the group has a limit."""
    trainer, process = Trainer(), Process(WEIGHTS)
    newer = {"a": b"newer"}
    trainer.held = {1: WEIGHTS, 2: newer}
    process.go_on.clear()
    worker = Worker(silence_s=60.0)
    worker.follower._group = GroupMember(cast(Any, process), worker.channels, instance_id="self")
    source = await trainer.start()
    worker.publish(1, WEIGHTS, source=source, ways=GROUP)
    while not process.orders:
        await asyncio.sleep(0.01)
    worker.publish(2, newer, source=source)
    while worker.follower._newest is None or worker.follower._newest.weight_version < 2:
        await asyncio.sleep(0.01)
    process.go_on.set()
    assert await worker.until_serving(1) == WEIGHTS
    assert await worker.until_serving(2) == newer
    await worker.stop()
    await trainer.stop()


async def test_worker_is_in_discovery_while_it_can_join(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the start of its process to a failure, and again from the next start: the trainer awaits
    it in between alone."""
    monkeypatch.setattr(group_process, "_PROGRAM", "tests.support.runtime.hung_program")
    settings = WeightGroupSettings(backend="gloo", silence_s=0.2)
    announced: list[dict[str, str]] = []
    context = SimpleNamespace(metadata={"other": "1"}, channels=None)

    async def announce() -> None:
        announced.append(dict(context.metadata))

    context.announce, context.config = announce, InferenceConfig()
    assert group_member(cast(Any, context)) is None
    context.config = InferenceConfig(weight_group=settings)
    member = group_member(cast(Any, context))
    assert member is not None and not announced
    async with member:
        await until(lambda: len(announced) == 1)
        file = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(GroupError, match="no data"):
            await member.process.broadcast(file, {}, nothing)
        os.close(file)
        await until(lambda: len(announced) == 3)
        joins = {"other": "1", "weight_group": "gloo"}
        assert announced == [joins, {"other": "1"}, joins]


def test_groups_are_refused_on_a_network_where_weights_need_encryption() -> None:
    """Their broadcasts have none."""
    settings = WeightGroupSettings(backend="gloo")
    with pytest.raises(ConfigError, match="without encryption"):
        InferenceConfig(weight_group=settings, advertise_host="10.0.0.1").validate()


async def nothing(answer: Mapping[str, Any]) -> None: ...
