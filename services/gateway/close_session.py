"""Closes a session: makes every turn durable, then seals the trajectory with its rewards.

Owns the order of these steps. Each step is idempotent, so a failed close can be repeated.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from functools import partial

from forge.core.errors import FailedPrecondition, InvalidArgument, Unavailable
from forge.runtime.security.tokens import Claims
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from services.gateway.actors.messages import Closed, Describe, Reread, SessionFacts, StartClose
from services.gateway.conversation.agent_time import Moment
from services.gateway.pool_client import Pool
from services.gateway.reward_rules import admitted_reason, admitted_rewards, check_agent_end
from services.gateway.sessions import Session, Sessions

ASK_TIMEOUT_S = 60.0
CATCH_UP_S = 3.0
"""Time for which a close waits for answered turns that are not on record."""
CATCH_UP_PAUSE_S = 0.2
MALFORMED_REWARD = -1.0


async def facts_of(session: Session) -> SessionFacts:
    """Returns the state of a session."""
    facts: SessionFacts = await session.actor.ask(Describe(), timeout_s=ASK_TIMEOUT_S)
    return facts


async def close_session(
    sessions: Sessions,
    pool: Pool,
    session: Session,
    claims: Claims,
    *,
    rewards: Sequence[common_pb2.RewardEvent],
    abandon_reason: str,
    min_turns: int,
    after_agent_s: float,
) -> common_pb2.TrajectorySummary:
    """Seals or abandons the trajectory of a session; a sealed trajectory stays unchanged.

    `claims` are the caller's. The agent ended `after_agent_s` seconds ago. Calls in flight are
    aborted. Raises `PermissionDenied` for rewards that are not the caller's to write,
    `AlreadyExists` for a second outcome, `FailedPrecondition` when fewer than `min_turns` turns are
    on record, or when the pool refused one of them.
    """
    rewards = admitted_rewards(claims, rewards)
    check_agent_end(claims, after_agent_s)
    abandon_reason = admitted_reason(claims, abandon_reason)
    await _end_calls(session, _agent_end(after_agent_s))
    facts = await _make_durable(sessions, session, abandon_reason=abandon_reason)
    if not abandon_reason:
        facts = await _catch_up(session, facts, min_turns)
    seal = partial(_seal, pool, session.claims, rewards, abandon_reason)
    try:
        summary = await seal(facts)
    except FailedPrecondition:
        # Another gateway may have recorded turns that this one has not seen.
        await session.actor.ask(Reread(), timeout_s=ASK_TIMEOUT_S)
        summary = await seal(await facts_of(session))
    await session.actor.ask(Closed(), timeout_s=ASK_TIMEOUT_S)
    log.info(
        "session_closed",
        trajectory_id=session.claims.trajectory_id,
        turns=summary.turns,
        sampled_tokens=summary.sampled_tokens,
        abandon_reason=abandon_reason,
    )
    return summary


async def _make_durable(
    sessions: Sessions, session: Session, *, abandon_reason: str
) -> SessionFacts:
    """Waits until all turns are durable; returns the state of the session."""
    try:
        await sessions.flush_turns(session)
    except FailedPrecondition:
        # A refused turn must not prevent an abandon, nor the repeated close of a closed session.
        if not abandon_reason and not (await facts_of(session)).closed:
            raise
    return await facts_of(session)


async def _catch_up(session: Session, facts: SessionFacts, min_turns: int) -> SessionFacts:
    """Waits for turns that another gateway may have answered and not yet made durable. Raises
    `FailedPrecondition` if they stay missing."""
    give_up_s = time.monotonic() + CATCH_UP_S
    while facts.turns < min_turns:
        if time.monotonic() >= give_up_s:
            raise FailedPrecondition(
                f"{min_turns} turns were answered but {facts.turns} are on record: a gateway died "
                "with the others; abandon the trajectory"
            )
        await asyncio.sleep(CATCH_UP_PAUSE_S)
        await session.actor.ask(Reread(), timeout_s=ASK_TIMEOUT_S)
        facts = await facts_of(session)
    return facts


async def _seal(
    pool: Pool,
    claims: Claims,
    rewards: Sequence[common_pb2.RewardEvent],
    abandon_reason: str,
    facts: SessionFacts,
) -> common_pb2.TrajectorySummary:
    return await pool.seal(
        claims,
        turns=facts.turns,
        rewards=[*rewards, *(_malformed(turn) for turn in facts.malformed)],
        abandon_reason=abandon_reason,
        closing_agent_s=facts.closing_agent_s,
    )


def _agent_end(after_agent_s: float) -> Moment:
    if not (math.isfinite(after_agent_s) and after_agent_s >= 0):
        raise InvalidArgument(f"after_agent_s is {after_agent_s}; must be finite and >= 0")
    return Moment(at_s=time.monotonic() - after_agent_s, unix_s=time.time() - after_agent_s)


async def _end_calls(session: Session, agent_ended: Moment) -> None:
    close = StartClose(agent_ended=agent_ended)
    drained: asyncio.Future[None] = await session.actor.ask(close, timeout_s=ASK_TIMEOUT_S)
    try:
        await asyncio.wait_for(asyncio.shield(drained), ASK_TIMEOUT_S)
    except TimeoutError:
        raise Unavailable(
            f"calls of session {session.claims.trajectory_id} did not end within "
            f"{ASK_TIMEOUT_S:g} s"
        ) from None


def _malformed(turn: int) -> common_pb2.RewardEvent:
    return common_pb2.RewardEvent(
        event_id=f"parse-{turn}",
        name="malformed_tool_call",
        kind=common_pb2.REWARD_KIND_PROCESS,
        value=MALFORMED_REWARD,
        turn_index=turn,
    )
