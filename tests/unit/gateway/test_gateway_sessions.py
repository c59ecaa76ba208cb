"""Sessions in memory: made once, dropped under pressure, never while they are needed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
import pytest_asyncio

from forge.core.conversation.messages import Message
from forge.core.errors import FailedPrecondition, ResourceExhausted, Unavailable
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2, pool_pb2
from services.gateway import sessions as gateway_sessions
from services.gateway.actors.messages import BeginCall, Describe, EndCall
from services.gateway.actors.session import SessionSettings
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.prompt import SampledAnswer
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.sessions import Session, SessionLimits, Sessions
from tests.support.gateway.chat_templates import make_model
from tests.support.gateway.limits import admission_of
from tests.support.gateway.session_settings import session_settings
from tests.support.runtime.waiting import settle, until

TIMEOUT_S = 60.0


def claims(number: int) -> Claims:
    name = f"t{number}:0:0"
    return Claims(subject=name, scopes=frozenset({"session"}), trajectory_id=name, pool_shard="s0")


@dataclass
class Shard:
    """A pool shard: keeps turns, and acknowledges them while it is open."""

    turns: dict[str, list[common_pb2.Turn]] = field(default_factory=dict)
    answers: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    fetched: list[str] = field(default_factory=list)
    refuses: str = ""
    """The trajectory whose turns it takes for damaged; it takes others once it is open twice."""
    again: asyncio.Event = field(default_factory=asyncio.Event)
    bugs: list[Exception] = field(default_factory=list)
    """What reading meets next."""

    async def stream(self) -> Shard:
        return self

    async def write(self, request: pool_pb2.AppendTurnsRequest) -> None:
        await self.open.wait()
        for each in request.turns:
            turn = common_pb2.Turn.FromString(each.turn)
            answer = pool_pb2.AppendTurnsResponse(sequence=each.sequence)
            if turn.turn_index < len(self.turns.get(turn.trajectory_id, ())):
                answer.status_code = grpc.StatusCode.ABORTED.value[0]
            elif turn.trajectory_id == self.refuses:
                answer.status_code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
            else:
                if self.refuses:
                    await self.again.wait()
                self.turns.setdefault(turn.trajectory_id, []).append(turn)
            self.answers.put_nowait(answer)

    async def read(self) -> Any:
        return await self.answers.get()

    def cancel(self) -> bool:
        return True

    async def fetch(self, claims: Claims) -> common_pb2.Trajectory | None:
        self.fetched.append(claims.trajectory_id)
        if self.bugs:
            raise self.bugs.pop()
        turns = self.turns.get(claims.trajectory_id)
        if turns is None:
            return None
        return common_pb2.Trajectory(state=common_pb2.TRAJECTORY_STATE_OPEN, turns=turns)

    async def stored(self, claims: Claims) -> int:
        return len(self.turns.get(claims.trajectory_id, ()))


@pytest_asyncio.fixture
async def shard() -> Shard:
    made = Shard()
    made.open.set()
    return made


Make = Callable[..., Sessions]


@pytest_asyncio.fixture
async def make(shard: Shard) -> AsyncIterator[Make]:
    """Sessions within limits, in front of the shard."""
    system = ActorSystem("test")

    def settings(writer: ActorRef, grown: Callable[[str, int], None]) -> SessionSettings:
        return session_settings(
            writer,
            fetch=shard.fetch,
            stored=shard.stored,
            set_size=grown,
            model=make_model("chatml"),
        )

    def made(*, sessions: int = 100, session_bytes: int = 1 << 30) -> Sessions:
        limits = SessionLimits(
            sessions=sessions,
            session_bytes=session_bytes,
            idle_s=600.0,
            backlog_bytes=1 << 20,
        )
        return Sessions(
            system,
            limits=limits,
            admission=admission_of(),
            settings=settings,
            open_stream=lambda _: shard.stream,
            clock=lambda: 0.0,
        )

    yield made
    await system.stop()


REQUEST = TurnRequest(
    messages=[Message(role="user", content="One?")],
    sampling=common_pb2.SamplingParams(),
    arrived=Moment(at_s=0.0, unix_s=0.0),
)


async def begin(session: Session) -> Any:
    chat = BeginCall(call_id="a", abort=lambda: None, request=REQUEST, opening="")
    return await session.actor.ask(chat, timeout_s=TIMEOUT_S)


def ending(prompt: Any) -> EndCall:
    return EndCall(
        call_id="a",
        request=REQUEST,
        prompt=prompt,
        sampled=SampledAnswer(
            columns=common_pb2.SampledTokens(
                ids=int32_bytes([5]),
                logprobs=float32_bytes([-0.5]),
                weight_versions=int32_bytes([1]),
            ),
            finish_reason=common_pb2.FINISH_REASON_STOP,
            answer=Message(role="assistant", content="x" * 4000),
        ),
    )


async def one_turn(sessions: Sessions, number: int) -> None:
    async with sessions.use_session(claims(number)) as session:
        await session.actor.ask(ending(await begin(session)), timeout_s=TIMEOUT_S)
        await sessions.flush_turns(session)


async def turns_of(sessions: Sessions, number: int) -> int:
    async with sessions.use_session(claims(number)) as session:
        return int((await session.actor.ask(Describe(), timeout_s=TIMEOUT_S)).turns)


async def test_memory_pressure_evicts_the_least_recently_used_session(
    make: Make, shard: Shard
) -> None:
    """Beyond the memory bound sessions leave, oldest first, and are rebuilt from the pool."""
    sessions = make(session_bytes=60_000)
    for number in range(8):
        await one_turn(sessions, number)
    while sessions._tasks:
        await asyncio.gather(*sessions._tasks)
    shard.fetched.clear()
    assert await turns_of(sessions, 7) == 1
    assert shard.fetched == []
    assert await turns_of(sessions, 0) == 1
    assert shard.fetched == ["t0:0:0"]


async def test_session_in_use_is_never_evicted(make: Make) -> None:
    """If sessions in use take all memory a new one is refused, until one of them ends."""
    sessions = make(sessions=2)
    async with sessions.use_session(claims(0)):
        async with sessions.use_session(claims(1)):
            with pytest.raises(ResourceExhausted):
                await one_turn(sessions, 2)
        await one_turn(sessions, 2)


async def test_session_with_undurable_turns_stays_in_memory(make: Make, shard: Shard) -> None:
    """Also if it is unused."""
    sessions = make(sessions=1)
    shard.open.clear()
    async with sessions.use_session(claims(0)) as session:
        # Told, as at the end of an aborted call: nobody waits for it to be recorded.
        session.actor.tell(ending(await begin(session)))
    with pytest.raises(ResourceExhausted):
        await turns_of(sessions, 1)
    shard.open.set()
    async with sessions.use_session(claims(0)) as session:
        await sessions.flush_turns(session)
    assert await turns_of(sessions, 1) == 0
    assert await turns_of(sessions, 0) == 1


async def test_drain_stores_turns_of_aborted_calls(make: Make, shard: Shard) -> None:
    """The turn of the last aborted call is durable, although no call waited for its record."""
    sessions = make()
    async with sessions.use_session(claims(0)) as session:
        with sessions.count_call(session):
            prompt = await begin(session)
            draining = asyncio.create_task(sessions.drain())
            await asyncio.sleep(0)
            session.actor.tell(ending(prompt))
    await draining
    assert [len(turns) for turns in shard.turns.values()] == [1]


async def test_drain_stores_turns_of_a_dead_session(make: Make, shard: Shard) -> None:
    """Its actor is not restarted; the writer has its turns."""
    sessions = make()
    shard.open.clear()
    async with sessions.use_session(claims(0)) as session:
        await session.actor.ask(ending(await begin(session)), timeout_s=TIMEOUT_S)
    await session.actor.stop()
    draining = asyncio.create_task(sessions.drain())
    await settle()
    shard.open.set()
    await draining
    assert [len(turns) for turns in shard.turns.values()] == [1]


async def test_drain_stores_every_turn_that_the_pool_accepts(make: Make, shard: Shard) -> None:
    """A session with a refused turn blocks no other."""
    sessions = make()
    shard.refuses = "t0:0:0"
    shard.open.clear()
    for number in range(3):
        async with sessions.use_session(claims(number)) as session:
            await session.actor.ask(ending(await begin(session)), timeout_s=TIMEOUT_S)
    draining = asyncio.create_task(sessions.drain())
    shard.open.set()
    await until(lambda: session.backlog.refused)
    await settle()
    shard.again.set()
    with pytest.raises(FailedPrecondition, match="refused turn 0"):
        await draining
    assert sorted(shard.turns) == ["t1:0:0", "t2:0:0"]


async def test_failed_rebuild_is_repeated(
    make: Make, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn whose number is used gets a new one once the session is read again: until then no turn
    of its trajectory could become durable."""
    monkeypatch.setattr(gateway_sessions, "REREAD_RETRY_S", 0.0)
    sessions = make()
    async with sessions.use_session(claims(0)) as session:
        prompt = await begin(session)
        taken = common_pb2.Turn(trajectory_id="t0:0:0", parent_turn=-1, prompt_ids=int32_bytes([9]))
        shard.turns["t0:0:0"] = [taken]
        shard.bugs = [KeyError("a bug"), Unavailable("away")]
        await session.actor.ask(ending(prompt), timeout_s=TIMEOUT_S)
        await sessions.flush_turns(session)
    assert [turn.turn_index for turn in shard.turns["t0:0:0"]] == [0, 1]


async def test_session_with_a_refused_turn_cannot_be_sealed(make: Make, shard: Shard) -> None:
    """Nor after its eviction: the pool would seal the trajectory without the turn."""
    sessions = make(sessions=1)
    shard.refuses = "t0:0:0"
    async with sessions.use_session(claims(0)) as session:
        await session.actor.ask(ending(await begin(session)), timeout_s=TIMEOUT_S)
        with pytest.raises(FailedPrecondition):
            await sessions.flush_turns(session)
    assert await turns_of(sessions, 1) == 0
    async with sessions.use_session(claims(0)) as again:
        assert again is not session
        with pytest.raises(FailedPrecondition, match="refused turn 0"):
            await sessions.flush_turns(again)
