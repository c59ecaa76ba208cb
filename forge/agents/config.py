"""Settings of a runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from forge.runtime.config import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig(ServiceConfig):
    """Leases rollouts from the scheduler and runs an agent for each.

    Any program is an agent, once per rollout; it finds OPENAI_BASE_URL, OPENAI_API_KEY and the like
    in its environment, and its answer is the last line it prints:

      forge agents run --etcd HOST:2379 --key-file KEY --command 'python agent.py {prompt}'

    Without --command the scaffold that a task names is run: blackbox (OpenAI's SDK and tools) or
    whitebox (gRPC, folds its own history). Rewards are the domain's, and yours:

      forge agents run ... --reward-functions qa=my_rewards:grade

    where my_rewards.py has `def grade(trajectory, task): return trajectory.answer == ...`, which
    runs in processes of its own. A rollout that fails is in the log with the last lines its
    program printed, and is attempted again. SIGTERM lets rollouts end first, for at most --drain-s.
    More in docs/agents.md.
    """

    concurrency: Annotated[int, Meta(ge=1, le=65536)] = 256
    """Rollouts that run at once."""
    rollout_timeout_s: Annotated[float, Meta(ge=1, le=86400)] = 1800.0
    """Longest that the agent of one rollout may take by itself: waiting for the model does not
    count, and on a host with more to run than cores time counts less."""
    call_timeout_s: Annotated[float, Meta(ge=1, le=86400)] = 600.0
    """Longest that one model call may take."""
    lease_wait_s: Annotated[float, Meta(ge=0.1, le=60)] = 10.0
    """How long one request for work waits at the scheduler."""
    gateway_wait_s: Annotated[float, Meta(ge=0.1, le=600)] = 30.0
    """How long a rollout waits for a gateway to appear."""
    max_tokens: Annotated[int, Meta(ge=1)] = 256
    """Most tokens to sample per turn where the task names no max_tokens."""
    command: str = ""
    """Program to run as the agent of every task, instead of the scaffold the task names; {prompt},
    {task_id} and {domain} are filled in."""
    command_memory_mb: Annotated[int, Meta(ge=0)] = 2048
    """Private memory of each process of the command, in MiB; 0: no limit."""
    command_tls_cert: str = ""
    """PEM client certificate that the command finds in FORGE_TLS_CERT, for gateways that demand one
    of gRPC clients; empty: none."""
    command_tls_key: str = ""
    """PEM private key of command_tls_cert."""
    command_processes: Annotated[int, Meta(ge=0)] = 4096
    """Processes and threads the runner's user may have, over all commands; 0: no limit."""
    scaffolds: tuple[str, ...] = ()
    """Further scaffolds, name=module:factory each."""
    domains: tuple[str, ...] = ()
    """Further domains, name=module:class each."""
    reward_functions: tuple[str, ...] = ()
    """Reward function per domain, domain=module:function each."""
    reward_timeout_s: Annotated[float, Meta(ge=0.1, le=3600)] = 30.0
    """Longest that a reward function may take."""
    reward_workers: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Processes that reward functions run in; 0: one per core. More for functions that wait, for
    instance for a judge."""
    reward_memory_mb: Annotated[int, Meta(ge=0)] = 2048
    """Private memory of each reward process, in MiB; 0: no limit."""
    reward_processes: Annotated[int, Meta(ge=0)] = 4096
    """Processes and threads the runner's user may have, reward functions included; 0: no limit."""
