"""One rollout's conversation with the gateway, over gRPC.

Owns what an agent does with its session token: open, chat, generate, annotate, close. It keeps no
history; an agent sends the messages it wants the model to see, and the gateway works out which
of their tokens it already knows.

    async with AgentSession.from_env() as session:
        answer = await session.chat([{"role": "user", "content": "What is 2 + 2?"}])
        print(answer.text)
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import grpc
import grpc.aio

from forge.client.messages import Message, from_proto, to_proto
from forge.client.retry import retried
from forge.core.errors import ConfigError, ResourceExhausted, Unavailable
from forge.runtime.rpc.channel import CHANNEL_OPTIONS
from forge.runtime.rpc.status import from_rpc_error
from forge.v1 import common_pb2, gateway_pb2
from forge.v1 import gateway_pb2_grpc as gateway_grpc

FinishReason = Literal["stop", "length", "aborted"]
RewardKind = Literal["outcome", "process", "speed"]
Result = TypeVar("Result")

_FINISH: Mapping[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORTED: "aborted",
}
_KINDS = {
    "outcome": common_pb2.REWARD_KIND_OUTCOME,
    "process": common_pb2.REWARD_KIND_PROCESS,
    "speed": common_pb2.REWARD_KIND_SPEED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """What the token stands for."""

    trajectory_id: str
    task_id: str
    domain: str
    model: str
    context_tokens: int
    """Longest context the model takes, prompt and answer together."""
    turns: int
    """Turns of this session that ended so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn, parsed."""

    message: dict[str, Any]
    """The assistant message, OpenAI-shaped: append it to the history as it is."""
    finish_reason: FinishReason
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    turn_index: int

    @property
    def text(self) -> str:
        content: str = self.message["content"]
        return content

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = self.message.get("tool_calls", [])
        return calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One turn in tokens; the three columns have one entry per token."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    weight_versions: Sequence[int]
    finish_reason: FinishReason
    turn_index: int


def reward_event(
    name: str, value: float, *, kind: RewardKind = "outcome", turn_index: int = -1, key: str = ""
) -> common_pb2.RewardEvent:
    """A reward component; `key` tells apart several of one name and turn."""
    return common_pb2.RewardEvent(
        event_id=f"{kind}-{name}-{turn_index}{key and '-'}{key}",
        name=name,
        kind=_KINDS[kind],
        value=value,
        turn_index=turn_index,
    )


class AgentSession:
    """A rollout, from the agent's side.

    As a context manager it opens the session, and closes it when it owns the rollout: sealed
    after a normal end, abandoned after an exception. A program that a runner started does not
    own its rollout (`from_env`): the runner scores and closes it.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        token: str,
        *,
        owns_rollout: bool = True,
        owns_channel: bool = False,
        timeout_s: float = 600.0,
        retry_for_s: float = 30.0,
    ) -> None:
        self.info: SessionInfo | None = None
        self._channel = channel
        self._stub = gateway_grpc.GatewayServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._owns_rollout = owns_rollout
        self._owns_channel = owns_channel
        self._timeout_s = timeout_s
        self._retry_for_s = retry_for_s
        self._closed = False

    @classmethod
    def connect(cls, address: str, token: str, *, tls_ca: str = "", **options: Any) -> Self:
        """A session over a channel of its own; `tls_ca` is a PEM file, "" for plain TCP."""
        if tls_ca:
            credentials = grpc.ssl_channel_credentials(Path(tls_ca).read_bytes())
            channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        else:
            channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return cls(channel, token, owns_channel=True, **options)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The session a runner prepared for this process. Raises `ConfigError`."""
        try:
            address, token = environ["FORGE_GRPC_ADDR"], environ["FORGE_SESSION_TOKEN"]
        except KeyError as error:
            raise ConfigError(
                f"{error.args[0]} is not set: start this program through `forge agents run`"
            ) from None
        tls_ca = environ.get("FORGE_TLS_CA", "")
        return cls.connect(address, token, tls_ca=tls_ca, owns_rollout=False)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._owns_rollout and not self._closed:
                reason = f"{kind.__name__}: {error}" if kind else ""
                await self.close(abandon_reason=reason)
        finally:
            if self._owns_channel:
                await self._channel.close()

    async def open(self) -> SessionInfo:
        """Describe the session. Raises `Unauthenticated` for a bad token."""
        response = await self._unary(self._stub.OpenSession, gateway_pb2.OpenSessionRequest())
        self.info = SessionInfo(
            trajectory_id=response.trajectory_id,
            task_id=response.task_id,
            domain=response.domain,
            model=response.model,
            context_tokens=response.context_tokens,
            turns=response.turns,
        )
        return self.info

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int = 1024,
        temperature: float | None = None,
        stop: Sequence[str] = (),
        context_action: str = "",
    ) -> Answer:
        """Sample one turn after `messages`, and wait for all of it.

        `context_action` names the context management this call performs, e.g. "fold". A call
        that finds no gateway, or too busy a one, is repeated; what an attempt had sampled stays
        on record as a turn nobody built on. Raises `InvalidArgument` for a context too long.
        """
        request = _chat_request(messages, tools, max_tokens, temperature, stop, context_action)

        async def attempt() -> Answer:
            async with aclosing(self._chat(request)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Answer):
                        return piece
            raise Unavailable("the gateway ended the turn without an answer")

        return await self._retried(attempt, retry_on=(Unavailable, ResourceExhausted))

    def stream(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int = 1024,
        temperature: float | None = None,
        stop: Sequence[str] = (),
        context_action: str = "",
    ) -> AsyncGenerator[str | Answer, None]:
        """Like `chat`, but yields text as it is sampled, then the whole `Answer`.

        Never repeated by itself. Closing the generator (`contextlib.aclosing`) aborts the turn.
        """
        request = _chat_request(messages, tools, max_tokens, temperature, stop, context_action)
        request.stream = True
        return self._chat(request)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int = 1024,
        temperature: float | None = None,
        stop_token_ids: Sequence[int] = (),
        context_action: str = "",
    ) -> Sampled:
        """Sample one turn after token ids, for agents that render for themselves."""
        sampling = common_pb2.SamplingParams(
            max_tokens=max_tokens, temperature=temperature, stop_token_ids=stop_token_ids
        )
        request = gateway_pb2.GenerateRequest(
            prompt_ids=_little_endian(array("i", prompt_ids)).tobytes(),
            sampling=sampling,
            context_action=context_action,
        )
        return await self._retried(
            lambda: self._generate(request), retry_on=(Unavailable, ResourceExhausted)
        )

    async def annotate(self, *rewards: common_pb2.RewardEvent) -> None:
        """Add reward components while the session is open; the same event id adds nothing."""
        await self._unary(self._stub.Annotate, gateway_pb2.AnnotateRequest(rewards=rewards))

    async def close(
        self,
        *rewards: common_pb2.RewardEvent,
        abandon_reason: str = "",
        min_turns: int = 0,
    ) -> int:
        """Seal the trajectory with its rewards, or abandon it; its number of turns.

        Everything is on disk when this returns. Raises `FailedPrecondition` when the record
        holds fewer than `min_turns` turns.
        """
        request = gateway_pb2.CloseSessionRequest(
            rewards=rewards, abandon_reason=abandon_reason, min_turns=min_turns
        )
        response = await self._unary(self._stub.CloseSession, request)
        self._closed = True
        turns: int = response.turns
        return turns

    async def _unary(self, method: Any, request: Any) -> Any:
        async def attempt() -> Any:
            try:
                return await method(request, metadata=self._metadata, timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

        return await self._retried(attempt)

    async def _retried(self, attempt: Callable[[], Awaitable[Result]], **options: Any) -> Result:
        return await retried(attempt, retry_for_s=self._retry_for_s, **options)

    async def _chat(self, request: gateway_pb2.ChatRequest) -> AsyncGenerator[str | Answer, None]:
        call = self._stub.Chat(request, metadata=self._metadata, timeout=self._timeout_s)
        try:
            async for response in call:
                if response.delta:
                    yield response.delta
                if response.HasField("message"):
                    yield _answer(response)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def _generate(self, request: gateway_pb2.GenerateRequest) -> Sampled:
        ids, logprobs, versions = array("i"), array("f"), array("i")
        call = self._stub.Generate(request, metadata=self._metadata, timeout=self._timeout_s)
        try:
            async for response in call:
                ids.frombytes(response.tokens.ids)
                logprobs.frombytes(response.tokens.logprobs)
                versions.frombytes(response.tokens.weight_versions)
                if response.finish_reason:
                    return Sampled(
                        ids=_little_endian(ids),
                        logprobs=_little_endian(logprobs),
                        weight_versions=_little_endian(versions),
                        finish_reason=_FINISH[response.finish_reason],
                        turn_index=response.turn_index,
                    )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
        raise Unavailable("the gateway ended the turn without a finish reason")


def _chat_request(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    max_tokens: int,
    temperature: float | None,
    stop: Sequence[str],
    context_action: str,
) -> gateway_pb2.ChatRequest:
    return gateway_pb2.ChatRequest(
        messages=[to_proto(message) for message in messages],
        tools_json=json.dumps(list(tools)) if tools else "",
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature),
        stop=stop,
        context_action=context_action,
    )


def _answer(response: gateway_pb2.ChatResponse) -> Answer:
    return Answer(
        message=from_proto(response.message),
        finish_reason=_FINISH[response.finish_reason],
        prompt_tokens=response.prompt_tokens,
        sampled_tokens=response.sampled_tokens,
        cached_tokens=response.cached_tokens,
        turn_index=response.turn_index,
    )


def _little_endian(column: array[Any]) -> array[Any]:
    """Swap between this machine's byte order and the wire's; the same step either way."""
    if sys.byteorder == "big":
        column.byteswap()
    return column
