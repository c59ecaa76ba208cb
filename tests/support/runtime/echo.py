"""A gRPC service of four methods, one of each kind, that does what its request says.

Requests are text: `say:<text>` answers it, `long:<bytes>` answers so many, `raise:<ErrorName>`
raises that ForgeError, `crash` raises a bug, `who` answers the caller's subject, `wait` waits until
the servicer's gate opens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from forge.core import errors
from forge.runtime.rpc.server import current_claims

FULL_NAME = "test.Echo"


class EchoServicer:
    """Counts the requests it has seen, by text."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.seen: list[str] = []
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()
        self.failures: list[Exception] = []
        """Raised one after the other, whatever is asked, before anything is answered."""

    async def unary(self, request: bytes, context: Any) -> bytes:
        return (await self._answer(request.decode())).encode()

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for word in request.decode().split():
            yield (await self._answer(word)).encode()

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        words = [await self._answer(request.decode()) async for request in requests]
        return " ".join(words).encode()

    async def stream_stream(
        self, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        async for request in requests:
            yield (await self._answer(request.decode())).encode()

    async def written(self, request: bytes, context: Any) -> None:
        """A stream of answers in grpc's other style: written, not yielded."""
        for word in request.decode().split():
            await context.write((await self._answer(word)).encode())

    async def _answer(self, text: str) -> str:
        self.seen.append(text)
        if self.failures:
            raise self.failures.pop(0)
        what, _, rest = text.partition(":")
        match what:
            case "say":
                return rest
            case "long":
                return "x" * int(rest)
            case "raise":
                raise getattr(errors, rest)(f"told to raise {rest}", retry_after_s=0.25)
            case "crash":
                raise KeyError("a secret of the server")
            case "who":
                return current_claims().subject or "nobody"
            case "name":
                return self.name
            case "wait":
                self.entered.set()
                await self.gate.wait()
                return "waited"
        raise AssertionError(text)


def add_to_server(servicer: EchoServicer, server: grpc.aio.Server) -> None:
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Unary": grpc.unary_unary_rpc_method_handler(servicer.unary),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(servicer.unary_stream),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(servicer.stream_unary),
        "StreamStream": grpc.stream_stream_rpc_method_handler(servicer.stream_stream),
        "Written": grpc.unary_stream_rpc_method_handler(servicer.written),
        "Open": grpc.unary_unary_rpc_method_handler(servicer.unary),
        "ForSessions": grpc.unary_unary_rpc_method_handler(servicer.unary),
    }
    generic = grpc.method_handlers_generic_handler(FULL_NAME, handlers)
    server.add_generic_rpc_handlers((generic,))


SCOPES = {"Open": "", "ForSessions": "session"}


class EchoStub:
    """The client's side."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.Unary: Any = channel.unary_unary(f"/{FULL_NAME}/Unary")
        self.UnaryStream: Any = channel.unary_stream(f"/{FULL_NAME}/UnaryStream")
        self.StreamUnary: Any = channel.stream_unary(f"/{FULL_NAME}/StreamUnary")
        self.StreamStream: Any = channel.stream_stream(f"/{FULL_NAME}/StreamStream")
        self.Written: Any = channel.unary_stream(f"/{FULL_NAME}/Written")
        self.Open: Any = channel.unary_unary(f"/{FULL_NAME}/Open")
        self.ForSessions: Any = channel.unary_unary(f"/{FULL_NAME}/ForSessions")
