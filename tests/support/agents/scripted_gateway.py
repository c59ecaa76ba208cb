"""A gateway without a model: it answers from a script and remembers what it was sent.

Speaks OpenAI chat completions over HTTP and GatewayService over gRPC, on real sockets, so that
agents and the SDK are tested against real clients' behaviour. It renders no tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from aiohttp import web

from forge.client.sessions.messages import from_proto, to_proto
from forge.core.errors import FailedPrecondition, ForgeError, PermissionDenied, Unavailable
from forge.runtime.coordination import Instance
from forge.runtime.rpc.status import to_status
from forge.v1 import common_pb2, gateway_pb2
from forge.v1.gateway_pb2_grpc import (
    GatewayServiceServicer,
    add_GatewayServiceServicer_to_server,
)

MODEL = "scripted"
Message = dict[str, Any]
Script = Callable[[str, list[Message]], Awaitable[Message]]
"""From a session token and the messages sent to the assistant message to answer with."""


def text(content: str) -> Message:
    """An assistant message that calls no tool."""
    return {"role": "assistant", "content": content}


def calls(*requested: tuple[str, str]) -> Message:
    """An assistant message that calls tools: (name, arguments as the model wrote them)."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": f"call_{i}", "type": "function", "function": {"name": n, "arguments": a}}
            for i, (n, a) in enumerate(requested)
        ],
    }


def replay(*answers: Message) -> Script:
    """The same answers, in order, for every session; the last one forever."""
    turns: dict[str, Iterator[Message]] = {}

    async def answer(token: str, messages: list[Message]) -> Message:
        rest = turns.setdefault(token, itertools.chain(answers, itertools.repeat(answers[-1])))
        return next(rest)

    return answer


@dataclass(slots=True)
class Session:
    """What one token's agent did."""

    requests: list[list[Message]] = field(default_factory=list)
    """The messages of each turn."""
    tools: list[Any] = field(default_factory=list)
    max_tokens: list[int] = field(default_factory=list)
    context_actions: list[str] = field(default_factory=list)
    rewards: dict[str, common_pb2.RewardEvent] = field(default_factory=dict)
    state: str = "open"
    reason: str = ""
    after_agent_s: float = 0.0

    def reward(self, name: str) -> float:
        """Value of the one reward of that name."""
        (value,) = [event.value for event in self.rewards.values() if event.name == name]
        return value


