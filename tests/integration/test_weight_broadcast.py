"""The broadcast of a file by gloo, between two real processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from forge.rl.file_broadcast import BUCKET_BYTES
from forge.runtime.settings.weight_group_settings import WeightGroupSettings
from forge.runtime.weights.group_process import GroupError, GroupProcess
from tests.support.runtime.waiting import until

SETTINGS = WeightGroupSettings(backend="gloo", silence_s=120.0, limit_s=240.0)
CONTENT = os.urandom(BUCKET_BYTES + 1000)


class Pair:
    """A sender and a receiver."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.sender, self.receiver = (
            GroupProcess(SETTINGS, host="127.0.0.1", device="cpu") for _ in range(2)
        )
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.listening: set[str] = set()
        """Addresses at which the sender has listened."""

    async def send(self, content: bytes) -> None:
        file = os.memfd_create("sent")
        os.write(file, content)

        async def observe(answer: Mapping[str, Any]) -> None:
            assert self.sender._process is not None
            connections = psutil.Process(self.sender._process.pid).net_connections("tcp")
            self.listening |= {one.laddr.ip for one in connections if one.status == "LISTEN"}
            if "port" in answer:
                self.port.set_result(answer["port"])

        await self._broadcast(self.sender, file, 0, len(content), observe)

    async def receive(self, size_bytes: int) -> tuple[bytes, list[int]]:
        """Return the received file, and the sizes that were reported."""
        file, sizes = os.memfd_create("received"), list[int]()
        os.truncate(file, size_bytes)

        async def observe(answer: Mapping[str, Any]) -> None:
            sizes.append(answer["received_bytes"])

        await self._broadcast(self.receiver, os.dup(file), await self.port, size_bytes, observe)
        self.port = asyncio.get_running_loop().create_future()
        with os.fdopen(file, "rb") as found:
            return found.read(), sizes

    async def _broadcast(
        self, process: GroupProcess, file: int, port: int, size_bytes: int, observe: Any
    ) -> None:
        order = {
            "address": ("127.0.0.1", port),
            "rank": int(process is self.receiver),
            "ranks": 2,
            "size_bytes": size_bytes,
            "device": self._device,
        }
        try:
            await process.broadcast(file, order, observe)
        finally:
            os.close(file)


@asynccontextmanager
async def started_pair(device: str = "cpu") -> AsyncIterator[Pair]:
    pair = Pair(device)
    for one in (pair.sender, pair.receiver):
        one.start()
    await until(lambda: pair.sender.ready and pair.receiver.ready)
    yield pair
    for one in (pair.sender, pair.receiver):
        await one.close()


@pytest.mark.parametrize("device", ["cpu", "cpu:0"], ids=["in place", "by memory of a device"])
async def test_files_arrive_in_buckets(device: str) -> None:
    """The same processes send one after the other; they listen on loopback alone."""
    async with started_pair(device) as pair:
        for content in (CONTENT, b"small"):
            sent = asyncio.create_task(pair.send(content))
            assert await pair.receive(len(content)) == (
                content,
                [BUCKET_BYTES, len(content)] if len(content) > BUCKET_BYTES else [len(content)],
            )
            await sent
        assert pair.listening == {"127.0.0.1"}


async def test_lost_member_ends_the_broadcast() -> None:
    """The other one fails at once, has a new process, and takes part in the next broadcast."""
    async with started_pair() as pair:
        sent = asyncio.create_task(pair.send(CONTENT))
        await pair.port
        assert pair.receiver._process is not None
        pair.receiver._process.kill()
        with pytest.raises(GroupError):
            await pair.receive(len(CONTENT))
        sent.cancel()
        await asyncio.wait({sent})
        await until(lambda: pair.sender.ready and pair.receiver.ready)
        pair.port = asyncio.get_running_loop().create_future()
        sent = asyncio.create_task(pair.send(CONTENT))
        assert (await pair.receive(len(CONTENT)))[0] == CONTENT
        await sent
