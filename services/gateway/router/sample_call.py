"""Samples one answer, retrying on another router.

Owns the responses of one answer until they are read, its deadline, its abort and its retries. An
answer is sampled again only while the agent has seen no part of it. Owns no stream and no parsing.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable

from forge.core.errors import DeadlineExceeded, ForgeError, Unavailable
from forge.runtime.concurrency.backoff import Backoff
from forge.runtime.rpc.tokens import joined_responses
from forge.v1 import inference_pb2 as pb
from services.gateway.errors import RouterLost
from services.gateway.metrics import UPSTREAM_RETRIES
from services.gateway.router.router_stream import RouterStream, RouterStreams

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
"""Pause before a retry; doubles with each retry."""
LONG_ATTEMPT_S = 10.0
"""After an attempt this long, a lost router starts a new retry period."""
MAX_QUEUED_RESPONSES = 64
"""Unread responses that are kept apart; more are joined."""


class SampleCall:
    """Samples one answer; `abort` ends it from outside."""

    def __init__(
        self,
        streams: RouterStreams,
        *,
        timeout_s: float,
        retry_for_s: float,
        streamed: bool = False,
    ) -> None:
        """`streamed`: the agent sees each response at once, so none may be sampled again."""
        self.call_id = uuid.uuid4().hex
        self.aborted = False
        self._streams = streams
        self._timeout_s = timeout_s
        self._retry_for_s = retry_for_s
        self._streamed = streamed
        self._request = pb.SampleRequest()
        self._on_retry: Callable[[], None] = lambda: None
        self._router_search: asyncio.Timeout | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._complete = self._seen_by_agent = False
        self._reset_attempt()
        self._reset_retry_time()

    def _reset_attempt(self) -> None:
        self._stream: RouterStream | None = None
        self._number = 0
        self._sent_s: float | None = None
        self._responses: list[pb.SampleResponse] = []
        self._ended = False
        self._error: ForgeError | None = None

    def _reset_retry_time(self) -> None:
        self._give_up_s = time.monotonic() + self._retry_for_s
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)

    def set_request(
        self, request: pb.SampleRequest, *, on_retry: Callable[[], None] = lambda: None
    ) -> None:
        """Sets the request that the first read sends; `on_retry` drops the tokens read so far."""
        self._request, self._on_retry = request, on_retry
        self._reset_retry_time()

    async def read_response(self) -> pb.SampleResponse | None:
        """Returns the tokens since the last read as one response; None after the answer's end or
        an abort. Raises the router's `ForgeError` when the answer cannot be sampled again."""
        while True:
            try:
                if self._sent_s is None:
                    await self.send_request()
                response = await self._next_response()
                if response is not None:
                    self._complete = bool(response.finish_reason)
                    self._seen_by_agent = self._streamed
                    return response
                if self._complete or self.aborted:
                    return None
                raise Unavailable("the router ended the answer without a finish reason")
            except Unavailable as error:
                if self._complete:
                    return None
                if isinstance(error, RouterLost) and self._attempt_was_long():
                    self._reset_retry_time()
                pause_s = self._backoff.next_s()
                if self._seen_by_agent or time.monotonic() + pause_s >= self._give_up_s:
                    raise
            await self._prepare_retry(pause_s)

    async def send_request(self) -> None:
        """Sends the request to one router; waits for a router to appear. Raises `Unavailable`, and
        `InvalidArgument` for a request that is too large."""
        self._sent_s = time.monotonic()
        if self.aborted:
            return
        try:
            async with asyncio.timeout(None) as self._router_search:
                wait_s = max(0.1, self._give_up_s - self._sent_s)
                stream = await self._streams.pick_stream(timeout_s=wait_s)
        except TimeoutError:
            return  # `abort` ended the search.
        finally:
            self._router_search = None
        if not self.aborted:
            self._number = stream.send_request(self._request, self, timeout_s=self._timeout_s)
            self._stream = stream
            # The router keeps the same deadline; this one is for a router that hangs.
            self._deadline = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)

    def on_response(self, response: pb.SampleResponse) -> None:
        """Queues a response of the router."""
        self._responses.append(response)
        if len(self._responses) > MAX_QUEUED_RESPONSES:
            self._responses = [joined_responses(self._responses)]
        self._wake_reader()

    def on_end(self, error: ForgeError | None) -> None:
        """Ends the attempt; only the first call has an effect."""
        if not self._ended:
            self._ended, self._error = True, error
            if self._deadline is not None:
                self._deadline.cancel()
            self._wake_reader()

    def cancel_attempt(self) -> None:
        """Stops the router and drops unread responses; a waiting reader gets None."""
        if self._stream is not None:
            self._stream.cancel_request(self._number)
            self._stream = None
        self._responses.clear()
        self.on_end(None)

    def abort(self) -> None:
        """Ends the call; the reader gets None."""
        self.aborted = True
        if self._router_search is not None:
            self._router_search.reschedule(asyncio.get_running_loop().time())
        self.cancel_attempt()

    async def _next_response(self) -> pb.SampleResponse | None:
        while not self._responses:
            if self._error is not None:
                raise self._error
            if self._ended or self._stream is None:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        responses, self._responses = self._responses, []
        return joined_responses(responses)

    async def _prepare_retry(self, pause_s: float) -> None:
        UPSTREAM_RETRIES.inc()
        self.cancel_attempt()
        self._reset_attempt()
        self._on_retry()
        # A new id: the router may still hold the lost attempt under the old one.
        self._request.request_id = f"{self.call_id}-{uuid.uuid4().hex[:8]}"
        await asyncio.sleep(pause_s)

    def _attempt_was_long(self) -> bool:
        return self._sent_s is not None and time.monotonic() - self._sent_s >= LONG_ATTEMPT_S

    def _expire(self) -> None:
        if self._stream is not None:
            self._stream.cancel_request(self._number)
        late = f"the router did not finish its answer within {self._timeout_s:g} s"
        self.on_end(DeadlineExceeded(late))

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
