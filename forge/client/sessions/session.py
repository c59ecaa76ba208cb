"""One rollout's conversation with the gateway over gRPC, for event loops.

Owns the calls of an agent: open, chat, generate, annotate, close. Keeps no history: an agent sends
all messages that the model should see, and the gateway finds the tokens it already has. Threads use
`forge.client.sessions.sync`.

    async with AgentSession.from_env() as session:
        answer = await session.chat([{"role": "user", "content": "What is 2 + 2?"}])
        print(answer.text)
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Self, TypeVar, Unpack

import grpc
import grpc.aio

from forge.client.retry import retried
from forge.client.sessions.messages import Message
from forge.client.sessions.session_client import SessionClient
from forge.client.sessions.turns import (
    Answer,
    ChatOptions,
    CloseOptions,
    GenerateOptions,
    Sampled,
    SampledColumns,
    SessionInfo,
    chat_pieces,
    chat_request,
    generate_request,
    why_abandoned,
)
from forge.core.errors import ResourceExhausted, Unavailable
from forge.runtime.rpc.status import from_rpc_error
from forge.v1 import common_pb2, gateway_pb2

Result = TypeVar("Result")


class AgentSession(SessionClient):
    """A rollout, from the agent's side.

    As a context manager it opens the session. If it owns the rollout it also closes it: sealed
    after a normal end, abandoned after an exception. A program that a runner started does not
    own its rollout (`from_env`): the runner scores and closes it. Several calls may run at once,
    for example of sub-agents: they make one trajectory.
    """

    grpc_library: ClassVar[Any] = grpc.aio

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self._release()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._owns_rollout and not self._closed:
                await self.close(abandon_reason=why_abandoned(error))
        finally:
            await self._release()

    async def open(self) -> SessionInfo:
        """Describe the session. Raises `Unauthenticated` for a bad token."""
        response = await self._unary(self._stub.OpenSession, gateway_pb2.OpenSessionRequest())
        self.info = SessionInfo.decode(response)
        return self.info

    async def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Answer:
        """Sample one turn after `messages`, and wait for all of it.

        Retries while no gateway answers, or the gateway is too busy; tokens of a failed attempt
        stay on record as an unused turn. Raises `InvalidArgument` for a context that is too long.
        """
        request = chat_request(messages, **options)

        async def attempt() -> Answer:
            async with aclosing(self._chat(request)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Answer):
                        return piece
            raise Unavailable("the gateway ended the turn without an answer")

        return await self._retried(attempt, retry_on=(Unavailable, ResourceExhausted))

    def stream(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[str | Answer, None]:
        """Like `chat`, but yields text as it is sampled, then the whole `Answer`.

        It is not retried. Closing the generator (`contextlib.aclosing`) aborts the turn.
        """
        return self._chat(chat_request(messages, stream=True, **options))

    async def generate(
        self, prompt_ids: Sequence[int], **options: Unpack[GenerateOptions]
    ) -> Sampled:
        """Sample one turn after token ids, for agents that render their own prompts."""
        request = generate_request(prompt_ids, **options)
        return await self._retried(
            lambda: self._generate(request), retry_on=(Unavailable, ResourceExhausted)
        )

    async def annotate(self, *rewards: common_pb2.RewardEvent) -> None:
        """Add reward components while the session is open; the same event id adds nothing.

        Raises `PermissionDenied` without the grader token, unless the task lets its agent report on
        itself (`agent_rewards`).
        """
        request = gateway_pb2.AnnotateRequest(rewards=rewards)
        await self._unary(self._stub.Annotate, request, self._grading)

    async def close(self, *rewards: common_pb2.RewardEvent, **options: Unpack[CloseOptions]) -> int:
        """Seal the trajectory with its rewards, or abandon it; return its number of turns.

        On return all turns are on disk. Raises `PermissionDenied` for rewards as `annotate` does,
        `AlreadyExists` for a second outcome, `FailedPrecondition` when fewer than `min_turns` turns
        are on record.
        """
        request = gateway_pb2.CloseSessionRequest(rewards=rewards, **options)
        response = await self._unary(self._stub.CloseSession, request, self._grading)
        self._closed = True
        return int(response.turns)

    async def _release(self) -> None:
        if self._owns_channel:
            await self._channel.close()

    async def _unary(self, method: Any, request: Any, metadata: Any = None) -> Any:
        async def attempt() -> Any:
            try:
                return await method(
                    request, metadata=metadata or self._metadata, timeout=self._timeout_s
                )
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

        return await self._retried(attempt)

    async def _retried(self, attempt: Callable[[], Awaitable[Result]], **options: Any) -> Result:
        return await retried(attempt, retry_for_s=self._retry_for_s, **options)

    async def _chat(self, request: gateway_pb2.ChatRequest) -> AsyncGenerator[str | Answer, None]:
        call = self._stub.Chat(request, metadata=self._metadata, timeout=self._timeout_s)
        try:
            async for response in call:
                for piece in chat_pieces(response):
                    yield piece
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def _generate(self, request: gateway_pb2.GenerateRequest) -> Sampled:
        columns = SampledColumns()
        call = self._stub.Generate(request, metadata=self._metadata, timeout=self._timeout_s)
        try:
            async for response in call:
                if sampled := columns.add(response):
                    return sampled
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        raise Unavailable("the gateway ended the turn without a finish reason")
