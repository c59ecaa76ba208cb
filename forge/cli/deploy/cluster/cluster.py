"""The hosts of a rendered cluster, reached by their transports.

Owns the commands that run on them; each can be repeated. Not here: their order (`plan`).
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forge.cli.deploy.cluster.plan import Step
from forge.cli.deploy.cluster.transport import Ended, Transport
from forge.cli.deploy.host.install import NEW
from forge.cli.deploy.inventory.kinds import MAY_END
from forge.cli.deploy.render.rendered import MANIFEST, Manifest
from forge.core.errors import ForgeError, Unavailable

HEALTHY_S = 300.0
_RESTART_S = 900.0
"""A trainer writes a checkpoint at its stop: 11 minutes, see its unit."""
_INSTALL_S = 300.0
_STATUS_S = 180.0
"""On a host under load it took more than 60 s."""
AWAY_S = 60.0
"""A connection that breaks is no reason to turn a roll around."""
_PAUSE_S = 1.0
_HOSTS_AT_ONCE = 16
_CAUSE = re.compile(r"forge [a-z]+: ")
"""Of a line of `forge.runtime.process.startup.run`."""
Result = TypeVar("Result")


class StepFailed(ForgeError):
    """A step of a roll failed; the message names the host and the reason."""

    retryable = True


class HostAway(StepFailed):
    """A host gives no answer."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """All hosts."""

    out: Path
    manifests: Mapping[str, Manifest]
    transports: Mapping[str, Transport]
    drain_s: float = 120.0
    healthy_s: float = HEALTHY_S
    away_s: float = AWAY_S
    """Longest wait for a host that gives no answer."""
    pause: Callable[[float], None] = time.sleep
    now_s: Callable[[], float] = time.monotonic
    notes: list[str] = field(default_factory=list)
    """Faults that stop nothing, and units that left the inventory."""

    @property
    def admin(self) -> str:
        """The host with etcd's root password."""
        return next(host for host, one in self.manifests.items() if one.is_admin)

    def on_hosts(self, do: Callable[[str], Result]) -> dict[str, Result]:
        """Call a function for each host, for several at once; return the results in their order.
        Raises the first error after all begun calls have ended."""
        with ThreadPoolExecutor(max_workers=_HOSTS_AT_ONCE) as threads:
            return dict(zip(self.manifests, threads.map(do, self.manifests), strict=True))

    def perform(self, step: Step, *, release: str) -> None:
        """Do a step. `release`: the one that a healthy instance has. Raises `StepFailed`."""
        match step.action:
            case "copy":
                self.copy(step.host)
            case "swap":
                self.notes += left_lines(step.host, self.install(step.host))
            case "back":
                # By the release of before: the one that is left may not even start.
                left = self.manifests[step.host].release
                words = (*_program(release), "deploy", "install", "--rollback", left)
                self.run(step.host, *words, limit_s=_INSTALL_S)
            case "drain":
                self._drain(step)
            case "stop" | "restart":
                self._systemctl(step)
            case "check":
                self.wait_healthy(step, release=release)
            case "roles":
                self.bootstrap()

    def run(self, host: str, *words: str, stdin: bytes = b"", limit_s: float = 60.0) -> str:
        """Run a command on a host; return its output. Raises `StepFailed`, `HostAway`."""
        transport = self.transports[host]
        ended = transport.run(words, stdin=stdin, limit_s=limit_s)
        deadline_s = self.now_s() + self.away_s if ended.is_away else 0.0
        while ended.is_away:
            if self.now_s() >= deadline_s:
                raise HostAway(f"{host}: {_short(words)}: {ended.reason}")
            self.pause(_PAUSE_S)
            ended = transport.run(words, stdin=stdin, limit_s=limit_s)
        if ended.code:
            raise StepFailed(f"{host}: {_short(words)}: {ended.reason}")
        return ended.output

    def forge(self, host: str, *words: str, limit_s: float = 120.0) -> str:
        """Run `forge deploy ...` of the rendered release on a host."""
        program = _program(self.manifests[host].release)
        return self.run(host, *program, "deploy", *words, limit_s=limit_s)

    def bootstrap(self) -> None:
        """Apply users, roles and tokens of etcd from the admin's host, until `healthy_s`: a new
        cluster elects its leader first, and on a host under load etcd may not answer. Raises
        `StepFailed`."""
        self._repeated(lambda: self.forge(self.admin, "bootstrap"))

    def _repeated(self, do: Callable[[], Result]) -> Result:
        """Return the result of a function that is called until it has one, for `healthy_s` at
        most. Raises the `StepFailed` of the last call."""
        deadline_s = self.now_s() + self.healthy_s
        while True:
            try:
                return do()
            except StepFailed:
                if self.now_s() >= deadline_s:
                    raise
            self.pause(_PAUSE_S)

    def copy(self, host: str) -> None:
        """Copy the rendered files of a host to it; they are complete once the manifest is there."""
        packed = io.BytesIO()
        folder = self.out / "hosts" / host
        with tarfile.open(fileobj=packed, mode="w") as archive:
            paths = sorted(folder.rglob("*"), key=lambda one: one.name == MANIFEST)
            for path in (one for one in paths if one.is_file()):
                archive.add(path, arcname=str(path.relative_to(folder)), filter=_of_root)
        unpack = f"rm -rf {NEW} && mkdir -p -m 0700 {NEW} && tar -x -C {NEW}"
        self.run(host, "sh", "-c", unpack, stdin=packed.getvalue(), limit_s=_INSTALL_S)

    def install(self, host: str) -> dict[str, Any]:
        """Install what was copied; return what units need."""
        shown = self.forge(host, "install", "--json", limit_s=_INSTALL_S)
        installed: dict[str, Any] = json.loads(shown.strip().rpartition("\n")[2])
        return installed

    def _systemctl(self, step: Step) -> None:
        try:
            self.run(step.host, "systemctl", step.action, *step.units, limit_s=_RESTART_S)
        except HostAway:
            raise
        except StepFailed:
            # systemctl names commands that show the reason, and not the reason.
            for unit in step.units if step.action == "restart" else ():
                if (state := self._state(step.host, unit)) != "active":
                    raise self._not_active(step.host, unit, state) from None
            raise

    def _drain(self, step: Step) -> None:
        words = ("drain", step.instance_id, "--wait", f"{self.drain_s:.0f}s")
        try:
            self.forge(self.admin, *words, limit_s=self.drain_s + 60.0)
        except StepFailed as error:
            # A stop drains too, for a shorter time; an absent instance has nothing to drain.
            self.notes.append(f"not drained: {error}")

    def status(self) -> dict[str, Any]:
        """Return `forge status --json`, as the admin's host sees the cluster. Raises
        `StepFailed`."""
        words = ("bash", "-lc", "forge status --json 2>&1")
        shown = self.run(self.admin, *words, limit_s=_STATUS_S)
        try:
            found: dict[str, Any] = json.loads(shown.strip().rpartition("\n")[2])
        except ValueError:
            raise StepFailed(f"{self.admin}: forge status: {shown[-200:]}") from None
        return found

    def leaders(self) -> set[str]:
        """Return the ids of the instances that lead: replicated shards, scheduler, trainer. A host
        under load may give no status at first. Raises `StepFailed`."""
        return {
            one["instance"]
            for one in self._repeated(self.status)["services"]
            if one["kind"] == "pool" or one["role"] == "leader"
        }

    def wait_active(self, host: str, unit: str) -> None:
        """Wait until a unit runs. Raises `StepFailed` with the last lines of its journal."""
        deadline_s = self.now_s() + self.healthy_s
        while (state := self._state(host, unit)) != "active":
            if state == "failed" or self.now_s() >= deadline_s:
                raise self._not_active(host, unit, state)
            self.pause(_PAUSE_S)

    def wait_healthy(self, step: Step, *, release: str) -> None:
        """Wait until an instance runs and serves with a release. Raises `StepFailed`."""
        self.wait_active(step.host, step.unit)
        deadline_s = self.now_s() + self.healthy_s
        while reason := self._fault(step, release):
            if self.now_s() >= deadline_s or self._state(step.host, step.unit) == "failed":
                raise StepFailed(f"{step.host}: {step.unit}: {reason}")
            self.pause(_PAUSE_S)

    def _fault(self, step: Step, release: str) -> str:
        """Return why an instance is not healthy yet; "" for a healthy one, and for one that is not
        in discovery."""
        if not step.instance_id:
            return ""
        try:
            services = self.status()["services"]
        except StepFailed as error:
            return str(error)
        return fault(services, step, release)

    def _state(self, host: str, unit: str) -> str:
        ended: Ended = self.transports[host].run(["systemctl", "is-active", unit])
        state = ended.output.strip() or ended.reason
        return "active" if state == "inactive" and unit.startswith(MAY_END) else state

    def _not_active(self, host: str, unit: str, state: str) -> StepFailed:
        words = ["journalctl", "--unit", unit, "--lines=30", "--output=cat", "--no-pager"]
        cause = last_cause(self.transports[host].run(words).output)
        return StepFailed(f"{host}: {unit} is {state}: {cause}")


