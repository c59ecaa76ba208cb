"""Hosts of a rendered cluster that answer the commands of `forge deploy` in memory.

Each unit has the release that its host's link had at its last restart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from forge.cli.deploy.cluster.cluster import Cluster
from forge.cli.deploy.cluster.transport import Ended, Transport
from forge.cli.deploy.render.rendered import Manifest
from tests.support.deploy.fake_etcd import DONE, UNIT, FakeEtcd

Fault = Callable[[str, Sequence[str]], bool]


class Killed(BaseException):
    """The computer that rolls has lost its power."""


@dataclass(slots=True)
class FakeHosts:
    """All hosts. `fails` makes a command fail, `kills` ends the rolling process after it."""

    manifests: Mapping[str, Manifest]
    before: str
    fails: Fault = lambda host, words: False
    kills: Fault = lambda host, words: False
    away: Fault = lambda host, words: False
    """Whether a host gives no answer; the command has no effect."""
    links: dict[str, str] = field(default_factory=dict)
    copied: dict[str, str] = field(default_factory=dict)
    units: dict[tuple[str, str], str] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    broken: set[tuple[str, str]] = field(default_factory=set)
    """Units that never start with a release: (unit, release)."""
    unregistered: set[tuple[str, str]] = field(default_factory=set)
    """Instances that run with a release and never come into discovery: (instance, release)."""
    needs: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)
    """What an installation says of units, by host: such as `start` and `restart`."""
    journals: Mapping[str, str] = field(default_factory=dict)
    """The last lines of the journal, by unit."""
    commands: list[tuple[str, str]] = field(default_factory=list)
    one_at_a_time: Lock = field(default_factory=Lock)
    etcd: FakeEtcd = field(init=False)
    """A test that starts members gives it a cluster, or none; others have one that runs."""

    def __post_init__(self) -> None:
        self.etcd = FakeEtcd(self.manifests)
        self.etcd.has(*self.etcd.hosts)
        for host, manifest in self.manifests.items():
            self.links[host] = self.before
            self.units |= {(host, unit.name): self.before for unit in manifest.units}

    def transports(self) -> dict[str, Transport]:
        """One for each host."""
        return {host: _Host(host, self) for host in self.manifests}

    def cluster(self, out: Path) -> Cluster:
        """The hosts as rendered in `out`; a second passes at each look at the clock."""
        (out / "hosts").mkdir(exist_ok=True)
        now_s = iter(range(1_000_000))
        return Cluster(
            out=out,
            manifests=self.manifests,
            transports=self.transports(),
            healthy_s=3.0,
            away_s=3.0,
            pause=lambda _: None,
            now_s=lambda: float(next(now_s)),
        )

    def releases(self) -> set[str]:
        """What links and units have, etcd's apart."""
        own = {one for (_, unit), one in self.units.items() if unit != "forge-etcd.service"}
        return own | set(self.links.values())

    def answer(self, host: str, words: Sequence[str]) -> Ended:
        """The effect and the output of a command."""
        with self.one_at_a_time:
            return self._answer(host, words)

    def _answer(self, host: str, words: Sequence[str]) -> Ended:
        self.commands.append((host, " ".join(words)))
        if self.away(host, words):
            return Ended(code=255, output="", errors=f"ssh {host}: No route to host", is_away=True)
        if self.fails(host, words):
            return Ended(code=1, output="", errors=f"planted: {words[-1]}")
        ended = self.etcd.answer(host, words) or self._effect(host, list(words))
        if self.kills(host, words):
            raise Killed
        return ended

    def _effect(self, host: str, words: list[str]) -> Ended:
        manifest = self.manifests[host]
        match words:
            case ["readlink", _]:
                return Ended(code=0, output=self.links[host] + "\n")
            case [_, "-m", "forge.cli.main", "--version"]:
                return Ended(code=0, output=manifest.release + "\n")
            case ["sh", "-c", _]:
                self.copied[host] = manifest.release
            case [_, _, _, "deploy", "install", "--rollback", left]:
                if self.links[host] == left:
                    self.links[host] = self.before
            case [_, _, _, "deploy", "install", "--json"]:
                self.links[host] = self.copied[host]
                empty: dict[str, list[str]] = {
                    "changed": [],
                    "start": [],
                    "restart": [],
                    "stopped": [],
                    "kept": [],
                }
                needs = empty | dict(self.needs.get(host, {}))
                if host in {*self.etcd.hosts} - self.etcd.running:
                    needs["start"] = [*dict.fromkeys([UNIT, *needs["start"]])]
                return Ended(code=0, output=json.dumps(needs))
            case [_, _, _, "deploy", "drain", instance, *_]:
                self.drained.add(instance)
            case ["systemctl", "stop", unit]:
                self.units[host, unit] = "stopped"
            case ["systemctl", "restart", *units]:
                for one in manifest.units:
                    if one.name in units:
                        self.units[host, one.name] = self.links[host]
                        self.drained.discard(one.instance_id)
            case ["systemctl", "is-active", unit]:
                failed = (unit, self.units[host, unit]) in self.broken
                return Ended(code=3 if failed else 0, output="failed" if failed else "active")
            case ["journalctl", "--unit", unit, *_]:
                return Ended(code=0, output=self.journals.get(unit, ""))
            case ["bash", "-lc", _]:
                return Ended(code=0, output=json.dumps({"services": self._services()}))
        return DONE

    def _services(self) -> list[dict[str, Any]]:
        services = []
        first: set[str] = set()
        for host, manifest in self.manifests.items():
            for unit in manifest.units:
                # The first host leads.
                kind = {"pool-replica": "pool", "agents": "runner"}.get(unit.kind, unit.kind)
                leads = unit.kind not in first
                release = self.units[host, unit.name]
                if (unit.instance_id, release) in self.unregistered:
                    continue
                if not unit.instance_id or (unit.kind == "pool-replica" and not leads):
                    continue
                first.add(unit.kind)
                services.append(
                    {
                        "kind": kind,
                        "instance": unit.instance_id,
                        "role": "leader" if leads and kind in ("scheduler", "trainer") else "",
                        "state": "ready",
                        "error": "",
                        "version": release,
                        "metadata": {"shard": "s0", "copies": "2"} if kind == "pool" else {},
                    }
                )
        return services


@dataclass(frozen=True, slots=True)
class _Host:
    name: str
    hosts: FakeHosts

    def run(self, words: Sequence[str], *, stdin: bytes = b"", limit_s: float = 60.0) -> Ended:
        return self.hosts.answer(self.name, words)
