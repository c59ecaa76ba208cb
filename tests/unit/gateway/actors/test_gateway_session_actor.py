"""A session: what it admits, numbers, rebuilds and closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from forge.core.conversation.messages import Message
from forge.core.errors import ContextTooLong, Unavailable
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2
from services.gateway.actors.messages import (
    BeginCall,
    Closed,
    Describe,
    EndCall,
    Forget,
    Recall,
    Reread,
    StartClose,
)
from services.gateway.actors.session import SessionActor, SessionSettings
from services.gateway.actors.shard_writer import Append, Replace, Waiting
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.handles import Handle, deletion
from services.gateway.conversation.prompt import Prompt, SampledAnswer
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.errors import SessionClosed
from tests.support.gateway.session_settings import session_settings

CLAIMS = Claims(subject="t:0:0", scopes=frozenset({"session"}), trajectory_id="t:0:0")
TIMEOUT_S = 60.0


@dataclass
class World(ActorRef):
    """A session's surroundings: the pool, the writer and the clock."""

    kept: list[common_pb2.Turn] = field(default_factory=list)
    waiting: list[common_pb2.Turn] = field(default_factory=list)
    """The turns that are not acknowledged."""
    stored: common_pb2.Trajectory | None = None
    fetches: int = 0
    size_bytes: int = 0
    pool_unreachable: bool = False
    landing: bool = False
    """Whether what waits is stored and acknowledged while the pool is asked."""
    now_s: float = 100.0

    async def fetch(self, _: Claims) -> common_pb2.Trajectory | None:
        if self.pool_unreachable:
            raise Unavailable("the pool is unreachable")
        self.fetches += 1
        return self.stored

    async def count(self, _: Claims) -> int:
        if self.pool_unreachable:
            raise Unavailable("the pool is unreachable")
        if self.landing:
            self.store(*self.kept)
            self.waiting = []
        return len(self.stored.turns) if self.stored is not None else 0

    def store(self, *turns: common_pb2.Turn, state: Any = common_pb2.TRAJECTORY_STATE_OPEN) -> None:
        self.stored = common_pb2.Trajectory(trajectory_id="t:0:0", state=state, turns=turns)

    def tell(self, message: Any) -> None:
        """As the shard writer."""
        match message:
            case Append(turn=turn):
                self.kept.append(turn)
            case Replace(turns=turns):
                self.waiting = list(turns)

    async def ask(self, message: Any, *, timeout_s: float) -> Any:
        """As the shard writer."""
        assert message == Waiting(trajectory_id="t:0:0")
        return self.waiting

    def grown(self, trajectory_id: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def settings(self) -> SessionSettings:
        return session_settings(
            self,
            fetch=self.fetch,
            stored=self.count,
            set_size=self.grown,
            clock=lambda: self.now_s,
        )


@pytest.fixture
def world() -> World:
    return World()


Ask = Callable[[Any], Any]


@pytest_asyncio.fixture
async def session(world: World) -> AsyncIterator[ActorRef]:
    system = ActorSystem("test")
    yield await system.spawn(lambda: SessionActor(CLAIMS, world.settings()), name="session")
    await system.stop()


def user(text: str) -> Message:
    return Message(role="user", content=text)


YES = Message(role="assistant", content="Yes.")


def moment(at_s: float) -> Moment:
    return Moment(at_s=at_s, unix_s=at_s + 1e6)


def request_at(arrived_s: float, **fields: Any) -> TurnRequest:
    sampling = fields.pop("sampling", common_pb2.SamplingParams())
    return TurnRequest(sampling=sampling, arrived=moment(arrived_s), **fields)


async def begin(
    session: ActorRef,
    call_id: str,
    *texts: str | Message,
    abort: Callable[[], None] = lambda: None,
    arrived_s: float = 0.0,
) -> Prompt:
    messages = [user(one) if isinstance(one, str) else one for one in texts or ("One?",)]
    request = request_at(arrived_s, messages=messages)
    message = BeginCall(call_id=call_id, abort=abort, request=request, opening="")
    prompt: Prompt = await session.ask(message, timeout_s=TIMEOUT_S)
    return prompt


async def end(
    session: ActorRef,
    call_id: str,
    prompt: Prompt | None,
    *,
    started_s: float = 0.0,
    parse_error: str = "",
    sampled: bool = True,
    handle: Handle | None = None,
    **asked: Any,
) -> int:
    what = SampledAnswer(
        columns=common_pb2.SampledTokens(
            ids=int32_bytes([5, 6]),
            logprobs=float32_bytes([-0.5, -0.5]),
            weight_versions=int32_bytes([1, 1]),
        ),
        finish_reason=common_pb2.FINISH_REASON_STOP,
        answer=Message(role="assistant", content="Yes."),
        parse_error=parse_error,
    )
    message = EndCall(
        call_id=call_id,
        prompt=prompt,
        sampled=what if sampled else None,
        request=request_at(started_s, handle=handle, sampling=common_pb2.SamplingParams(**asked)),
    )
    turn_index: int = await session.ask(message, timeout_s=TIMEOUT_S)
    return turn_index


async def test_turns_are_numbered_as_they_end(session: ActorRef, world: World) -> None:
    """Overlapping calls leave no gap, and a call that fails leaves no turn."""
    first, second = await begin(session, "a"), await begin(session, "b")
    assert await end(session, "b", second) == 0
    assert await end(session, "a", first, sampled=False) == -1
    third = await begin(session, "c")
    assert await end(session, "c", third) == 1
    assert [turn.turn_index for turn in world.kept] == [0, 1]


async def test_turn_records_its_sampling_settings(session: ActorRef, world: World) -> None:
    """Also settings without effect: a turn without them is of an earlier version."""
    await end(session, "a", await begin(session, "a"), temperature=0.5, top_p=0.75, top_k=4)
    await end(session, "b", await begin(session, "b"))
    cut, whole = world.kept
    assert (cut.temperature, cut.top_p, cut.top_k) == (0.5, 0.75, 4)
    assert whole.HasField("top_p") and whole.HasField("top_k")
    assert (whole.temperature, whole.top_p, whole.top_k) == (1.0, 1.0, 0)


async def test_own_time_is_between_answer_and_request(session: ActorRef, world: World) -> None:
    """It counts from the last answer, and never below zero for calls that overlap."""
    await end(session, "a", await begin(session, "a", arrived_s=99.0), started_s=99.0)
    world.now_s = 110.0
    await end(session, "b", await begin(session, "b", arrived_s=103.5), started_s=103.5)
    await end(session, "c", await begin(session, "c", arrived_s=103.5), started_s=103.5)
    assert [turn.timings.agent_s for turn in world.kept] == [0.0, 3.5, 0.0]
    assert [turn.turns_before for turn in world.kept] == [0, 1, 2]
    assert [turn.ended_unix_s for turn in world.kept] == [1e6 + 100, 1e6 + 110, 1e6 + 110]


async def test_tool_time_beside_another_call_counts(session: ActorRef, world: World) -> None:
    """Until the request arrives, whichever call ends later."""
    await end(session, "a", await begin(session, "a", arrived_s=99.0), started_s=99.0)
    long = await begin(session, "long", arrived_s=101.0)
    short = await begin(session, "short", arrived_s=110.0)
    world.now_s = 115.0
    await end(session, "long", long, started_s=101.0)
    await end(session, "short", short, started_s=110.0)
    assert [turn.timings.agent_s for turn in world.kept] == [0.0, 1.0, 10.0]
    assert [turn.turns_before for turn in world.kept] == [0, 1, 1]


async def test_context_of_a_domain_may_be_shorter_than_the_models(world: World) -> None:
    """The limit in the token counts if it is lower, and the error names the domain."""
    for limit, says in (
        (16, "is 16 tokens.*domain code"),
        (999, "is 64 tokens, answer included\\. "),
    ):
        system = ActorSystem("test")
        claims = replace(CLAIMS, domain="code", context_tokens=limit)
        make = partial(SessionActor, claims, world.settings())
        session = await system.spawn(make, name="session")
        with pytest.raises(ContextTooLong, match=says):
            await begin(session, "a", "word " * 100)
        await system.stop()


async def test_prompt_beyond_the_context_takes_no_place(session: ActorRef) -> None:
    """The error names both numbers."""
    for call_id in ("a", "b", "c"):
        with pytest.raises(ContextTooLong, match="64 tokens"):
            await begin(session, call_id, "word " * 100)
    ids = int32_bytes(range(64))
    with pytest.raises(ContextTooLong, match="64 tokens > 63 maximum"):
        rendered = request_at(0.0, prompt_ids=ids)
        await session.ask(
            BeginCall(call_id="d", abort=lambda: None, request=rendered, opening=""),
            timeout_s=TIMEOUT_S,
        )


async def test_closing_aborts_calls_and_waits_for_their_turns(
    session: ActorRef, world: World
) -> None:
    """No call begins; running calls are aborted, and recorded before the close continues."""
    aborted: list[str] = []
    prompt = await begin(session, "a", abort=lambda: aborted.append("a"))
    close = StartClose(agent_ended=moment(world.now_s))
    drained: asyncio.Future[None] = await session.ask(close, timeout_s=TIMEOUT_S)
    assert (aborted, drained.done()) == (["a"], False)
    with pytest.raises(SessionClosed):
        await begin(session, "b")
    await end(session, "a", prompt)
    await asyncio.wait_for(drained, TIMEOUT_S)
    await session.ask(Closed(), timeout_s=TIMEOUT_S)
    facts = await session.ask(Describe(), timeout_s=TIMEOUT_S)
    assert (facts.turns, facts.closed) == (1, True)
    # What comes after the seal is too late for the record.
    assert await end(session, "late", prompt) == -1
    assert len(world.kept) == 1


async def test_session_is_rebuilt_before_its_first_message(world: World) -> None:
    """It continues after the last turn in the pool, malformed turns included."""
    system = ActorSystem("test")
    lost = await system.spawn(lambda: SessionActor(CLAIMS, world.settings()), name="lost")
    await end(lost, "a", await begin(lost, "a"), parse_error="broken")
    world.store(*world.kept)
    found = await system.spawn(lambda: SessionActor(CLAIMS, world.settings()), name="found")
    facts = await found.ask(Describe(), timeout_s=TIMEOUT_S)
    assert (facts.turns, facts.malformed, facts.closed) == (1, (0,), False)
    assert (await begin(found, "b")).draft.how == "repeated"
    await system.stop()


async def test_unreachable_pool_fails_one_message_of_a_session(
    session: ActorRef, world: World
) -> None:
    """The first call fails while the pool is unreachable; the next one succeeds."""
    world.pool_unreachable = True
    with pytest.raises(Unavailable):
        await begin(session, "a")
    world.pool_unreachable = False
    await begin(session, "a")


async def test_sealed_trajectory_refuses_calls(session: ActorRef, world: World) -> None:
    """A token may outlive its rollout; the session does not."""
    world.stored = common_pb2.Trajectory(state=common_pb2.TRAJECTORY_STATE_SEALED)
    with pytest.raises(SessionClosed):
        await begin(session, "a")


async def test_turn_with_a_number_of_another_gateway_is_renumbered(
    session: ActorRef, world: World
) -> None:
    """After it is read again, a session keeps its own turns behind the new ones."""
    theirs = World()
    system = ActorSystem("theirs")
    other = await system.spawn(lambda: SessionActor(CLAIMS, theirs.settings()), name="other")
    await end(other, "a", await begin(other, "a", "Theirs?"))
    await end(session, "a", await begin(session, "a", "Ours?"))
    await end(session, "b", await begin(session, "b", "Ours?", YES, "And?"))
    world.waiting = list(world.kept)
    world.store(*theirs.kept)
    await session.ask(Reread(), timeout_s=TIMEOUT_S)
    assert [(turn.turn_index, turn.parent_turn) for turn in world.waiting] == [(1, 0), (2, 1)]
    assert (await session.ask(Describe(), timeout_s=TIMEOUT_S)).turns == 3
    assert (await begin(session, "c", "Theirs?")).draft.how == "repeated"
    assert (await begin(session, "d", "Ours?", YES, "And?", YES, "So?")).draft.how == "continued"
    await system.stop()


async def test_unknown_answer_is_looked_up_in_the_pool(session: ActorRef, world: World) -> None:
    """An answer of another gateway keeps its ids; an invented one costs one read."""
    theirs = World()
    system = ActorSystem("theirs")
    other = await system.spawn(lambda: SessionActor(CLAIMS, theirs.settings()), name="other")
    await session.ask(Describe(), timeout_s=TIMEOUT_S)
    await begin(session, "a", "Mine?")
    await end(other, "a", await begin(other, "a"))
    world.store(*theirs.kept)
    assert (await begin(session, "b", "One?", YES, "Two?")).draft.how == "continued"
    assert world.fetches == 2
    await end(session, "a", None, sampled=False)
    invented = Message(role="assistant", content="Invented.")
    assert (await begin(session, "c", "One?", invented, "Two?")).draft.how == "branched"
    assert world.fetches == 2
    await system.stop()


async def test_own_turn_stored_during_a_look_up_is_not_read_again(
    session: ActorRef, world: World
) -> None:
    """A turn that becomes durable while unknown answers are looked up is no other gateway's."""
    await end(session, "a", await begin(session, "a"))
    world.waiting, world.landing = list(world.kept), True
    invented = Message(role="assistant", content="Invented.")
    assert (await begin(session, "b", "One?", invented, "Two?")).draft.how == "branched"
    assert world.fetches == 1


async def test_unknown_answers_are_accepted_without_the_pool(
    session: ActorRef, world: World
) -> None:
    """Another gateway might have sampled them; while the pool is unreachable, they are the
    agent's."""
    await end(session, "a", await begin(session, "a"))
    world.pool_unreachable = True
    invented = Message(role="assistant", content="Invented.")
    prompt = await begin(session, "b", "One?", invented, "Two?")
    assert prompt.draft.how == "branched"
    assert await end(session, "b", prompt) == 1


async def test_deleted_handle_stays_unknown(session: ActorRef, world: World) -> None:
    """In this session at once, and after a rebuild, although the turn keeps it; others stay."""
    for call_id, name in (("a", "resp_1"), ("b", "resp_2")):
        await end(
            session, call_id, await begin(session, call_id), handle=Handle(name=name, facts={})
        )
    world.store(*world.kept)
    await session.ask(Reread(), timeout_s=TIMEOUT_S)
    assert await session.ask(Recall(name="resp_1"), timeout_s=TIMEOUT_S) is not None
    await session.ask(Forget(name="resp_1"), timeout_s=TIMEOUT_S)
    assert await session.ask(Recall(name="resp_1"), timeout_s=TIMEOUT_S) is None
    assert world.stored is not None
    world.stored.rewards.append(deletion("resp_1"))
    await session.ask(Reread(), timeout_s=TIMEOUT_S)
    assert await session.ask(Recall(name="resp_1"), timeout_s=TIMEOUT_S) is None
    assert await session.ask(Recall(name="resp_2"), timeout_s=TIMEOUT_S) is not None


async def test_session_reports_its_memory(session: ActorRef, world: World) -> None:
    """The owner of the bound on all sessions learns the size of each."""
    await end(session, "a", await begin(session, "a"))
    first = world.size_bytes
    await end(session, "b", await begin(session, "b", "x" * 40))
    assert first > 0
    assert world.size_bytes > first + 40
