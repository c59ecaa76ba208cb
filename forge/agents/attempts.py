"""One attempt at a leased rollout, from start to end.

Owns its steps: find the agent and a gateway, run, score, close the session. A failed rollout raises
no error: the result has the reason, and the trajectory is abandoned, so no incomplete one is
trained.
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forge.agents.environments.base import Domain, Episode, Transcript
from forge.agents.gateways import Gateways
from forge.agents.rewards import RewardTask
from forge.agents.rollout import Gateway, Rollout, RolloutResult, Scaffold
from forge.agents.sandbox.own_time import OutOfTime, within
from forge.agents.scaffolds import Scaffolds
from forge.agents.scoring.reward_pool import RewardPool
from forge.agents.scoring.scoring import score
from forge.client.sessions.session import AgentSession
from forge.core.enum_words import enum_name
from forge.core.errors import (
    ConfigError,
    ForgeError,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from forge.core.extras import place_of
from forge.core.queue.dispatch.failures import FailureKind, abandon_reason, kind_of_error
from forge.runtime.telemetry import log
from forge.runtime.tracing import as_current, span_of_rollout
from forge.v1 import scheduler_pb2 as pb

DESCRIBE_S = 10.0
"""Deadline for the state of a session."""
ABANDON_S = 3.0
"""Deadline to abandon a trajectory; the scheduler handles one that stays open."""
SEAL_S = 60.0
"""Deadline of one attempt to seal, which waits until every turn is on disk."""
ERROR_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Defaults and bounds of every rollout."""

    rollout_s: float
    """Limit on the agent's own time (`forge.agents.sandbox.own_time`): waits for the model, the
    score or a busy host do not count."""
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    scaffold: Scaffold
    domain: Domain
    payload: Mapping[str, Any]


_KINDS = {
    FailureKind.TASK: pb.FAILURE_KIND_TASK,
    FailureKind.INFRASTRUCTURE: pb.FAILURE_KIND_INFRASTRUCTURE,
}


class _Permanent(Exception):
    """A failure that every attempt would have."""


class _NoTurn(Exception):
    """The agent ended without an answered model call."""


