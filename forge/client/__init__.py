"""The SDK: `AgentSession` and `SyncAgentSession` for agents, `operator` for operators' programs."""

from forge.client.reward_events import reward_event
from forge.client.sessions.session import AgentSession
from forge.client.sessions.sync import SyncAgentSession
from forge.client.sessions.turns import Answer, Sampled, SessionInfo

__all__ = [
    "AgentSession",
    "Answer",
    "Sampled",
    "SessionInfo",
    "SyncAgentSession",
    "reward_event",
]
