"""Settings of a runner."""

from __future__ import annotations

from dataclasses import dataclass

from forge.runtime.config import ServiceConfig, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig(ServiceConfig):
    """Leases rollouts from the scheduler and runs an agent for each."""

    concurrency: int = setting(256, help="rollouts that run at once", minimum=1, maximum=65536)
    rollout_timeout_s: float = setting(
        1800.0, help="longest that one rollout may take", minimum=1, maximum=86400
    )
    call_timeout_s: float = setting(
        600.0, help="longest that one model call may take", minimum=1, maximum=86400
    )
    lease_wait_s: float = setting(
        10.0, help="how long one request for work waits at the scheduler", minimum=0.1, maximum=60
    )
    gateway_wait_s: float = setting(
        30.0, help="how long a rollout waits for a gateway to appear", minimum=0.1, maximum=600
    )
    max_tokens: int = setting(
        256, help="most tokens to sample per turn where the task names no max_tokens", minimum=1
    )
    command: str = setting(
        "",
        help="program to run as the agent of every task, instead of the scaffold the task names; "
        "{prompt}, {task_id} and {domain} are filled in",
    )
    command_memory_mb: int = setting(
        2048, help="private memory of each process of the command, in MiB; 0: no limit", minimum=0
    )
    command_processes: int = setting(
        4096,
        help="processes and threads the runner's user may have, over all commands; 0: no limit",
        minimum=0,
    )
    scaffolds: tuple[str, ...] = setting((), help="further scaffolds, name=module:factory each")
    domains: tuple[str, ...] = setting((), help="further domains, name=module:class each")
    reward_functions: tuple[str, ...] = setting(
        (), help="reward function per domain, domain=module:function each"
    )
    reward_timeout_s: float = setting(
        30.0, help="longest that a reward function may take", minimum=0.1, maximum=3600
    )
