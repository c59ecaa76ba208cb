"""Long prompts: what a session tokenizes, and in what order sessions share the threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from forge.core.conversation.messages import Message
from forge.core.errors import ContextTooLong
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2
from services.gateway.actors.messages import BeginCall, DraftPrompt
from services.gateway.actors.prompts import LARGE_REQUEST_BYTES, LARGE_TEXT_CHARS
from services.gateway.actors.session import SessionActor
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.prompt import Prompt
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.model.encode_threads import EncodeThreads
from tests.support.gateway.chat_templates import make_model
from tests.support.gateway.session_settings import session_settings

TIMEOUT_S = 60.0
MIB = 1 << 20


class Texts:
    """A tokenizer that counts its texts, and waits at long ones while the gate is closed."""

    def __init__(self, context_tokens: int) -> None:
        self._model = make_model("chatml", context_tokens=context_tokens)
        self.long: list[str] = []
        """The first letter of the message of each long text."""
        self.began = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode(self, text: str) -> bytes:
        if len(text) > LARGE_TEXT_CHARS:
            self.long.append(text.split("user\n")[1][0])
            self.began.set()
            assert self.gate.wait(TIMEOUT_S)
            return bytes(TOKEN_BYTES)
        return self._model.encode(text)

    encode_first = encode

    def encode_within(self, text: str, room: int, *, first: bool) -> tuple[int, bytes]:
        return 1, self.encode(text)


@pytest_asyncio.fixture
async def actors() -> AsyncIterator[ActorSystem]:
    system = ActorSystem("test")
    yield system
    await system.stop()


async def session(actors: ActorSystem, texts: Texts, name: str, tenant: str = "") -> ActorRef:
    claims = Claims(subject=name, scopes=frozenset({"session"}), trajectory_id=name, tenant=tenant)
    writer: Any = SimpleNamespace(ask=lambda *_, **__: none_waiting())
    settings = session_settings(writer, model=texts, threads=ONE_THREAD)
    return await actors.spawn(lambda: SessionActor(claims, settings), name=name)


async def none_waiting() -> list[common_pb2.Turn]:
    return []


ONE_THREAD = EncodeThreads(1)


def request(text: str) -> TurnRequest:
    return TurnRequest(
        messages=[Message(role="user", content=text)],
        sampling=common_pb2.SamplingParams(),
        arrived=Moment(at_s=0.0, unix_s=0.0),
    )


def begin(text: str) -> BeginCall:
    return BeginCall(call_id=text[:9], abort=lambda: None, request=request(text), opening="")


@pytest.mark.parametrize("counts", [False, True])
async def test_prompt_beyond_the_context_is_not_tokenized(
    actors: ActorSystem, counts: bool
) -> None:
    """10 MiB for a model of 512 tokens are refused by their size, before the tokenizer runs."""
    texts = Texts(context_tokens=512)
    actor = await session(actors, texts, "t:0:0")
    message: Any = begin("a" * 10 * MIB)
    if counts:
        message = DraftPrompt(request=message.request, opening="")
    with pytest.raises(ContextTooLong, match=r"\d{6} tokens > 511 maximum \(at least\)"):
        await actor.ask(message, timeout_s=TIMEOUT_S)
    assert not texts.long


async def test_short_prompts_pass_while_a_long_one_is_tokenized(actors: ActorSystem) -> None:
    """Sessions with short prompts begin their calls while the only thread is busy."""
    texts = Texts(context_tokens=MIB)
    long, short = [await session(actors, texts, name) for name in ("t:0:0", "t:0:1")]
    texts.gate.clear()
    busy = asyncio.create_task(long.ask(begin("a" * MIB), timeout_s=TIMEOUT_S))
    try:
        await asyncio.to_thread(texts.began.wait, TIMEOUT_S)
        prompt: Prompt = await short.ask(begin("b"), timeout_s=TIMEOUT_S)
        assert prompt.tokens and not busy.done()
    finally:
        texts.gate.set()
    await busy


async def test_tokenizer_threads_alternate_between_sessions(actors: ActorSystem) -> None:
    """Three long prompts of a session, then one of another: the other is second."""
    texts = Texts(context_tokens=MIB)
    first, second = [await session(actors, texts, name) for name in ("t:0:0", "t:0:1")]
    texts.gate.clear()
    asked = [first.ask(begin("a" * MIB), timeout_s=TIMEOUT_S) for _ in range(3)]
    calls = [asyncio.create_task(one) for one in asked]
    try:
        await asyncio.to_thread(texts.began.wait, TIMEOUT_S)
        calls.append(asyncio.create_task(second.ask(begin("b" * MIB), timeout_s=TIMEOUT_S)))
        while not ONE_THREAD.queued:
            await asyncio.sleep(0)
    finally:
        texts.gate.set()
    await asyncio.gather(*calls)
    assert texts.long == ["a", "b", "a", "a"]


async def test_tenants_take_turns_on_the_threads(actors: ActorSystem) -> None:
    """Long prompts of three sessions of a tenant, then one of another: the other is second."""
    texts = Texts(context_tokens=MIB)
    of_one = [await session(actors, texts, f"t:0:{at}", tenant="ada") for at in range(3)]
    other = await session(actors, texts, "u:0:0", tenant="eve")
    texts.gate.clear()
    calls: list[asyncio.Task[Any]] = []
    try:
        for actor, text in (*((one, "a") for one in of_one), (other, "b")):
            calls.append(asyncio.create_task(actor.ask(begin(text * MIB), timeout_s=TIMEOUT_S)))
            # One is on the thread.
            while ONE_THREAD.queued < len(calls) - 1 or not texts.began.is_set():
                await asyncio.sleep(0)
    finally:
        texts.gate.set()
    await asyncio.gather(*calls)
    assert texts.long == ["a", "b", "a", "a"]


@pytest.mark.parametrize("size_bytes", [0, 2 * LARGE_REQUEST_BYTES])
async def test_too_many_messages_are_refused_before_they_are_rendered(
    actors: ActorSystem, size_bytes: int
) -> None:
    """Each has at least one token; the template never sees them."""
    texts = Texts(context_tokens=512)
    texts.renderer = texts.stub_render = None  # type: ignore[attr-defined]
    actor = await session(actors, texts, "t:0:0")
    many = replace(
        request("a"), messages=[Message(role="user", content="a")] * 600, size_bytes=size_bytes
    )
    count = DraftPrompt(request=many, opening="")
    with pytest.raises(ContextTooLong, match=r"600 tokens > 511 maximum \(at least\)"):
        await actor.ask(count, timeout_s=TIMEOUT_S)
