"""The session actor: one rollout's conversation with the model.

Owns the contexts of its trajectory, the numbering of its turns and its open or closed state.
Callers sample in parallel; the actor records their answers one at a time. It rebuilds itself from
the pool before its first message, so any gateway can continue the session, and again after another
gateway has recorded turns (`services.gateway.conversation.rebase`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from prometheus_client import Counter

from forge.core.enum_words import enum_name
from forge.core.errors import DeadlineExceeded, Unavailable
from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.concurrency.futures import settle
from forge.runtime.security.tokens import Claims
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from services.gateway.actors.messages import (
    BeginCall,
    BeginOther,
    Closed,
    Describe,
    DraftPrompt,
    EndCall,
    EndOther,
    Forget,
    IsBusy,
    Recall,
    Reread,
    SessionFacts,
    StartClose,
)
from services.gateway.actors.prompts import Prompts
from services.gateway.actors.shard_writer import Append, Replace, Waiting
from services.gateway.conversation.agent_time import AgentTime, Begun
from services.gateway.conversation.conversation import Conversation
from services.gateway.conversation.handles import Recalled, deleted_names
from services.gateway.conversation.other_turns import append_other
from services.gateway.conversation.prompt import Prompt, PromptDraft, given
from services.gateway.conversation.rebase import rebase
from services.gateway.conversation.turn_record import record_request
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.errors import SessionClosed
from services.gateway.metrics import (
    CONTEXTS,
    IMAGES,
    MALFORMED,
    NEW_TOKENS,
    OTHER_TOKENS,
    OTHER_TURNS,
    REBUILT,
    SAMPLED_TOKENS,
    SHARED_TOKENS,
    TURNS,
)
from services.gateway.model.chat_model import ChatModel
from services.gateway.model.encode_threads import EncodeThreads

WRITER_TIMEOUT_S = 10.0
"""Deadline of a request to the shard writer, which answers without I/O."""


@cache
def _contexts(how: str) -> Counter:
    return CONTEXTS.labels(how)


@cache
def _turns(finish_reason: common_pb2.FinishReason.ValueType) -> Counter:
    return TURNS.labels(enum_name(common_pb2.FinishReason, finish_reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call in flight."""

    abort: Callable[[], None]
    begun: Begun


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Settings and collaborators of all sessions of a gateway."""

    model: ChatModel
    fetch: Callable[[Claims], Awaitable[common_pb2.Trajectory | None]]
    """Fetches a stored trajectory; None without stored turns."""
    stored: Callable[[Claims], Awaitable[int]]
    """Counts the stored turns of a trajectory."""
    writer: ActorRef
    """The shard writer, which makes turns durable."""
    set_size: Callable[[str, int], None]
    """Receives the approximate memory of a trajectory, in bytes."""
    clock: Callable[[], float]
    """Monotonic seconds."""
    threads: EncodeThreads
    """Render and encode long requests."""


class SessionActor(Actor):
    """Records the turns of one trajectory."""

    # Every call in flight may send two messages; the end of a call must never be refused.
    mailbox_size: ClassVar[int] = 1 << 17

    def __init__(self, claims: Claims, settings: SessionSettings) -> None:
        self._claims = claims
        self._settings = settings
        self._prompts = Prompts(
            claims,
            settings.model,
            settings.threads,
            limit=claims.context_limit(settings.model.context_tokens),
        )
        self._conversation: Conversation | None = None
        self._calls: dict[str, _Call] = {}
        """Calls in flight, by call id."""
        self._closing = False
        self._sealed = False
        self._drained: asyncio.Future[None] | None = None
        self._agent_time = AgentTime()
        self._just_read = False
        """True if the pool was read since the last call began."""

    async def receive(self, message: Any) -> Any:
        """Handles one message, after a rebuild of the session if necessary."""
        if isinstance(message, IsBusy):
            return bool(self._calls)
        # Not in `started`: an unavailable pool must fail this message, not the session.
        if self._conversation is None:
            self._conversation = await self._rebuild()
        match message:
            case BeginCall() | BeginOther():
                self._admit()
                return await self._begin(self._conversation, message)
            case DraftPrompt():
                return await self._prompt(self._conversation, message)
            case EndCall() | EndOther():
                return self._end(self._conversation, message)
            case Recall():
                return await self._recall(self._conversation, message.name)
            case Forget():
                self._conversation.named_turns.pop(message.name, None)
                return None
            case Describe():
                return self._facts(self._conversation)
            case StartClose():
                return self._start_close(message)
            case Closed():
                self._sealed = True
                return None
            case Reread():
                self._conversation = await self._rebuild()
                return None
            case _:
                return await super().receive(message)

    async def _rebuild(self) -> Conversation:
        settings = self._settings
        # In this order: turns acknowledged in between are in both lists, and none is missing.
        waiting = await self._waiting()
        trajectory = await settings.fetch(self._claims)
        stored = trajectory.turns if trajectory is not None else ()
        conversation, unstored = rebase(settings.model, stored, waiting)
        self._agent_time.rebuilt(next(reversed([*stored, *unstored]), None))
        if waiting:
            trajectory_id = self._claims.trajectory_id
            settings.writer.tell(Replace(trajectory_id=trajectory_id, turns=unstored))
        if trajectory is not None:
            self._sealed = trajectory.state != common_pb2.TRAJECTORY_STATE_OPEN
            self._closing = self._closing or self._sealed
            for name in deleted_names(trajectory.rewards):
                conversation.named_turns.pop(name, None)
            REBUILT.inc()
        self._just_read = True
        settings.set_size(self._claims.trajectory_id, conversation.size_bytes)
        return conversation

    async def _waiting(self) -> list[common_pb2.Turn]:
        """Returns the turns that the pool has not acknowledged."""
        ask = Waiting(trajectory_id=self._claims.trajectory_id)
        turns: list[common_pb2.Turn] = await self._settings.writer.ask(
            ask, timeout_s=WRITER_TIMEOUT_S
        )
        return turns

    async def _prompt(self, conversation: Conversation, ask: BeginCall | DraftPrompt) -> Prompt:
        request = ask.request
        if request.prompt_ids:
            return await self._prompts.encode(given(request.prompt_ids))
        return await self._prompts.encode(await self._draft(conversation, request, ask.opening))

    async def _draft(
        self, conversation: Conversation, request: TurnRequest, opening: str
    ) -> PromptDraft:
        draft = await self._prompts.draft(conversation, request, opening)
        just_read, self._just_read = self._just_read, False
        if just_read or draft.place is None or not draft.place.unknown_answers:
            return draft
        # Another gateway may have sampled these answers; then the pool has their ids.
        try:
            if not await self._is_behind(conversation):
                return draft
            self._conversation = conversation = await self._rebuild()
        except (Unavailable, DeadlineExceeded) as error:
            log.info("session_rebuild_failed", error=str(error))
            return draft  # An unavailable pool does not stop calls.
        return await self._prompts.draft(conversation, request, opening)

    async def _recall(self, conversation: Conversation, name: str) -> Recalled | None:
        recalled = conversation.recall(name)
        # Another gateway may have given the name.
        if recalled is None and name and await self._is_behind(conversation):
            self._conversation = conversation = await self._rebuild()
            recalled = conversation.recall(name)
        return recalled

    async def _is_behind(self, conversation: Conversation) -> bool:
        """Returns True if the pool has turns that this session lacks."""
        # In this order: turns acknowledged in between must not count as turns of another gateway.
        stored = await self._settings.stored(self._claims)
        return stored > conversation.turns - len(await self._waiting())

    def _admit(self) -> None:
        if self._closing:
            raise SessionClosed(f"session {self._claims.trajectory_id} is closed")

    async def _begin(
        self, conversation: Conversation, call: BeginCall | BeginOther
    ) -> Prompt | None:
        prompt = None
        if isinstance(call, BeginCall):
            prompt = await self._prompt(conversation, call)
            self._prompts.require_room(prompt.tokens)
            _contexts(prompt.draft.how).inc()
        assert self._conversation is not None, "rebuilt before the first message"
        # The prompt may have rebuilt it.
        begun = self._agent_time.began(call.arrived, turns=self._conversation.turns)
        self._calls[call.call_id] = _Call(abort=call.abort, begun=begun)
        return prompt

    def _end(self, conversation: Conversation, call: EndCall | EndOther) -> int:
        # A call from before a crash of this actor is not in `_calls`, but its turn is recorded.
        open_call = self._calls.pop(call.call_id, None)
        begun = open_call.begun if open_call is not None else None
        turn = None
        if not self._sealed:
            if isinstance(call, EndOther):
                turn = _record_other(conversation, call)
            else:
                turn = _record(conversation, call)
        if turn is not None:
            turn.trajectory_id = self._claims.trajectory_id
            now_s = self._settings.clock()
            self._agent_time.record(turn, begun, arrived=call.arrived, now_s=now_s)
            self._settings.writer.tell(Append(turn=turn))
            self._settings.set_size(turn.trajectory_id, conversation.size_bytes)
        elif begun is not None:
            self._agent_time.failed(begun, turns=conversation.turns)
        if not self._calls:
            settle(self._drained, None)
        return turn.turn_index if turn is not None else -1

    def _start_close(self, close: StartClose) -> asyncio.Future[None]:
        self._closing = True
        self._agent_time.close(close.agent_ended)
        if self._drained is None or self._drained.done():
            self._drained = asyncio.get_running_loop().create_future()
        for call in tuple(self._calls.values()):
            call.abort()
        if not self._calls:
            self._drained.set_result(None)
        return self._drained

    def _facts(self, conversation: Conversation) -> SessionFacts:
        return SessionFacts(
            turns=conversation.turns,
            closed=self._sealed,
            malformed=tuple(conversation.parse_errors),
            closing_agent_s=self._agent_time.closing_s,
        )


def _record(conversation: Conversation, call: EndCall) -> common_pb2.Turn | None:
    """Records an answer of the policy; None for a call without one."""
    request, prompt, sampled = call.request, call.prompt, call.sampled
    if prompt is None or sampled is None:
        return None
    aborted = sampled.finish_reason == common_pb2.FINISH_REASON_ABORTED
    turn = conversation.record(prompt, sampled, None if aborted else request.handle)
    record_request(turn, request, prompt)
    _turns(sampled.finish_reason).inc()
    SAMPLED_TOKENS.inc(sampled.tokens)
    SHARED_TOKENS.inc(turn.prefix_tokens)
    NEW_TOKENS.inc(prompt.tokens - turn.prefix_tokens)
    if turn.parse_error:
        MALFORMED.inc()
    if prompt.new_images:
        IMAGES.labels("placeholder").inc(prompt.new_images)
    return turn


def _record_other(conversation: Conversation, call: EndOther) -> common_pb2.Turn | None:
    """Records an answer of another model; None for a call without one."""
    turn = call.turn
    if turn is not None:
        append_other(conversation, turn)
        OTHER_TURNS.labels(turn.other_model.name).inc()
        OTHER_TOKENS.labels(turn.other_model.name).inc(turn.other_model.sampled_tokens)
    return turn