def last_cause(journal: str) -> str:
    """Return the cause of a failed start: the service's own line, or else the last one."""
    lines = journal.strip().splitlines() or ["its journal is empty"]
    starts = [number for number, line in enumerate(lines) if line.startswith("Starting ")]
    own = [line for line in lines[max(starts, default=0) :] if _CAUSE.match(line)]
    return (own or lines)[-1]


def fault(services: Sequence[Mapping[str, Any]], step: Step, release: str) -> str:
    """Return why the status of a cluster shows an instance as not healthy; "" for a healthy one.

    Of a replicated shard: that it has two copies, since its follower is not in discovery.
    """
    if step.kind == "pool-replica":
        shard = step.unit.partition("@")[2].removesuffix(".service")
        copies = [
            int(one["metadata"].get("copies", 0))
            for one in services
            if one["kind"] == "pool" and one["metadata"].get("shard") == shard
        ]
        return "" if max(copies, default=0) == 2 else f"shard {shard} has not two copies in sync"
    found = [one for one in services if one["instance"] == step.instance_id]
    if not found:
        return f"{step.instance_id} is not in discovery"
    for one in found:
        if one["state"] not in ("ready", "standby"):
            return f"{step.instance_id}: {one['error'] or one['state']}"
        if one["version"] != release:
            return f"{step.instance_id} has release {one['version']}, not {release}"
    return ""


