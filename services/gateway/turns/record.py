"""Prompts and records of turns: those of the policy in the session's contexts, others beside them.

The session actor owns the contexts of the policy. A call of another model has no context there: its
prompt is rendered from its messages alone, and its record has no tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from forge.core.errors import DeadlineExceeded
from services.gateway.actors.messages import BeginCall, BeginOther, DraftPrompt, EndCall, EndOther
from services.gateway.actors.prompts import Prompts
from services.gateway.conversation.conversation import Conversation
from services.gateway.conversation.other_turns import answered_turn
from services.gateway.conversation.prefix_match import NamedPrefix
from services.gateway.conversation.prompt import Prompt, SampledAnswer, given
from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.model.encode_threads import EncodeThreads
from services.gateway.model.other_model import OtherModel
from services.gateway.sessions import Session

ASK_TIMEOUT_S = 60.0
"""Deadline of a request to a session actor, with a possible rebuild from the pool."""
RECORD_TIMEOUT_S = 86_400.0
"""Longest time until a session has recorded the end of a call."""


async def record_end(session: Session, end: EndCall | EndOther) -> int:
    """Ends a call; returns its turn index. Raises `DeadlineExceeded` if the session is busy for
    long: it records the turn afterwards, as it does if the agent leaves meanwhile."""
    # With a deadline of its own the message would be skipped.
    ending = asyncio.ensure_future(session.actor.ask(end, timeout_s=RECORD_TIMEOUT_S))
    ending.add_done_callback(_observed)
    # Not cancelled with this task.
    await asyncio.wait({ending}, timeout=ASK_TIMEOUT_S)
    if not ending.done():
        raise DeadlineExceeded(
            f"session {session.claims.trajectory_id} did not record the turn within "
            f"{ASK_TIMEOUT_S:g} s"
        )
    turn_index: int = ending.result()
    return turn_index


def _observed(ending: asyncio.Future[int]) -> None:
    if not ending.cancelled():
        ending.exception()


class TurnRecord:
    """Record of the turns of the policy; of another model by a subclass."""

    async def begin(
        self,
        session: Session,
        request: TurnRequest,
        *,
        opening: str,
        call_id: str,
        abort: Callable[[], None],
    ) -> Prompt:
        """Begins a call in the session's contexts; returns its prompt. Raises `ContextTooLong`,
        `SessionClosed`."""
        begin = BeginCall(call_id=call_id, abort=abort, request=request, opening=opening)
        prompt: Prompt = await session.actor.ask(begin, timeout_s=ASK_TIMEOUT_S)
        return prompt

    async def draft(self, session: Session, request: TurnRequest, *, opening: str) -> Prompt:
        """Returns the prompt of a request in the session's contexts; no call begins."""
        ask = DraftPrompt(request=request, opening=opening)
        prompt: Prompt = await session.actor.ask(ask, timeout_s=ASK_TIMEOUT_S)
        return prompt

    def end(
        self,
        request: TurnRequest,
        *,
        call_id: str,
        prompt: Prompt | None,
        sampled: SampledAnswer | None,
    ) -> EndCall | EndOther:
        """Returns the message that ends a call."""
        return EndCall(call_id=call_id, request=request, prompt=prompt, sampled=sampled)


class OtherRecord(TurnRecord):
    """Record of the turns of another model."""

    def __init__(self, other: OtherModel, threads: EncodeThreads) -> None:
        self._other = other
        self._threads = threads

    async def begin(
        self,
        session: Session,
        request: TurnRequest,
        *,
        opening: str,
        call_id: str,
        abort: Callable[[], None],
    ) -> Prompt:
        """Begins a call with a context of its own; returns its prompt."""
        prompt = await self.draft(session, request, opening=opening)
        self._prompts(session).require_room(prompt.tokens)
        begin = BeginOther(call_id=call_id, abort=abort, arrived=request.arrived)
        await session.actor.ask(begin, timeout_s=ASK_TIMEOUT_S)
        return prompt

    async def draft(self, session: Session, request: TurnRequest, *, opening: str) -> Prompt:
        """Returns the prompt of a request with a context of its own."""
        prompts = self._prompts(session)
        if request.prompt_ids:
            return await prompts.encode(given(request.prompt_ids))
        if isinstance(request.messages, NamedPrefix):
            # Its place is one in the policy's contexts.
            request = replace(request, messages=request.messages[:])
        empty = Conversation(model=self._other.model)
        return await prompts.encode(await prompts.draft(empty, request, opening))

    def end(
        self,
        request: TurnRequest,
        *,
        call_id: str,
        prompt: Prompt | None,
        sampled: SampledAnswer | None,
    ) -> EndOther:
        """Returns the message that ends a call of another model."""
        turn = None
        if prompt is not None and sampled is not None:
            turn = answered_turn(self._other, request, prompt, sampled)
        return EndOther(call_id=call_id, arrived=request.arrived, turn=turn)

    def _prompts(self, session: Session) -> Prompts:
        model = self._other.model
        return Prompts(session.claims, model, self._threads, limit=model.context_tokens)
