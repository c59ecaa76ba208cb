"""One rollout as a scaffold sees it, and what a scaffold is.

Owns the interface between the runner and the agents it can run. A scaffold gets a way to the
model and an `Episode`; of leases, rewards, retries and the scheduler it knows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from forge.agents.environments.base import Episode, Transcript


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Where one gateway instance listens."""

    instance_id: str
    http_url: str
    """E.g. "http://127.0.0.1:8080"; OpenAI's API lies under /v1."""
    grpc_address: str
    channel: grpc.aio.Channel
    """Shared with every other rollout on this gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at one task."""

    trajectory_id: str
    task_id: str
    domain: str
    payload: Mapping[str, Any]
    gateway: Gateway
    session_token: str
    """API key that names the trajectory."""
    max_turns: int
    max_tokens: int
    """Most tokens to sample per turn."""
    temperature: float | None
    """None leaves it to the gateway: 1, the distribution that is trained."""


class Scaffold(Protocol):
    """A way to run an agent; one instance serves all rollouts of a runner, concurrently."""

    async def run(self, rollout: Rollout, episode: Episode) -> Transcript:
        """Attempt the task and say what happened.

        Raises `InvalidArgument` when this task can never be attempted, anything else when
        another attempt may go better. Cancellation must leave nothing behind.
        """

    async def close(self) -> None:
        """Free connections and processes."""
