"""Many Samples on one kept stream: the router's side of SampleStream.

Owns the pieces of an answer until they are sent. The first piece and the end are sent at once, the
pieces between them joined, `interval_s` after the first of them: a write, a message and an event
for each token would cost the router, the gateway and the agent more than the token. Not here: the
stream and its calls (`forge.runtime.rpc.served_stream`), and the sampling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import ClassVar

from forge.runtime.rpc.served_stream import ServedStream, ServedStreams
from forge.runtime.rpc.tokens import joined_responses
from forge.runtime.telemetry import bind_context, log
from forge.v1 import inference_pb2 as pb
from services.inference.router.metrics import STREAM_CALLS

HELD_BYTES = 16 << 10
"""Held bytes of an answer that are sent before `interval_s` is over."""

Sample = Callable[[pb.SampleRequest], AsyncGenerator[pb.SampleResponse, None]]


class SampleStreams(ServedStreams):
    """All SampleStream calls of this process."""

    def __init__(self, sample: Sample, *, interval_s: float) -> None:
        """`interval_s`: longest time that a piece after the first waits for others; 0: none."""
        super().__init__(lambda: _SampleStream(sample, interval_s))


@dataclass(slots=True)
class _Held:
    """Unsent pieces of an answer whose first piece was sent."""

    responses: list[pb.SampleResponse] = field(default_factory=list)
    size: int = 0
    """Bytes of `responses`."""


class _SampleStream(ServedStream):
    """The state of one call of SampleStream."""

    message_type = pb.SampleStreamResponse
    served_by: ClassVar[str] = "router"

    def __init__(self, sample: Sample, interval_s: float) -> None:
        super().__init__()
        self._sample = sample
        self._interval_s = interval_s
        self._held: dict[int, _Held] = {}
        """By call, from its first piece to its end."""
        self._send_later: asyncio.TimerHandle | None = None
        """Set while a held piece waits for it."""

    def answer(self, begin: pb.SampleBegin) -> AsyncGenerator[pb.SampleResponse, None]:
        bind_context(trajectory_id=begin.request.session_id)
        return self._sample(begin.request)

    def on_response(self, begin: pb.SampleBegin, response: pb.SampleResponse) -> None:
        """Send the first piece; hold a later one until others, the end or the timer follow."""
        held = self._held.get(begin.call)
        if held is None:
            self._held[begin.call] = _Held()
            self.put(begin.call, "response", response)
            return
        size = response.ByteSize()
        held.responses.append(response)
        held.size += size
        self.count_unsent(size)
        if response.finish_reason or not self._interval_s or held.size >= HELD_BYTES:
            self._send_held(begin.call)
        elif self._send_later is None:
            loop = asyncio.get_running_loop()
            self._send_later = loop.call_later(self._interval_s, self._send_all_held)

    def on_code(self, code: str, error: Exception | None) -> None:
        STREAM_CALLS.labels(code).inc()
        if code == "INTERNAL":
            log.error("sample_failed", exc_info=error)

    def before_end(self, call: int) -> None:
        if call in self._held:
            self._send_held(call)
            del self._held[call]

    def forget(self, call: int) -> None:
        self.count_unsent(-self._held.pop(call, _Held()).size)

    def on_request(self, request: pb.SampleStreamRequest) -> None:
        """Nothing: a message has only calls and cancels."""

    def on_end_of_stream(self) -> None:
        if self._send_later is not None:
            self._send_later.cancel()

    def _send_all_held(self) -> None:
        self._send_later = None
        for call in self._held:
            self._send_held(call)

    def _send_held(self, call: int) -> None:
        held = self._held[call]
        if held.responses:
            self._held[call] = _Held()
            self.count_unsent(-held.size)
            self.put(call, "response", joined_responses(held.responses))
