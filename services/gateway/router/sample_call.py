"""Sampling through whichever router is there.

Owns one answer's call: which router, and its end from either side. Owns no retry: only who knows
what was already delivered can decide that.
"""

from __future__ import annotations

import asyncio
import uuid

from forge.v1 import inference_pb2
from services.gateway.router.sample_stream import Answer, SampleStreams


class SampleCall:
    """One attempt after another to sample an answer; `abort` ends it from outside."""

    def __init__(self, streams: SampleStreams, *, timeout_s: float) -> None:
        self._streams = streams
        self._timeout_s = timeout_s
        self.call_id = uuid.uuid4().hex
        self._answer: Answer | None = None
        self._looking: asyncio.Timeout | None = None
        """While a router is looked for."""
        self.aborted = False

    async def begin(self, request: inference_pb2.SampleRequest, *, wait_s: float) -> None:
        """Asks some router, and waits up to `wait_s` for one to appear. Raises `Unavailable`, and
        `InvalidArgument` for a request that is too large."""
        if self.aborted:
            return
        try:
            async with asyncio.timeout(None) as self._looking:
                stream = await self._streams.pick(timeout_s=wait_s)
        except TimeoutError:
            return  # aborted meanwhile
        finally:
            self._looking = None
        if not self.aborted:
            self._answer = stream.begin(request, timeout_s=self._timeout_s)

    async def read(self) -> inference_pb2.SampleResponse | None:
        """What the router has sent since; None at its end, or once aborted. Raises the ForgeError
        that the router answered."""
        if self._answer is None:
            return None
        return await self._answer.read()

    def end(self) -> None:
        """Nothing more is wanted of this router."""
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None

    def abort(self) -> None:
        self.aborted = True
        if self._answer is not None:
            self._answer.cancel()
        elif self._looking is not None:
            self._looking.reschedule(asyncio.get_running_loop().time())
