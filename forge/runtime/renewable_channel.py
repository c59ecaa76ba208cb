"""A channel whose connection can be replaced under its stubs, e.g. for new certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

_DRAIN_S = 1e8
"""Without end: calls end by their own deadlines, and gRPC would cancel a stream."""


class RenewableChannel(grpc.aio.Channel):
    """Opens an inner channel; `renew` opens another for all later calls, `retire` leaves that to
    the next call."""

    def __init__(self, open_inner: Callable[[], grpc.aio.Channel]) -> None:
        self._open_inner = open_inner
        self._inner: grpc.aio.Channel | None = open_inner()
        self._retired: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def inner(self) -> grpc.aio.Channel:
        """Return the inner channel; open it after `retire`."""
        if self._inner is None:
            self._inner = self._open_inner()
        return self._inner

    def has_calls(self) -> bool:
        """Return whether calls are in flight on retired channels."""
        return bool(self._retired)

    def retire(self) -> None:
        """Close the inner channel once the calls in flight have ended."""
        if self._inner is None:
            return
        retired, self._inner = self._inner, None
        drain = asyncio.create_task(retired.close(grace=_DRAIN_S))
        self._retired[drain] = retired
        drain.add_done_callback(self._retired.pop)

    def renew(self) -> None:
        """Replace the inner channel; calls in flight end on the old one."""
        if self._inner is not None:
            opened = self._open_inner()
            self.retire()
            self._inner = opened

    def multicallable(self, kind: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a method of `kind`, e.g. unary_unary, on the inner channel of each call's time."""
        inner: grpc.aio.Channel | None = None
        call: Any = None

        def invoke(*request: Any, **options: Any) -> Any:
            nonlocal inner, call
            if inner is None or inner is not self._inner:
                inner = self.inner()
                call = getattr(inner, kind)(method, *args, **kwargs)
            return call(*request, **options)

        return invoke

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a multicallable on the current channel."""
        return self.multicallable("unary_unary", method, *args, **kwargs)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a multicallable on the current channel."""
        return self.multicallable("unary_stream", method, *args, **kwargs)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a multicallable on the current channel."""
        return self.multicallable("stream_unary", method, *args, **kwargs)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return a multicallable on the current channel."""
        return self.multicallable("stream_stream", method, *args, **kwargs)

    async def close(self, grace: float | None = None) -> None:
        """Close the current channel and those that were replaced."""
        for drain, retired in list(self._retired.items()):
            drain.cancel()
            await retired.close()
        if self._inner is not None:
            await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the current channel."""
        return self.inner().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the current channel leaves a state."""
        await self.inner().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the current channel is ready."""
        await self.inner().channel_ready()

    async def __aenter__(self) -> RenewableChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
