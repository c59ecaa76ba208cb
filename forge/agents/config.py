"""Settings of a runner."""

from __future__ import annotations

from dataclasses import dataclass

from forge.runtime.config import ServiceConfig, setting


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

    concurrency: int = setting(256, help="rollouts that run at once", minimum=1, maximum=65536)
    rollout_timeout_s: float = setting(
        1800.0,
        help="longest that the agent of one rollout may take by itself: waiting for the model does "
        "not count, and on a host with more to run than cores time counts less",
        minimum=1,
        maximum=86400,
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
    command_tls_cert: str = setting(
        "",
        help="PEM client certificate that the command is told of (FORGE_TLS_CERT), for gRPC where "
        "gateways demand one; empty: none",
    )
    command_tls_key: str = setting("", help="PEM private key of command_tls_cert")
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
    reward_workers: int = setting(
        0,
        help="processes that reward functions run in; 0: one per core. More for functions that "
        "wait, for instance for a judge",
        minimum=0,
        maximum=4096,
    )
    reward_memory_mb: int = setting(
        2048, help="private memory of each reward process, in MiB; 0: no limit", minimum=0
    )
    reward_processes: int = setting(
        4096,
        help="processes and threads the runner's user may have, reward functions included; "
        "0: no limit",
        minimum=0,
    )
