"""The SDK: `AgentSession` and `SyncAgentSession` for agents, `forge.client.operator` for those who
feed them."""

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