class ScriptedGateway:
    """One gateway on free ports; `async with` starts and stops it."""

    def __init__(
        self,
        script: Script,
        *,
        instance_id: str = "gateway-0",
        tls: ssl.SSLContext | None = None,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """`tls` is for HTTP, `credentials` are for gRPC; without them either is plain."""
        self.script = script
        self.sessions: dict[str, Session] = {}
        self.failures: list[tuple[grpc.StatusCode, str]] = []
        """Given out one by one, before anything else, by the next gRPC calls."""
        self.model_s: float | Callable[[], float] = 0.0
        """What OpenSession tells of the time in model calls, or what says it."""
        self.unanswered = ""
        """What OpenSession tells of the last model call."""
        self.hold_after_first_word = False
        self.finish_reason: Any = 0
        """Number in the answers of gRPC; 0: as of this release."""
        """gRPC chats stop there, until the caller goes away."""
        self.aborted = asyncio.Event()
        """Set when a held caller has gone."""
        self._instance_id = instance_id
        self._tls = tls
        self._credentials = credentials
        self._server = grpc.aio.server()
        self._site: web.AppRunner | None = None
        self.grpc_port = 0
        self.http_port = 0

    async def __aenter__(self) -> ScriptedGateway:
        add_GatewayServiceServicer_to_server(_Servicer(self), self._server)
        self.grpc_port = (
            self._server.add_secure_port("127.0.0.1:0", self._credentials)
            if self._credentials
            else self._server.add_insecure_port("127.0.0.1:0")
        )
        await self._server.start()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._completions)
        self._site = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._site.setup()
        await web.TCPSite(self._site, "127.0.0.1", 0, ssl_context=self._tls).start()
        self.http_port = self._site.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._site
        await self._server.stop(None)
        await self._site.cleanup()

    @property
    def instance(self) -> Instance:
        """As discovery would show it."""
        return Instance(
            kind="gateway",
            instance_id=self._instance_id,
            address=f"127.0.0.1:{self.grpc_port}",
            metadata={"http": f"127.0.0.1:{self.http_port}"},
            revision=1,
        )

    def session(self, token: str) -> Session:
        """What the agent with that token did so far."""
        return self.sessions.setdefault(token, Session())

    async def take_turn(self, token: str, messages: list[Message], **seen: Any) -> Message:
        """Record one call and answer it."""
        session = self.session(token)
        session.requests.append(messages)
        session.tools.append(seen["tools"])
        session.max_tokens.append(seen["max_tokens"])
        session.context_actions.append(seen.get("context_action", ""))
        return await self.script(token, messages)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Note the end of a held call, also of one whose caller has gone before it is held."""
        try:
            yield
        finally:
            if self.hold_after_first_word:
                self.aborted.set()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        token = request.headers["Authorization"].removeprefix("Bearer ")
        assert body["model"] == MODEL
        try:
            message = await self.take_turn(
                token, body["messages"], tools=body.get("tools"), max_tokens=body["max_tokens"]
            )
        except ForgeError as error:
            return web.json_response(
                {"error": {"message": str(error), "type": "invalid_request_error"}},
                status=error.http_status,
            )
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {
                "id": "chatcmpl-0",
                "object": "chat.completion",
                "created": 0,
                "model": MODEL,
                "choices": [choice],
            }
        )


class _Servicer(GatewayServiceServicer):
    def __init__(self, gateway: ScriptedGateway) -> None:
        self._gateway = gateway

    async def OpenSession(self, request: Any, context: Any) -> Any:
        session = await self._session(context)
        return gateway_pb2.OpenSessionResponse(
            trajectory_id="t0:0:0",
            model=MODEL,
            context_tokens=512,
            turns=len(session.requests),
            model_s=told() if callable(told := self._gateway.model_s) else told,
            unanswered=self._gateway.unanswered,
        )

    async def Chat(self, request: Any, context: Any) -> AsyncIterator[Any]:
        session = await self._session(context)
        with _status(context) as aborted:
            message = await self._gateway.take_turn(
                _token(context),
                [from_proto(each) for each in request.messages],
                tools=json.loads(request.tools_json) if request.tools_json else None,
                max_tokens=request.sampling.max_tokens,
                context_action=request.context_action,
            )
        if aborted:
            await context.abort(*aborted[0])
        for word in message["content"].split(" "):
            with self._gateway.holding():
                yield gateway_pb2.ChatResponse(delta=word)
                if self._gateway.hold_after_first_word:
                    await asyncio.Event().wait()
        yield gateway_pb2.ChatResponse(
            message=to_proto(message),
            finish_reason=self._gateway.finish_reason or common_pb2.FINISH_REASON_STOP,
            prompt_tokens=7,
            sampled_tokens=3,
            turn_index=len(session.requests) - 1,
        )

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Echoes the prompt, one token a response, under weight version 5."""
        session = await self._session(context)
        session.requests.append([])
        for token_id in array("i", request.prompt_ids):
            yield gateway_pb2.GenerateResponse(
                tokens=common_pb2.SampledTokens(
                    ids=array("i", [token_id]).tobytes(),
                    logprobs=array("f", [-0.5]).tobytes(),
                    weight_versions=array("i", [5]).tobytes(),
                )
            )
        yield gateway_pb2.GenerateResponse(
            finish_reason=self._gateway.finish_reason or common_pb2.FINISH_REASON_LENGTH
        )

    async def Annotate(self, request: Any, context: Any) -> Any:
        session = await self._session(context)
        session.rewards |= {event.event_id: event for event in request.rewards}
        return gateway_pb2.AnnotateResponse()

    async def CloseSession(self, request: Any, context: Any) -> Any:
        session = await self._session(context)
        with _status(context) as aborted:
            if request.rewards and _metadata(context).startswith("token-"):
                raise PermissionDenied("a session token sets no rewards")
            if len(session.requests) < request.min_turns:
                raise FailedPrecondition(f"only {len(session.requests)} turns are recorded")
        if aborted:
            await context.abort(*aborted[0])
        session.rewards |= {event.event_id: event for event in request.rewards}
        session.state = "abandoned" if request.abandon_reason else "sealed"
        session.reason = request.abandon_reason
        session.after_agent_s = request.after_agent_s
        return gateway_pb2.CloseSessionResponse(turns=len(session.requests))

    async def _session(self, context: Any) -> Session:
        if self._gateway.failures:
            await context.abort(*self._gateway.failures.pop(0))
        return self._gateway.session(_token(context))


def _token(context: Any) -> str:
    """The session's token; the grader's is "grader-<number>" for "token-<number>"."""
    return _metadata(context).replace("grader-", "token-")


def _metadata(context: Any) -> str:
    token: str = dict(context.invocation_metadata())["authorization"]
    return token.removeprefix("Bearer ")


@contextmanager
def _status(context: Any) -> Iterator[list[tuple[grpc.StatusCode, str]]]:
    """Collects the status of a ForgeError raised inside; abort outside, where it can raise."""
    aborted: list[tuple[grpc.StatusCode, str]] = []
    try:
        yield aborted
    except ForgeError as error:
        aborted.append(to_status(error))


class Instances:
    """Discovery of instances that never change."""

    def __init__(self, *instances: Instance) -> None:
        self.instances = instances

    async def wait(
        self, *, timeout_s: float, where: Callable[[Instance], bool] | None = None, count: int = 1
    ) -> tuple[Instance, ...]:
        """Those that fit; time is up at once when none does."""
        fitting = tuple(each for each in self.instances if where is None or where(each))
        if len(fitting) < count:
            raise Unavailable(f"no fitting instance after {timeout_s:g} s")
        return fitting
