"""The SDK: `AgentSession` and `SyncAgentSession` for agents, `operator` for operators' programs."""

from forge.client.session import AgentSession
from forge.client.sync import SyncAgentSession
from forge.client.turns import Answer, Sampled, SessionInfo, reward_event

__all__ = [
    "AgentSession",
    "Answer",
    "Sampled",
    "SessionInfo",
    "SyncAgentSession",
    "reward_event",
]
