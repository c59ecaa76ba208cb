"""Settings of a runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from forge.runtime.settings import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig(ServiceConfig):
    """Leases rollouts from the scheduler and runs an agent for each.

    Any program can be an agent. It runs once per rollout, has OPENAI_BASE_URL, OPENAI_API_KEY etc.
    in its environment, and prints its answer as the last line:

      forge agents run --etcd HOST:2379 --token-file TOKEN --command 'python agent.py {prompt}'

    Without --command a task's scaffold runs: blackbox (OpenAI's SDK and tools) or whitebox (gRPC,
    folds its own history). Rewards come from the domain and from your functions:

      forge agents run ... --reward-functions qa=my_rewards:grade

    my_rewards.py has `def grade(trajectory, task): return trajectory.answer == ...`; it runs in a
    separate process. A failed rollout is logged with the last output of its program, and attempted
    again. After SIGTERM running rollouts may end, for at most --drain-s. See docs/agents.md.
    """

    token_file: str = ""
    """File with a runner's token, instead of key_file; empty: FORGE_TOKEN. The runner reads it
    again when it is replaced."""
    token_state_file: str = ""
    """File to which the runner writes renewals of its token; empty: token_file. It ignores a
    renewal of another token than token_file's."""
    concurrency: Annotated[int, Meta(ge=1, le=65536)] = 256
    """Most rollouts that run at once. Each rollout of a `command` is a process, about 60 MB for
    Python with a client library: on a host with few cores set 8 per core."""
    rollout_timeout_s: Annotated[float, Meta(ge=1, le=86400)] = 1800.0
    """Limit on the own time of one agent: waits for the model do not count, and time counts less on
    a host with more runnable threads than cores."""
    call_timeout_s: Annotated[float, Meta(ge=1, le=86400)] = 600.0
    """Deadline of one model call. Keep it above router.worker_wait_s."""
    lease_wait_s: Annotated[float, Meta(ge=0.1, le=60)] = 10.0
    """Time for which a request for rollouts waits at the scheduler."""
    gateway_wait_s: Annotated[float, Meta(ge=0.1, le=600)] = 120.0
    """Time for which a rollout waits for a gateway: long enough for one to start again."""
    max_tokens: Annotated[int, Meta(ge=1)] = 256
    """Most sampled tokens per turn, for tasks without max_tokens."""
    command: str = ""
    """Program that runs as the agent of every task, instead of the task's scaffold; {prompt},
    {task_id} and {domain} are replaced."""
    command_sandbox: Literal["bubblewrap", "container", "none"] = "bubblewrap"
    """Sandbox of the command: bubblewrap, a container (podman or docker), or none: on the host with
    resource limits alone, for agents that you trust like the runner."""
    command_network: Literal["gateway", "host"] = "gateway"
    """Network of a sandboxed command: its gateway alone, or the network of the host."""
    container_engine: str = "podman"
    """Program of command_sandbox = container: podman or docker, with further words if needed."""
    container_image: str = ""
    """Image for tasks without `image` in their payload."""
    container_pull: Literal["never", "missing"] = "never"
    """Pull of images for a rollout: never, or those that are missing."""
    container_user: str = ""
    """User in the container; empty: the user of the image, or 65534 if the runner is root."""
    command_read: tuple[str, ...] = ()
    """Files and directories that a sandboxed command reads, besides the system, Python, the working
    directory and the installation of its program."""
    command_write: tuple[str, ...] = ()
    """Directories of the host that a sandboxed command writes, besides its private /tmp."""
    command_home: str = ""
    """Directory that is copied to HOME of each sandboxed command, e.g. with its settings; empty:
    HOME is an empty directory."""
    command_tmp_mb: Annotated[int, Meta(ge=1)] = 1024
    """Size of the private /tmp of each sandboxed command, in MiB; it contains the working directory
    and HOME."""
    command_memory_mb: Annotated[int, Meta(ge=0)] = 2048
    """Private memory of each process of the command, in MiB; of all its processes together in a
    container or a delegated control group; 0: no limit."""
    command_tls_cert: str = ""
    """PEM client certificate for the command, in FORGE_TLS_CERT, if gateways require one from gRPC
    clients; empty: none."""
    command_tls_key: str = ""
    """PEM private key of command_tls_cert."""
    command_processes: Annotated[int, Meta(ge=0)] = 4096
    """Most processes and threads of each command; without a container or a delegated control group,
    of its user over all commands; 0: no limit."""
    pass_environment: tuple[str, ...] = ()
    """Names of the runner's variables that commands and reward functions also get, e.g.
    JUDGE_API_KEY; PATH, HOME, LANG and a few others always pass."""
    unsafe_sandbox: bool = False
    """Run programs of models (domain code), reward functions and commands with resource limits
    only, on a host that cannot run the sandbox; otherwise such a host refuses them."""
    scaffolds: tuple[str, ...] = ()
    """Additional scaffolds, each name=module:factory."""
    domains: tuple[str, ...] = ()
    """Additional domains, each name=module:class."""
    reward_functions: tuple[str, ...] = ()
    """Reward functions, each domain=module:function."""
    reward_timeout_s: Annotated[float, Meta(ge=0.1, le=3600)] = 30.0
    """Time limit of one call of a reward function."""
    reward_workers: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Processes for reward functions; 0: one per core. Set more for functions that wait, e.g. for
    a judge."""
    reward_memory_mb: Annotated[int, Meta(ge=0)] = 2048
    """Private memory of each reward process, in MiB; 0: no limit."""
    reward_network: bool = False
    """Allow reward functions to use the network, e.g. to call a judge."""
    reward_read: tuple[str, ...] = ()
    """Files and directories that reward functions read, besides Python, its packages and the
    directories of their modules."""
    reward_tmp_mb: Annotated[int, Meta(ge=1)] = 256
    """Size of the private /tmp of each reward process, in MiB."""
    reward_processes: Annotated[int, Meta(ge=0)] = 4096
    """Most processes and threads of the user of reward functions; 0: no limit."""

    @classmethod
    def program(cls) -> str:
        """Return the command that starts a runner."""
        return "forge agents run"

    @property
    def secret_files(self) -> tuple[str, ...]:
        """Files that no sandbox shows."""
        return (
            self.key_file,
            self.token_file,
            self.token_state_file,
            self.tls_key,
            self.command_tls_key,
            self.etcd_password_file,
        )
