"""A hand-off between two processes of one host: its time, and how long it stalls the sender."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from typing import Any, cast

from forge.core.token_columns import int32_bytes
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from forge.v1.common_pb2 import SampledTokens, SamplingParams
from services.inference.engines.base import FetchKv, KvSpan, ModelLimits, Piece
from services.inference.engines.capabilities import Capabilities
from services.inference.worker.service import DecodeServicer, PrefillServicer

_TICK_S = 0.005


def measure_hand_off(*, mib: int) -> dict[str, float]:
    """Return seconds and the sender's longest stall, in slices and in shared memory."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=_send, args=(mib, theirs), daemon=True)
    sender.start()
    try:
        return asyncio.run(_receive(mib, ours))
    finally:
        ours.send("end")
        sender.join()


def _security() -> Security:
    return Security(Keyring.from_bytes(b"k" * 32), subject="benchmark")


def _send(mib: int, pipe: Connection) -> None:
    asyncio.run(_serve(mib, pipe))


class _Held:
    """Holds one prompt."""

    def __init__(self, mib: int) -> None:
        self._data = bytes(mib << 20)

    async def fetch_kv(self, request_id: str, *, from_token: int) -> KvSpan:
        shape = (1, 2, 1, 1, len(self._data) // 2)
        return KvSpan(
            from_token=0, tokens=1, version=1, dtype="uint8", shape=shape, data=self._data
        )

    def release(self, request_id: str) -> None: ...


async def _serve(mib: int, pipe: Connection) -> None:
    server = RpcServer(service="benchmark", host="127.0.0.1", port=0, security=_security())
    server.add_service(
        rpc.add_PrefillServiceServicer_to_server,
        PrefillServicer(cast(Any, _Held(mib))),
        full_name="forge.v1.PrefillService",
    )
    pipe.send(await server.start())
    longest_s = 0.0
    while True:
        began_s = time.monotonic()
        await asyncio.sleep(_TICK_S)
        longest_s = max(longest_s, time.monotonic() - began_s - _TICK_S)
        if pipe.poll():
            if pipe.recv() == "end":
                break
            pipe.send(longest_s)
            longest_s = 0.0
    await server.stop(grace_s=0)


class _Decode:
    """Fetches, and samples nothing."""

    limits = ModelLimits(context_tokens=8, vocabulary=10)
    capabilities = Capabilities(
        engine="none", roles=frozenset({"decode"}), update="in_flight", draws="positional"
    )

    async def decode(
        self, prompt: Any, first: Any, fetch: FetchKv, *, stream: bool
    ) -> AsyncGenerator[Piece, None]:
        await fetch(0)
        nothing: tuple[Piece, ...] = ()
        for piece in nothing:
            yield piece


async def _receive(mib: int, pipe: Connection) -> dict[str, float]:
    address = await asyncio.to_thread(pipe.recv)
    channels = Channels(_security())
    token = int32_bytes([1])
    request = pb.DecodeRequest(
        request_id="r",
        prompt_ids=token,
        sampling=SamplingParams(max_tokens=1),
        prefill_address=address,
        first=SampledTokens(ids=token, logprobs=bytes(4), weight_versions=token),
    )
    numbers = {"hand_off.mib": float(mib)}
    for way in ("slices", "shared"):
        decode = DecodeServicer(cast(Any, _Decode()), channels, silence_s=60.0)
        if way == "slices":
            decode.fetcher.shared_memory = ""
        took, stalls = [], []
        for _ in range(3):
            pipe.send("begin")
            await asyncio.to_thread(pipe.recv)
            began_s = time.monotonic()
            async for _ in decode.Decode(request, None):
                pass
            took.append(time.monotonic() - began_s)
            pipe.send("stall")
            stalls.append(await asyncio.to_thread(pipe.recv))
        numbers[f"hand_off.{way}_s"] = min(took)
        numbers[f"hand_off.{way}_stall_s"] = min(stalls)
    await channels.close()
    return numbers
