"""One rollout's conversation with the gateway over gRPC, for threads.

The same calls as `session`. Both share encoding (`turns`), access and retries; only the waiting is
written twice, here over grpc's blocking channel. An event loop in a thread of its own would cost
two thread switches a call, and `grpc.aio` serves several loops badly.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, ClassVar, Self, TypeVar, Unpack

import grpc

from forge.client.retry import retried_sync
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


class SyncAgentSession(SessionClient):
    """`forge.client.AgentSession`, blocking: the same methods, arguments, results and errors.

    Several threads may use one session at once, for example for sub-agents: their calls make one
    trajectory. Create it after a fork, not before: grpc does not survive a fork.
    """

    grpc_library: ClassVar[Any] = grpc

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if self._owns_rollout and not self._closed:
                self.close(abandon_reason=why_abandoned(error))
        finally:
            self._release()

    def open(self) -> SessionInfo:
        """Describe the session. Raises `Unauthenticated` for a bad token."""
        response = self._unary(self._stub.OpenSession, gateway_pb2.OpenSessionRequest())
        self.info = SessionInfo.decode(response)
        return self.info

    def chat(self, messages: Sequence[Message], **options: Unpack[ChatOptions]) -> Answer:
        """Sample one turn after `messages`; as `AgentSession.chat`."""
        request = chat_request(messages, **options)

        def attempt() -> Answer:
            with closing(self._chat(request)) as pieces:
                for piece in pieces:
                    if isinstance(piece, Answer):
                        return piece
            raise Unavailable("the gateway ended the turn without an answer")

        return self._retried(attempt, retry_on=(Unavailable, ResourceExhausted))

    def stream(
        self, messages: Sequence[Message], **options: Unpack[ChatOptions]
    ) -> Generator[str | Answer, None, None]:
        """Like `chat`, but yields text as it is sampled, then the whole `Answer`.

        It is not retried. Closing the generator (`contextlib.closing`) aborts the turn.
        """
        return self._chat(chat_request(messages, stream=True, **options))

    def generate(self, prompt_ids: Sequence[int], **options: Unpack[GenerateOptions]) -> Sampled:
        """Sample one turn after token ids, for agents that render their own prompts."""
        request = generate_request(prompt_ids, **options)
        return self._retried(
            lambda: self._generate(request), retry_on=(Unavailable, ResourceExhausted)
        )

    def annotate(self, *rewards: common_pb2.RewardEvent) -> None:
        """Add reward components while the session is open; the same event id adds nothing.

        Raises `PermissionDenied` without the grader token, unless the task lets its agent report on
        itself (`agent_rewards`).
        """
        request = gateway_pb2.AnnotateRequest(rewards=rewards)
        self._unary(self._stub.Annotate, request, self._grading)

    def close(self, *rewards: common_pb2.RewardEvent, **options: Unpack[CloseOptions]) -> int:
        """Closes the session, as `AgentSession.close` does."""
        request = gateway_pb2.CloseSessionRequest(rewards=rewards, **options)
        response = self._unary(self._stub.CloseSession, request, self._grading)
        self._closed = True
        return int(response.turns)

    def _release(self) -> None:
        if self._owns_channel:
            self._channel.close()

    def _unary(self, method: Any, request: Any, metadata: Any = None) -> Any:
        def attempt() -> Any:
            try:
                return method(request, metadata=metadata or self._metadata, timeout=self._timeout_s)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from error

        return self._retried(attempt)

    def _retried(self, attempt: Callable[[], Result], **options: Any) -> Result:
        return retried_sync(attempt, retry_for_s=self._retry_for_s, **options)

    def _chat(self, request: gateway_pb2.ChatRequest) -> Generator[str | Answer, None, None]:
        call = self._stub.Chat(request, metadata=self._metadata, timeout=self._timeout_s)
        try:
            for response in call:
                yield from chat_pieces(response)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    def _generate(self, request: gateway_pb2.GenerateRequest) -> Sampled:
        columns = SampledColumns()
        call = self._stub.Generate(request, metadata=self._metadata, timeout=self._timeout_s)
        try:
            for response in call:
                if sampled := columns.add(response):
                    return sampled
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        raise Unavailable("the gateway ended the turn without a finish reason")
