"""Serves and reads wall clocks."""

from __future__ import annotations

import time
from typing import Any

import grpc.aio

from forge.core.clocks import Clock
from forge.runtime.rpc.status import translated
from forge.v1 import clock_pb2 as pb
from forge.v1 import clock_pb2_grpc as rpc


class ClockServicer(rpc.ClockServiceServicer):
    """Part of every server."""

    async def GetClock(  # noqa: N802 - named by the proto
        self, request: pb.GetClockRequest, context: Any
    ) -> pb.GetClockResponse:
        """Return this process's wall clock."""
        return pb.GetClockResponse(unix_s=time.time())


async def read_clock(channel: grpc.aio.Channel, *, name: str, timeout_s: float) -> Clock:
    """Return the offset of the clock behind `channel` from this one. Raises `ForgeError`."""
    stub: Any = rpc.ClockServiceStub(channel)
    sent_unix_s, sent_s = time.time(), time.monotonic()
    async with translated():
        response = await stub.GetClock(pb.GetClockRequest(), timeout=timeout_s)
    half_s = (time.monotonic() - sent_s) / 2
    return Clock(name=name, offset_s=response.unix_s - sent_unix_s - half_s, error_s=half_s)