@dataclass(eq=False, slots=True, kw_only=True)
class Attempts:
    """Runs leased rollouts concurrently."""

    gateways: Gateways
    scaffolds: Scaffolds
    domain: Callable[[str], Domain]
    rewards: RewardPool
    limits: RolloutLimits

    async def run(self, lease: pb.RolloutLease) -> RolloutResult:
        """Attempts the rollout; a result without an error means that it is sealed.

        A cancelled call first abandons the trajectory.
        """
        facts = {"forge.task_id": lease.task.task_id, "forge.domain": lease.task.domain}
        with as_current(span_of_rollout("rollout", lease.trajectory_id, facts)) as span:
            result = await self._run(lease)
            if result.error:
                span.set({"error.type": enum_name(pb.FailureKind, result.kind)})
            return result

    async def _run(self, lease: pb.RolloutLease) -> RolloutResult:
        result = RolloutResult(lease_id=lease.lease_id, trajectory_id=lease.trajectory_id)
        gateway: Gateway | None = None
        try:
            plan = await self._plan(lease)
            gateway = await self.gateways.acquire(lease.trajectory_id)
            await self._attempt(lease, plan, gateway)
        except asyncio.CancelledError:
            if gateway:
                reason = abandon_reason(FailureKind.INFRASTRUCTURE, "the rollout was stopped")
                await self._abandon(lease, gateway, reason)
            raise
        # Agents, tools and reward functions are user code: any error of theirs ends this rollout
        # only.
        except Exception as error:
            _failed(result, error)
            kind = kind_of_error(error)
            if gateway:
                if isinstance(error, Unavailable):
                    self.gateways.avoid(gateway)
                if kind is FailureKind.TASK and not isinstance(error, _Permanent | OutOfTime):
                    kind = await self._kind_by_gateway(lease, gateway, result)
                await self._abandon(lease, gateway, abandon_reason(kind, result.error))
            result.kind = _KINDS[kind]
        finally:
            if gateway:
                self.gateways.release(gateway)
        return result

    async def _plan(self, lease: pb.RolloutLease) -> _Plan:
        """Raises `_Permanent` if no runner with these settings can run this lease."""
        try:
            return _Plan(
                scaffold=await self.scaffolds.get(lease.task.scaffold),
                domain=self.domain(lease.task.domain),
                payload=_payload(lease.task.payload_json),
            )
        except (NotFound, ConfigError, InvalidArgument) as error:
            raise _Permanent(str(error)) from error

    async def _attempt(self, lease: pb.RolloutLease, plan: _Plan, gateway: Gateway) -> None:
        rollout = self._rollout(lease, plan, gateway)
        session = AgentSession(
            gateway.channel, _grader_token(lease), timeout_s=SEAL_S, stub=gateway.stub
        )
        transcript, events, ended_s = await self._sample(plan, rollout)
        await session.close(
            *events, min_turns=transcript.turns, after_agent_s=time.monotonic() - ended_s
        )

    async def _sample(self, plan: _Plan, rollout: Rollout) -> tuple[Transcript, list[Any], float]:
        """Runs and scores the agent; returns also its end, on the monotonic clock."""
        task = RewardTask(task_id=rollout.task_id, domain=rollout.domain, payload=plan.payload)
        try:
            episode = plan.domain.episode(plan.payload)
        except InvalidArgument as error:
            raise _Permanent(str(error)) from error
        try:
            transcript = await self._run_scaffold(plan, rollout, episode)
            ended_s = time.monotonic()
            events = await score(self.rewards, plan.domain, episode, transcript, task)
            return transcript, events, ended_s
        finally:
            await episode.close()

    async def _run_scaffold(self, plan: _Plan, rollout: Rollout, episode: Episode) -> Transcript:
        session = _described(rollout.gateway, rollout.session_token)

        async def waited_s() -> float:
            return (await session.open()).model_s

        try:
            transcript = await within(
                self.limits.rollout_s, plan.scaffold.run(rollout, episode), waited_s=waited_s
            )
        except OutOfTime:
            raise OutOfTime(
                f"no end within {self.limits.rollout_s:g} s of the agent's own time"
            ) from None
        except InvalidArgument as error:
            raise _Permanent(str(error)) from error
        if transcript.turns == 0:
            raise _NoTurn("the agent ended without a model call that was answered")
        return transcript

    async def _kind_by_gateway(
        self, lease: pb.RolloutLease, gateway: Gateway, result: RolloutResult
    ) -> FailureKind:
        """Returns the cause of an agent's failure: the infrastructure, if its gateway is
        unreachable or its last model call got no answer."""
        try:
            info = await _described(gateway, lease.session_token).open()
        except ForgeError as error:
            cause = f"its gateway is unreachable: {error}"
        else:
            if not info.unanswered:
                return FailureKind.TASK
            cause = f"its last model call got no answer: {info.unanswered}"
        result.error = f"{result.error}; {cause}"[:ERROR_CHARS]
        return FailureKind.INFRASTRUCTURE

    def _rollout(self, lease: pb.RolloutLease, plan: _Plan, gateway: Gateway) -> Rollout:
        payload = plan.payload
        return Rollout(
            trajectory_id=lease.trajectory_id,
            task_id=lease.task.task_id,
            domain=lease.task.domain,
            payload=payload,
            gateway=gateway,
            session_token=lease.session_token,
            max_turns=_number(payload, "max_turns", plan.domain.max_turns),
            max_tokens=_number(payload, "max_tokens", self.limits.max_tokens),
            temperature=payload.get("temperature"),
        )

    async def _abandon(self, lease: pb.RolloutLease, gateway: Gateway, reason: str) -> None:
        """Marks the trajectory as never to be trained, if the gateway can be reached."""
        session = AgentSession(
            gateway.channel,
            _grader_token(lease),
            timeout_s=ABANDON_S,
            retry_for_s=0.0,
            stub=gateway.stub,
        )
        try:
            await session.close(abandon_reason=reason)
        except ForgeError as error:
            log.info("abandon_failed", trajectory_id=lease.trajectory_id, error=str(error))


def _grader_token(lease: pb.RolloutLease) -> str:
    """Returns the token for rewards, which agents never get; that of the session from a scheduler
    of an earlier version."""
    return lease.grader_token or lease.session_token


def _described(gateway: Gateway, token: str) -> AgentSession:
    """Returns a client that requests the state of a session once, without retries."""
    return AgentSession(
        gateway.channel, token, timeout_s=DESCRIBE_S, retry_for_s=0.0, stub=gateway.stub
    )


def _payload(text: str) -> dict[str, Any]:
    try:
        payload = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"payload_json is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise InvalidArgument(f"payload_json must be an object, is {payload!r:.80}")
    return payload


def _number(payload: Mapping[str, Any], key: str, default: int) -> int:
    value = payload.get(key, default)
    if not isinstance(value, int) or value < 1:
        raise _Permanent(f"payload {key!r} must be a whole number above 0, is {value!r}")
    return value


def _failed(result: RolloutResult, error: Exception) -> None:
    """Stores the failure in the result; errors of user code include their type and place."""
    text = str(error)
    if not isinstance(error, ForgeError | _Permanent | _NoTurn | OutOfTime):
        place = place_of(error) if _is_foreign(error) else ""
        text = f"{type(error).__name__}: {text}"[: ERROR_CHARS - len(place)] + place
    result.error = text[:ERROR_CHARS] or type(error).__name__
    result.permanent = isinstance(error, _Permanent)


def _is_foreign(error: Exception) -> bool:
    """Whether the error was raised outside of this package: by an agent, a domain or a library. The
    place of the error of a failed program is no news."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return not frame.f_globals.get("__name__", "").startswith("forge.agents.")
