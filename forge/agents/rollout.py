"""The interface of scaffolds: `Scaffold`, and the `Rollout` that it runs.

Owns the interface between the runner and its agents. A scaffold gets a gateway and an `Episode`; it
does not know leases, rewards, retries or the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from forge.agents.environments.base import Episode, Transcript
from forge.v1 import scheduler_pb2
from forge.v1.gateway_pb2_grpc import GatewayServiceStub

RolloutResult = scheduler_pb2.FinishRolloutsRequest.Outcome
"""The result of one attempt, for the scheduler; without an error the trajectory is sealed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The addresses of one gateway instance."""

    instance_id: str
    http_url: str
    """E.g. "http://127.0.0.1:8080"; OpenAI's API is under /v1."""
    grpc_address: str
    channel: grpc.aio.Channel
    """Shared by all rollouts on this gateway."""
    stub: GatewayServiceStub | None = None
    """The stub on `channel`, shared, too; None: each session makes its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at one task."""

    trajectory_id: str
    task_id: str
    domain: str
    payload: Mapping[str, Any]
    gateway: Gateway
    session_token: str
    """API key that names the trajectory; it sets no outcome."""
    max_turns: int
    max_tokens: int
    """Maximum number of sampled tokens per turn."""
    temperature: float | None
    """None: the gateway's default of 1, the distribution that is trained."""


class Scaffold(Protocol):
    """A way to run an agent; one instance serves all rollouts of a runner, concurrently."""

    async def run(self, rollout: Rollout, episode: Episode) -> Transcript:
        """Attempts the task; returns the transcript.

        Raises `InvalidArgument` if every attempt at this task must fail, any other error if another
        attempt may succeed. A cancelled call must free its resources.
        """

    async def close(self) -> None:
        """Frees connections and processes."""


class CheckedScaffold(Scaffold, Protocol):
    """A scaffold that needs something of its host."""

    async def check(self) -> None:
        """Raises `ConfigError` with the remedy if this host lacks it."""
