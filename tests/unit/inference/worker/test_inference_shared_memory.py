"""Keys and values in the shared memory of a host: real files, damage, full memory."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest

from forge.core.errors import DataLoss, Unavailable
from forge.runtime.files.host_memory import place
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from forge.v1.common_pb2 import SampledTokens, SamplingParams
from services.inference.engines.base import KvSpan
from services.inference.kv_codec import PromptEnd
from services.inference.worker import shared_memory
from services.inference.worker.kv_fetch import UNSHARED_S
from services.inference.worker.service import DecodeServicer, PrefillServicer
from tests.support.inference.fetching_engine import FetchingEngine
from tests.support.inference.weight_sources import SECURITY
from tests.support.runtime.waiting import until

DATA = bytes(range(256)) * 8192
SPAN = KvSpan(
    from_token=0, tokens=1, version=3, dtype="uint8", shape=(1, 2, 1, 1, 1 << 20), data=DATA,
    fingerprint=b"model",
)  # fmt: skip


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in the place of /dev/shm."""
    monkeypatch.setattr(shared_memory, "_DIRECTORY", tmp_path)
    return tmp_path


def test_file_is_mapped_and_removed(memory: Path) -> None:
    """Its content stays while it is mapped; only its user may open it meanwhile."""
    name, checksum = shared_memory.write(DATA)
    assert (memory / name).stat().st_mode & 0o777 == 0o600
    assert bytes(shared_memory.read(name, size=len(DATA), checksum=checksum)) == DATA
    assert not list(memory.iterdir())


def test_damaged_file_is_refused(memory: Path) -> None:
    """And removed, as one of another size is."""
    for damage in (DATA[:-1] + b"?", DATA[:-1]):
        name, checksum = shared_memory.write(DATA)
        (memory / name).write_bytes(damage)
        with pytest.raises(DataLoss):
            shared_memory.read(name, size=len(DATA), checksum=checksum)
        assert not list(memory.iterdir())


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "forge-kv-", "forge-kv-0/../x"])
def test_no_other_file_is_opened_or_removed(memory: Path, name: str) -> None:
    """A name of another form is refused before it touches the file system."""
    (memory.parent / "secret").write_bytes(b"kept")
    with pytest.raises(DataLoss):
        shared_memory.read(name, size=4, checksum=0)
    shared_memory.remove(name)
    assert (memory.parent / "secret").read_bytes() == b"kept"


def test_link_in_shared_memory_is_not_followed(memory: Path) -> None:
    """Another process of the host cannot make a worker read a file for it."""
    name = "forge-kv-" + "0" * 32
    (memory / name).symlink_to("/etc/passwd")
    with pytest.raises(OSError):
        shared_memory.read(name, size=4, checksum=0)


class Held:
    """A prefill engine with one prompt."""

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        return SPAN

    def release(self, request_id: str) -> None: ...


async def test_file_is_removed_if_its_caller_has_left(memory: Path) -> None:
    """It would stay in the host's memory: with the answer on its way, and while it is written."""
    servicer = PrefillServicer(cast(Any, Held()))
    request = pb.FetchKvRequest(slices=True, shared_memory=place())
    responses = cast(AsyncGenerator[pb.FetchKvResponse, None], servicer.FetchKv(request, None))
    name = (await anext(responses)).shared.name
    assert [one.name for one in memory.iterdir()] == [name]
    await responses.aclose()
    assert not list(memory.iterdir())


async def test_file_that_is_written_for_a_caller_that_has_left_is_removed(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes it cannot be stopped."""
    begun, free, write = threading.Event(), threading.Event(), shared_memory.write

    def held_write(data: bytes | memoryview) -> tuple[str, int]:
        begun.set()
        free.wait(60)
        return write(data)

    monkeypatch.setattr(shared_memory, "write", held_write)
    request = pb.FetchKvRequest(slices=True, shared_memory=place())
    responses = PrefillServicer(cast(Any, Held())).FetchKv(request, None)
    call = asyncio.ensure_future(anext(responses))
    await asyncio.to_thread(begun.wait, 60)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    removed: list[str] = []
    monkeypatch.setattr(shared_memory, "remove", removed.append)
    free.set()
    await until(lambda: bool(removed))
    assert [one.name for one in memory.iterdir()] == removed


async def hand_over(monkeypatch: pytest.MonkeyPatch, *, decode_place: str | None) -> KvSpan | None:
    """What decode gets from prefill; both are in this process."""
    server = RpcServer(service="test", host="127.0.0.1", port=0, security=SECURITY)
    server.add_service(
        rpc.add_PrefillServiceServicer_to_server,
        PrefillServicer(cast(Any, Held())),
        full_name="forge.v1.PrefillService",
    )
    channels, engine = Channels(SECURITY), FetchingEngine()
    decode = DecodeServicer(cast(Any, engine), channels, silence_s=60.0)
    if decode_place is not None:
        monkeypatch.setattr(decode.fetcher, "shared_memory", decode_place)
    token = (1).to_bytes(4, "little")
    request = pb.DecodeRequest(
        request_id="r",
        prompt_ids=token,
        sampling=SamplingParams(max_tokens=1),
        prefill_address=await server.start(),
        first=SampledTokens(ids=token, logprobs=bytes(4), weight_versions=token),
    )
    try:
        async for _ in decode.Decode(request, None):
            pass
    finally:
        await channels.close()
        await server.stop(grace_s=0)
    return engine.fetched


@pytest.mark.parametrize("place", [None, "", "another host"])
async def test_hand_off_is_the_same_with_and_without_shared_memory(
    memory: Path, monkeypatch: pytest.MonkeyPatch, place: str | None
) -> None:
    """Workers that do not see the same memory send slices; no file is left."""
    span = await hand_over(monkeypatch, decode_place=place)
    assert span is not None
    assert bytes(span.data) == DATA
    assert (span.version, span.fingerprint, span.shape) == (3, b"model", SPAN.shape)
    assert not list(memory.iterdir())


async def test_file_that_cannot_be_mapped_pauses_shared_memory(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next fetches do without it, and later ones use it again: the shortage may have ended."""
    fetcher = DecodeServicer(cast(Any, FetchingEngine()), Channels(SECURITY), silence_s=1.0).fetcher
    now_s = 100.0
    monkeypatch.setattr(fetcher, "clock", lambda: now_s)
    assert fetcher.offered_memory() == place()
    fetch = fetcher.fetch(pb.DecodeRequest(), to_token=1)
    shared = pb.FetchKvResponse(shared=pb.SharedKv(name="forge-kv-" + "0" * 32, bytes=4))
    with pytest.raises(Unavailable):
        await fetch._read_shared(shared, PromptEnd())
    assert fetcher.offered_memory() == ""
    now_s += UNSHARED_S
    assert fetcher.offered_memory() == place()


async def test_full_shared_memory_sends_slices(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hand-off does not fail."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    span = await hand_over(monkeypatch, decode_place=None)
    assert span is not None and bytes(span.data) == DATA
    assert not list(memory.iterdir())
