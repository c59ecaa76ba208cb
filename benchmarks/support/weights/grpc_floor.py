"""A bare gRPC stream of bytes between two processes: no protobuf, digests or tensors.

What Python's gRPC costs by itself: the least that a stream of weights over it can cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio
import numpy as np
import uvloop

from forge.runtime.process.allocator import keep_freed_memory
from forge.runtime.rpc.channel import CHANNEL_OPTIONS

_PIECE_BYTES = 1 << 20
_KEPT_BYTES = 64 << 20
_METHOD = "/floor/Send"


def serve_stream(pipe: Connection, total_bytes: int) -> None:
    """Serve the bytes until the pipe ends; the first message is the port."""
    keep_freed_memory(_KEPT_BYTES)
    uvloop.run(_serve(pipe, total_bytes))


async def _serve(pipe: Connection, total_bytes: int) -> None:
    data = np.random.default_rng(0).bytes(total_bytes)

    async def send(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for start in range(0, total_bytes, _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES]

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            return grpc.unary_stream_rpc_method_handler(send)

    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers((Handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(port)
    with suppress(EOFError):
        await asyncio.to_thread(pipe.recv)


def receive_stream(pipe: Connection, port: int, total_bytes: int) -> None:
    """Receive the bytes into new memory for each order, and keep them until the next."""
    keep_freed_memory(_KEPT_BYTES)
    uvloop.run(_receive(pipe, port, total_bytes))


async def _receive(pipe: Connection, port: int, total_bytes: int) -> None:
    kept: list[bytearray] = []
    pipe.send("ready")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        with suppress(EOFError):
            while True:
                await asyncio.to_thread(pipe.recv)
                kept = [*kept[-1:], bytearray(total_bytes)]
                got = 0
                call: Any = channel.unary_stream(_METHOD)
                async for piece in call(b""):
                    kept[-1][got : got + len(piece)] = piece
                    got += len(piece)
                pipe.send(None)
