"""From a prompt's last prefill pass until decode has it, and to its first decode token: whole
hand-offs and early ones.

A prefill and a decode engine in two processes of one host, joined by their real servicers.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.support.inference.engine_costs import SHAPES
from benchmarks.support.inference.random_weights import random_weights
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.server import RpcServer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from forge.v1 import inference_pb2 as pb
from forge.v1 import inference_pb2_grpc as rpc
from forge.v1.common_pb2 import SamplingParams
from services.inference.engines.base import KvSpan
from services.inference.engines.embedded.engine import EmbeddedDecode, EmbeddedPrefill
from services.inference.engines.embedded.prefill import PrefillActor
from services.inference.engines.provider import EngineOptions
from services.inference.worker.kv_fetch import KvFetch
from services.inference.worker.service import DecodeServicer, PrefillServicer

WAYS = ("whole_shared", "early_shared", "whole_slices", "early_slices")
_GIB = 1 << 30


def measure_early(shape: str, *, tokens: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds until a prompt has arrived and until its first decode token,
    of each way in turn."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=_send, args=(shape, tokens, theirs), daemon=True)
    sender.start()
    try:
        took = asyncio.run(_receive(shape, tokens, rounds, ours))
    finally:
        ours.send("end")
        sender.join()
    return {
        f"early.{shape}.{way}.{end}_ms": statistics.median(seconds) * 1000
        for way in WAYS
        for end, seconds in zip(
            ("arrived", "first_token"), zip(*took[way], strict=True), strict=True
        )
    }


def _security() -> Security:
    return Security(Keyring.from_bytes(b"k" * 32), subject="benchmark")


@asynccontextmanager
async def _engine(kind: Any, shape: str, tokens: int) -> AsyncIterator[Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        weights = random_weights(SHAPES[shape], folder)
        options = EngineOptions(
            model_path=folder, dtype="float32", request_timeout_s=600.0,
            context_tokens=tokens + 16, kv_bytes=4 * _GIB, cache_bytes=_GIB // 4,
        )  # fmt: skip
        actors = ActorSystem("benchmark")
        engine = await kind.start(actors, options)
        await engine.load(weights, version=1)
        yield engine
        await engine.close()
        await actors.stop()


def _send(shape: str, tokens: int, pipe: Connection) -> None:
    asyncio.run(_serve(shape, tokens, pipe))


async def _serve(shape: str, tokens: int, pipe: Connection) -> None:
    plain, ended = PrefillActor._pass, [0.0]

    def timed(actor: PrefillActor) -> None:
        had = bool(actor._pending)
        plain(actor)
        if had:
            ended[0] = time.monotonic()

    async with _engine(EmbeddedPrefill, shape, tokens) as engine:
        server = RpcServer(service="benchmark", host="127.0.0.1", port=0, security=_security())
        server.add_service(
            rpc.add_PrefillServiceServicer_to_server,
            PrefillServicer(engine),
            full_name="forge.v1.PrefillService",
        )
        with mock.patch.object(PrefillActor, "_pass", timed):
            pipe.send(await server.start())
            while await asyncio.to_thread(pipe.recv) != "end":
                pipe.send(ended[0])
        await server.stop(grace_s=0)


async def _receive(
    shape: str, tokens: int, rounds: int, pipe: Connection
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds until both ends, for each prompt of a way."""
    address = await asyncio.to_thread(pipe.recv)
    channels = Channels(_security())
    took: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    vocabulary = SHAPES[shape].vocab_size
    async with _engine(EmbeddedDecode, shape, tokens) as engine:
        decode = DecodeServicer(engine, channels, silence_s=60.0, landing_bytes=_GIB)
        shared_memory = decode.fetcher.shared_memory
        stub: Any = rpc.PrefillServiceStub(channels.get(address))
        for number in range((rounds + 1) * len(WAYS)):
            way = WAYS[number % len(WAYS)]
            decode.fetcher.shared_memory = shared_memory if way.endswith("shared") else ""
            ids = np.random.default_rng(number).integers(0, vocabulary, tokens)
            arrived_s, first_s = await _first_token(
                decode, stub, address, ids.astype("<i4").tobytes(), early=way.startswith("early")
            )
            pipe.send("when")
            last_pass_s = await asyncio.to_thread(pipe.recv)
            # The first of each way warms up.
            if number >= len(WAYS):
                took[way].append((arrived_s - last_pass_s, first_s - last_pass_s))
    await channels.close()
    return took


async def _first_token(
    decode: DecodeServicer, stub: Any, address: str, ids: bytes, *, early: bool
) -> tuple[float, float]:
    """Return the times when decode has the prompt, and of the first token that it samples."""
    request_id, sampling = f"r{time.monotonic_ns()}", SamplingParams(max_tokens=2, temperature=0.0)
    asked = pb.PrefillRequest(
        request_id=request_id, prompt_ids=ids, sampling=sampling, hold_s=600.0
    )
    request = pb.DecodeRequest(
        request_id=request_id, prompt_ids=ids, sampling=sampling, prefill_address=address,
        early=early,
    )  # fmt: skip

    plain, arrived = KvFetch.__call__, [0.0]

    async def fetch(self: KvFetch, from_token: int) -> KvSpan:
        span = await plain(self, from_token)
        arrived[0] = time.monotonic()
        return span

    async def sampled() -> tuple[float, float]:
        with mock.patch.object(KvFetch, "__call__", fetch):
            async for response in decode.Decode(request, None):
                if response.tokens.ids:
                    return arrived[0], time.monotonic()
        raise RuntimeError("decode sampled nothing")

    if early:
        begun = asyncio.create_task(sampled())
        await stub.Prefill(asked)
        return await begun
    read = await stub.Prefill(asked)
    request.first.CopyFrom(read.first)
    return await sampled()
