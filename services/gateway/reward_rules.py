"""Rewards that a token may write to its trajectory: the grader's, or the agent's own.

Owns these rules. The pool refuses a second outcome.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.core.credit.rewards import check_name, check_value
from forge.core.enum_words import enum_word
from forge.core.errors import InvalidArgument, PermissionDenied
from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2

OWN_PREFIX = "agent:"
"""Begins the event ids of agents, so that an agent occupies no id of the grader, and the reasons of
their abandons, which are then no faults of the infrastructure."""
MAX_OWN_REWARD = 1.0
_OWN_KINDS = (common_pb2.REWARD_KIND_PROCESS, common_pb2.REWARD_KIND_AGENT)


def admitted_rewards(
    claims: Claims, rewards: Sequence[common_pb2.RewardEvent]
) -> list[common_pb2.RewardEvent]:
    """Returns the events to store. Raises `InvalidArgument` or `PermissionDenied` naming the first
    event that is refused."""
    _check_ids(rewards)
    if claims.allows("grader"):
        return [_of_grader(reward) for reward in rewards]
    return [_of_agent(claims, reward) for reward in rewards]


def admitted_reason(claims: Claims, abandon_reason: str) -> str:
    """Returns the reason to store; an agent's is marked."""
    if not abandon_reason or claims.allows("grader"):
        return abandon_reason
    return f"{OWN_PREFIX} {abandon_reason}"


def check_agent_end(claims: Claims, after_agent_s: float) -> None:
    """Raises `PermissionDenied` if an agent dates its end back: that would shorten its completion
    time, which is a reward."""
    if after_agent_s and not claims.allows("grader"):
        raise PermissionDenied(
            f"after_agent_s is {after_agent_s:g}: only a grader token may set the end of the agent"
        )


def _check_ids(rewards: Sequence[common_pb2.RewardEvent]) -> None:
    seen: set[str] = set()
    for reward in rewards:
        if not reward.event_id or not reward.name:
            raise InvalidArgument(f"a reward needs event_id and name: {reward!s:.200}")
        check_name(reward.name)
        if reward.kind not in common_pb2.RewardKind.values():
            raise InvalidArgument(
                f"reward {reward.event_id} has kind {reward.kind}, which is unknown"
            )
        if reward.event_id in seen:
            raise InvalidArgument(f"event_id {reward.event_id!r} is given to two rewards")
        seen.add(reward.event_id)


def _of_grader(reward: common_pb2.RewardEvent) -> common_pb2.RewardEvent:
    if reward.kind == common_pb2.REWARD_KIND_AGENT or reward.event_id.startswith(OWN_PREFIX):
        raise InvalidArgument(
            f"reward {reward.name!r} (event_id {reward.event_id!r}) has the kind or the id of an "
            "agent's own reward: it needs the session token"
        )
    check_value(reward.name, reward.value)
    return reward


def _of_agent(claims: Claims, reward: common_pb2.RewardEvent) -> common_pb2.RewardEvent:
    if not claims.agent_rewards:
        raise PermissionDenied(
            f"reward {reward.name!r}: a session token sets no rewards. The grader token of the "
            "rollout does; agent_rewards = true in the task lets the agent report on itself"
        )
    if reward.kind not in _OWN_KINDS:
        kind = enum_word(common_pb2.RewardKind, reward.kind)
        raise PermissionDenied(
            f"reward {reward.name!r} has kind {kind}: agent_rewards = true allows a session token "
            "the kinds agent and process, stored as agent"
        )
    check_value(reward.name, reward.value, most=MAX_OWN_REWARD)
    own = common_pb2.RewardEvent()
    own.CopyFrom(reward)
    own.event_id = OWN_PREFIX + reward.event_id
    own.kind = common_pb2.REWARD_KIND_AGENT
    return own
