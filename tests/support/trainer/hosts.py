"""The ranks of one trainer on several hosts: each a host name and a loopback address of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from forge.runtime.process.child_processes import ProcessEvent, ProcessSpec, ProcessSupervisor
from forge.runtime.process.ports import free_ports

ADDRESSES = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")
_ENTER = 'hostname "$1" && mount --bind "$0" /etc/hosts && shift && exec "$@"'


class Hosts:
    """`services.trainer.torchrun` on each host, started again like units of systemd."""

    def __init__(
        self, folder: Path, settings: Sequence[str], *, nodes: str = "2", directory: bool = False
    ) -> None:
        """`nodes`: their number, or MIN:MAX for a group that continues with fewer. `directory`:
        these meet in a directory, and not at host 0."""
        self._folder = folder
        self._settings = settings
        self._nodes = nodes
        self._directory = directory
        self._port = str(free_ports(1)[0])
        hosts = range(len(ADDRESSES))
        self._supervisors = {host: ProcessSupervisor(on_event=self._heard) for host in hosts}
        self.events: list[ProcessEvent] = []
        self._starts = dict.fromkeys(hosts, 0)
        self._names = folder / "hosts"
        lines = [f"{address} host-{host}\n" for host, address in enumerate(ADDRESSES)]
        self._names.write_text("127.0.0.1 localhost\n" + "".join(lines))

    def _heard(self, event: ProcessEvent) -> None:
        self.events.append(event)

    async def start(self, host: int, *settings: str) -> None:
        """Start the ranks of a host, one; again if it has ended without an error."""
        self._starts[host] += 1
        mesh = ("--nnodes", self._nodes, "--nproc-per-node", "1", "--node-rank", str(host))
        namespaces = ("unshare", "--user", "--map-root-user", "--uts", "--mount", "sh", "-c")
        await self._supervisors[host].start(
            ProcessSpec(
                name=self._name(host),
                argv=(
                    *(*namespaces, _ENTER, str(self._names), f"host-{host}", sys.executable),
                    *(
                        "-m",
                        "services.trainer.torchrun",
                        *mesh,
                        *self._meeting(host),
                        "--",
                        *self._settings,
                        *settings,
                    ),
                ),
                # Ranks of a learner in this process have chosen loopback for it.
                env={k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"},
                log_path=self._folder / f"host-{host}.log",
                stop_s=120.0,
            )
        )

    def _meeting(self, host: int) -> tuple[str, ...]:
        if ":" not in self._nodes:
            return ("--master-addr", ADDRESSES[0], "--master-port", self._port)
        # On loopback every process finds itself to be the host of the endpoint.
        conf = f"is_host={int(host == 0)},last_call_timeout=5"
        endpoint = f"{ADDRESSES[0]}:{self._port}"
        if self._directory:
            endpoint = str(self._folder / "meeting")
        return (*("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint), "--rdzv-conf", conf)

    async def stop(self) -> None:
        """Stop all hosts, the last one first."""
        for host in reversed(self._supervisors):
            await self._supervisors[host].stop()

    async def lose(self, host: int) -> None:
        """Let a host vanish, with all that it runs."""
        self.agent(host).kill()
        await self._supervisors[host].stop()

    def running(self, host: int) -> bool:
        """Whether the process of torchrun runs on a host."""
        return self._name(host) in self._supervisors[host].pids()

    def agent(self, host: int) -> psutil.Process:
        """The process of torchrun on a host."""
        assert self.running(host), self.said(host)
        return psutil.Process(self._supervisors[host].pids()[self._name(host)])

    def rank(self, host: int) -> psutil.Process | None:
        """The rank of a host; None while it does not run."""
        try:
            for child in self.agent(host).children():
                if child.environ().get("RANK") == str(host):
                    return child
        except psutil.Error:
            pass
        return None

    def _name(self, host: int) -> str:
        return f"host-{host} start {self._starts[host]}"

    def crashes(self, host: int) -> list[str]:
        """The line of each crash."""
        return [one.last_line for one in self._of(host) if one.kind == "crashed"]

    def ended(self, host: int) -> bool:
        """Whether its newest process has ended without an error."""
        return any(one.kind == "ended" for one in self._of(host) if one.name == self._name(host))

    def _of(self, host: int) -> list[ProcessEvent]:
        return [one for one in self.events if one.name.startswith(f"host-{host} ")]

    def said(self, host: int) -> str:
        """The log of a host; "" before its start."""
        log = self._folder / f"host-{host}.log"
        return log.read_text(errors="replace") if log.exists() else ""
