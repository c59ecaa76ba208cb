"""The async SDK: `AgentSession` for agents, `forge.client.operator` for those who feed them."""

from forge.client.session import AgentSession, Answer, Sampled, SessionInfo, reward_event

__all__ = ["AgentSession", "Answer", "Sampled", "SessionInfo", "reward_event"]
