"""Kept streams to the inference routers: one SampleStream RPC per router, for many answers.

Owns the choice of a router and the streams. Owns no retry and no responses: each goes to the
receiver of its request at once, so a slow agent never delays the other answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from forge.core.errors import ForgeError
from forge.runtime.rpc.kept_stream import KeptStream
from forge.runtime.rpc.remote import Remote
from forge.v1 import inference_pb2 as pb
from services.gateway.errors import RouterLost

if TYPE_CHECKING:
    from forge.runtime.coordination import Instance
    from forge.v1.inference_pb2_grpc import InferenceServiceAsyncStub

AVOID_LOST_S = 2.0
"""Time for which a router with a lost stream is avoided, if there is another router."""


class RouterStreams:
    """One stream per router; a lost stream is replaced."""

    def __init__(self, remote: Remote[InferenceServiceAsyncStub]) -> None:
        self._remote = remote
        self._streams: dict[str, RouterStream] = {}
        """By address."""

    async def pick_stream(self, *, timeout_s: float) -> RouterStream:
        """Returns the stream to a router; waits for a router to appear. Raises `Unavailable`."""
        instance, stub = await self._remote.pick(where=self._not_avoided(), timeout_s=timeout_s)
        stream = self._streams.get(instance.address)
        if stream is None or stream.lost:
            avoided = self._avoided()
            self._streams = {
                address: kept
                for address, kept in self._streams.items()
                if not kept.lost or address in avoided
            }
            stream = self._streams[instance.address] = RouterStream(
                stub.SampleStream(), peer=instance.instance_id
            )
        return stream

    def _not_avoided(self) -> Callable[[Instance], bool] | None:
        """Returns the filter for routers: discovery shows a dead router until its lease expires."""
        avoided = self._avoided()
        instances = self._remote.instances()
        if not avoided or all(instance.address in avoided for instance in instances):
            return None
        return lambda instance: instance.address not in avoided

    def _avoided(self) -> set[str]:
        oldest_s = asyncio.get_running_loop().time() - AVOID_LOST_S
        return {address for address, stream in self._streams.items() if stream.lost_s > oldest_s}

    async def close_streams(self) -> None:
        """Ends every stream, and its requests with `RouterLost`."""
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            await stream.close_stream()


class RouterStream(KeptStream):
    """One SampleStream RPC and its open requests."""

    message_type = pb.SampleStreamRequest
    lost_event = "router_stream_lost"
    own_process = "gateway"

    def lost_error(self, words: str) -> ForgeError:
        """See `KeptStream`."""
        return RouterLost(words)
