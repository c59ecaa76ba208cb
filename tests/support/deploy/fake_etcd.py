"""The members of an etcd on the hosts of `FakeHosts`, with etcd's own refusals.

A member without data starts only with the variables that make a cluster, or with exactly the list
of the cluster that it joins; a promotion is refused until the learner has the log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forge.cli.deploy.cluster.members import STATE
from forge.cli.deploy.cluster.transport import Ended
from forge.cli.deploy.host.etcd_start import VARIABLES
from forge.cli.deploy.render.rendered import Manifest

UNIT = "forge-etcd.service"
DONE = Ended(code=0, output="")


@dataclass(slots=True)
class FakeMember:
    """A member as the cluster lists it."""

    id: int
    host: str
    started: bool = False
    is_learner: bool = False
    has_log: bool = True
    is_new_voter: bool = False
    """etcd refuses one change of the members: it was not connected for long enough."""


@dataclass(slots=True)
class FakeEtcd:
    """All members, by id. `data`: the member whose data a host has."""

    manifests: Mapping[str, Manifest]
    members: dict[int, FakeMember] = field(default_factory=dict)
    data: dict[str, int] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)
    variables: dict[str, dict[str, str]] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    """Hosts whose member runs and does not answer."""
    late: set[str] = field(default_factory=set)
    """Commands with an effect whose first answer comes too late."""
    clusters: int = 0
    """Clusters that were made."""

    @property
    def hosts(self) -> list[str]:
        """The hosts with a member in their manifest."""
        return [
            host
            for host, manifest in self.manifests.items()
            if any(unit.name == UNIT for unit in manifest.units)
        ]

    def has(self, *hosts: str) -> None:
        """Make a cluster of running members on these hosts."""
        for host in hosts:
            self._add(host, started=True)
            self.data[host] = self._id(host)
            self.running.add(host)
        self.clusters = 1

    def lose(self, host: str) -> None:
        """Take the host's disk."""
        del self.data[host]
        self.running.discard(host)

    def reboot(self) -> None:
        """Take the power of all hosts, and start the members, whose units are enabled."""
        self.running.clear()
        if VARIABLES.is_relative_to("/run"):
            self.variables.clear()
        for host in self.hosts:
            self._start(host, self.variables.get(host, {}))

    def voters(self) -> list[str]:
        """The hosts whose members vote."""
        return sorted(one.host for one in self.members.values() if not one.is_learner)

    def answer(self, host: str, words: Sequence[str]) -> Ended | None:
        """The answer to a command about etcd; None for any other."""
        match list(words):
            case ["sh", "-c", script] if script == STATE:
                found = ["data"] * (host in self.data) + ["prepared"] * (host in self.variables)
                found += ["new"] * (self.variables.get(host, {}).get("state") == "new")
                return Ended(code=0, output="\n".join(found))
            case [_, _, _, "deploy", "prepare-etcd", "--new"]:
                self.variables[host] = {"state": "new"}
                return DONE
            case [_, _, _, "deploy", "prepare-etcd", "--join", members]:
                self.variables[host] = {"state": "existing", "members": members}
                return DONE
            case [_, _, _, "deploy", "prepare-etcd", "--finish"]:
                self.variables.pop(host, None)
                return DONE
            case ["systemctl", "start", "--no-block", unit] if unit == UNIT:
                self._start(host, self.variables.get(host, {}))
                return DONE
            case ["systemctl", "is-active", unit] if unit == UNIT:
                return Ended(code=0, output="active" if host in self.running else "failed")
            case [_, _, _, "deploy", "bootstrap"] if not self._has_quorum():
                return Ended(code=1, output="", errors="etcd: no answer")
            case ["env", "ETCDCTL_API=3", *_]:
                if not self._has_quorum():
                    return Ended(code=1, output="", errors="context deadline exceeded")
                (asked,) = (one for one in words if one.startswith("ETCDCTL_ENDPOINTS="))
                urls = asked.partition("=")[2].split(",")
                group, command, *rest = words[list(words).index("etcdctl") + 1 :]
                if any(one.startswith("--endpoints") for one in rest):
                    return Ended(code=1, output="", errors="conflicting environment variable")
                return self._etcdctl(f"{group} {command}", rest, urls)
        return None

    def _start(self, host: str, variables: Mapping[str, str]) -> None:
        if host in self.data:
            self.running.add(host)
        elif variables.get("state") == "new" and not any(
            one.started and one.host == host for one in self.members.values()
        ):
            self._make(host)
        elif variables.get("members") == ",".join(
            f"{one.host}={self._url(one.host)}" for one in self.members.values()
        ):
            self._join(host)
        if self._has_quorum():
            # The unit removes them once the member is ready.
            for one in self.running:
                self.variables.pop(one, None)

    def _make(self, host: str) -> None:
        if not self.members:
            self.clusters += 1
            for one in self.hosts:
                self._add(one)
        self._join(host)

    def _join(self, host: str) -> None:
        found = next((one for one in self.members.values() if one.host == host), None)
        if found is not None and not found.started:
            found.started = True
            self.data[host] = found.id
            self.running.add(host)

    def _etcdctl(self, command: str, rest: list[str], urls: list[str]) -> Ended:
        refused = ""
        match command, rest:
            case "member list", _:
                return Ended(code=0, output=json.dumps({"members": [*map(self._row, self._all())]}))
            case "member add", _ if new := [one for one in self._all() if one.is_new_voter]:
                new[0].is_new_voter = False
                refused = "etcdserver: unhealthy cluster"
            case "member add", [host, "--learner", _]:
                assert not any(one.is_learner or not one.started for one in self._all())
                assert all(self._answers(one.host) for one in self._all())
                self._add(host, is_learner=True)
            case "member promote", [id_]:
                member = self.members[int(id_, 16)]
                if member.started and member.has_log:
                    member.is_learner, member.is_new_voter = False, True
                else:
                    member.has_log = member.started
                    refused = "can only promote a learner member which is in sync with leader"
            case "member remove", [id_]:
                assert all(self._answers(one.host) for one in self._all() if one.id != int(id_, 16))
                del self.members[int(id_, 16)]
            case "endpoint health", _:
                hosts = [one.host for one in self._all() if self._client(one.host) in urls]
                refused = "unhealthy cluster" * (not all(map(self._answers, hosts)))
        if command in self.late and not refused:
            self.late.discard(command)
            refused = "context deadline exceeded"
        return Ended(code=1 if refused else 0, output="", errors=refused)

    def _has_quorum(self) -> bool:
        voters = self.voters()
        return sum(map(self._answers, voters)) > len(voters) / 2

    def _answers(self, host: str) -> bool:
        found = next((one.id for one in self._all() if one.host == host), None)
        return host in self.running - self.silent and self.data.get(host) == found

    def _all(self) -> list[FakeMember]:
        return list(self.members.values())

    def _add(self, host: str, *, started: bool = False, is_learner: bool = False) -> None:
        id_ = max(self.members, default=0xA0) + 1
        self.members[id_] = FakeMember(
            id=id_, host=host, started=started, is_learner=is_learner, has_log=not is_learner
        )

    def _id(self, host: str) -> int:
        return next(one.id for one in self._all() if one.host == host)

    def _url(self, host: str) -> str:
        return f"https://{self.manifests[host].address}:2380"

    def _client(self, host: str) -> str:
        return f"https://{self.manifests[host].address}:2379"

    def _row(self, one: FakeMember) -> dict[str, object]:
        client = {"clientURLs": [self._client(one.host)]} if one.started else {}
        learner = {"isLearner": True} if one.is_learner else {}
        name = {"name": one.host} if one.started else {}
        return {"ID": one.id, "peerURLs": [self._url(one.host)], **name, **client, **learner}
