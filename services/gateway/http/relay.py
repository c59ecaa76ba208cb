"""One call of an external API: its order, its deadline and its record.

Owns no transport to the agent: `forward` answers over HTTP, `openai.responses.relay` over
WebSocket.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType

import aiohttp

from forge.core.errors import DeadlineExceeded, ForgeError, Unavailable
from forge.v1 import common_pb2
from services.gateway.actors.messages import BeginOther, EndOther
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.call_labels import LABELS
from services.gateway.errors import SessionClosed
from services.gateway.external.answer import ExternalAnswer, called_turn
from services.gateway.external.api import ExternalApi
from services.gateway.metrics import OTHER_FAILURES
from services.gateway.sessions import Session
from services.gateway.turns.record import ASK_TIMEOUT_S, record_end
from services.gateway.turns.run import MODEL_HEADER, TURN_HEADER


class Relay:
    """One call. `leave` ends it in any case."""

    def __init__(
        self, session: Session, api: ExternalApi, body: bytes, *, path: str, arrived: Moment
    ) -> None:
        self.headers = {MODEL_HEADER: api.name}
        """Headers of the agent's response."""
        self._session, self._api, self._body = session, api, body
        self._path, self._arrived = path, arrived
        self._call_id = uuid.uuid4().hex
        self._deadline = _Deadline(api)
        self._recorded = False
        """Whether the session may know of the call, and not of its end."""
        self._answer: ExternalAnswer | None = None

    async def begin(self) -> None:
        """Begins the call in the session."""
        begin = BeginOther(call_id=self._call_id, abort=self._deadline.abort, arrived=self._arrived)
        # The session may begin the call after this wait has ended. It needs an end all the same: an
        # open call prevents the close of the session.
        self._recorded = True
        try:
            await self._session.actor.ask(begin, timeout_s=ASK_TIMEOUT_S)
        except BaseException:
            self.leave()
            raise

    @asynccontextmanager
    async def call(
        self, headers: Mapping[str, str], *, events: bool = False
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Calls the API; yields its response. `headers` of the agent, and `events`: as for
        `ExternalApi.post`, whose errors it raises."""
        async with (
            self._deadline,
            self._api.post(self._path, self._body, headers, events=events) as upstream,
        ):
            self._answer = ExternalAnswer(
                streamed=is_stream(upstream),
                recorded_bytes=self._api.recorded_bytes,
                gemini=self._api.protocol == "gemini",
            )
            yield upstream

    async def complete(self, upstream: aiohttp.ClientResponse) -> bytes:
        """Returns the whole answer, which is no stream, and records it."""
        assert self._answer is not None
        content = bytearray()
        async for piece in self._api.pieces(upstream):
            self._answer.add(piece)
            content += piece
        self._answer.read_usage(bytes(content))
        self.headers |= await self._record()
        return bytes(content)

    async def stream(self, upstream: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Yields the pieces of a stream, with the header of its turn as a comment, and records it.
        Raises `Unavailable` for one without its last event."""
        answer = self._answer
        assert answer is not None
        async for piece in self._api.pieces(upstream):
            last = answer.add(piece)
            if last is not None:
                named = "".join(f": {n}: {v}\n" for n, v in (await self._record()).items())
                piece = piece[:last] + named.encode() + piece[last:]
            yield piece
        if not answer.ended:
            OTHER_FAILURES.labels(self._api.name, "cut").inc()
            raise Unavailable(f"model {self._api.name!r}: its API ended in mid-answer")
        await self._record()

    def leave(self) -> None:
        """Records a partial answer, unless the complete one is recorded."""
        if self._recorded:
            self._recorded = False
            self._session.actor.tell(self._end(whole=False))

    async def _record(self) -> dict[str, str]:
        """Records the complete answer, once; returns the header with its turn."""
        if not self._recorded:
            return {}
        self._recorded = False
        turn_index = await record_end(self._session, self._end(whole=True))
        if turn_index < 0:
            raise SessionClosed("the session was closed during this call")
        return {TURN_HEADER: str(turn_index)}

    def _end(self, *, whole: bool) -> EndOther:
        turn: common_pb2.Turn | None = None
        if self._answer is not None:
            turn = called_turn(
                self._api.name,
                self._api.kind,
                self._body,
                self._answer,
                recorded_bytes=self._api.recorded_bytes,
                whole=whole,
            )
            turn.agent = LABELS.get().agent
        return EndOther(call_id=self._call_id, arrived=self._arrived, turn=turn)


def is_stream(upstream: aiohttp.ClientResponse) -> bool:
    """Returns whether a response has server-sent events."""
    return upstream.content_type == "text/event-stream"


class _Deadline:
    """The longest time of a call; `abort` ends the call at once."""

    def __init__(self, api: ExternalApi) -> None:
        self._api = api
        self._timeout = asyncio.timeout(api.timeout_s)
        self._entered = self._aborted = False

    async def __aenter__(self) -> None:
        if self._aborted:
            raise self._late()
        await self._timeout.__aenter__()
        self._entered = True

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered = False
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise self._late() from None

    def abort(self) -> None:
        """Ends the call."""
        self._aborted = True
        if self._entered:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def _late(self) -> ForgeError:
        if self._aborted:
            return SessionClosed("the session was closed during this call")
        OTHER_FAILURES.labels(self._api.name, "timeout").inc()
        return DeadlineExceeded(
            f"model {self._api.name!r}: its API did not finish within {self._api.timeout_s:g} s"
        )