def _program(release: str) -> Sequence[str]:
    """The command of a release. Not bin/forge: its first line may name the link, which leads to
    another release."""
    return (f"/opt/forge/{release}/bin/python", "-m", "forge.cli.main")


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _short(words: Sequence[str]) -> str:
    return " ".join(words)[:120]


def reachable(cluster: Cluster) -> Iterator[Unavailable]:
    """Yield an error for each host that cannot be reached, or lacks the rendered release."""
    answers = cluster.on_hosts(
        lambda host: cluster.transports[host].run(
            [*_program(cluster.manifests[host].release), "--version"]
        )
    )
    for host, ended in answers.items():
        manifest = cluster.manifests[host]
        if ended.code or ended.output.strip() != manifest.release:
            install = f"install forge {manifest.release} there"
            remedy = (
                f"{'start it' if ended.is_away else install}, or correct login in the inventory"
            )
            yield Unavailable(f"{host}: {ended.reason}; {remedy}")


def left_lines(host: str, installed: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each unit that an installation found to have left the inventory."""
    for unit in installed["stopped"]:
        yield f"{host}: {unit} left the inventory: stopped"
    for unit in installed["kept"]:
        yield (
            f"{host}: {unit} left the inventory and still runs; move its data, then: "
            f"systemctl disable --now {unit}"
        )
