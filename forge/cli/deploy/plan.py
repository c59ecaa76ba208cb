"""The order of a roll: steps of an upgrade, and those of its rollback. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forge.cli.deploy.kinds import ETCD, KINDS
from forge.cli.deploy.rendered import Manifest, UnitEntry

Action = Literal["copy", "swap", "drain", "restart", "check", "roles", "back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step on one host. Each can be repeated."""

    action: Action
    host: str
    unit: str = ""
    kind: str = ""
    instance_id: str = ""

    def __str__(self) -> str:
        """Returns a line of the plan."""
        words = {
            "copy": "copy its files",
            "swap": "install the files, lead /opt/forge/.venv to the release",
            "drain": f"drain {self.instance_id}",
            "restart": f"restart {self.unit}",
            "check": f"wait until {self.unit} is healthy",
            "roles": "apply users, roles and tokens of etcd",
            "back": "install the files and the release of before",
        }
        return f"{self.host}: {words[self.action]}"


def roll_order(
    manifests: Mapping[str, Manifest], leaders: Collection[str]
) -> list[tuple[str, UnitEntry]]:
    """Return the units of all hosts but etcd's: kind by kind, of each the leaders last."""
    kinds = list(KINDS)
    found = [
        (host, unit)
        for host, manifest in manifests.items()
        for unit in manifest.units
        if unit.kind != ETCD
    ]
    return sorted(found, key=lambda one: (kinds.index(one[1].kind), one[1].instance_id in leaders))


def upgrade_steps(manifests: Mapping[str, Manifest], leaders: Collection[str]) -> list[Step]:
    """Return the steps of an upgrade. `leaders`: ids of instances that lead now.

    A host changes its release right before its first unit restarts.
    """
    admin = next(host for host, manifest in manifests.items() if manifest.is_admin)
    steps = [Step(action="copy", host=host) for host in manifests]
    swapped: set[str] = set()
    for host, unit in roll_order(manifests, leaders):
        if host not in swapped:
            swapped.add(host)
            steps.append(Step(action="swap", host=host))
        steps += restart_steps(host, unit)
    steps += [Step(action="swap", host=host) for host in manifests if host not in swapped]
    return [*steps, Step(action="roles", host=admin)]


def restart_steps(host: str, unit: UnitEntry) -> Iterator[Step]:
    """Yield the steps of one unit."""
    named = {
        "host": host,
        "unit": unit.name,
        "kind": unit.kind,
        "instance_id": unit.instance_id,
    }
    if unit.kind in KINDS and KINDS[unit.kind].drains:
        yield Step(action="drain", **named)
    yield Step(action="restart", **named)
    yield Step(action="check", **named)


def rollback_steps(steps: Sequence[Step], begun: int) -> list[Step]:
    """Return the steps that undo the first `begun` steps of an upgrade: first all hosts get their
    release back, then units restart in the reverse order."""
    done = steps[:begun]
    hosts = dict.fromkeys(step.host for step in done if step.action == "swap")
    back = [Step(action="back", host=host) for host in reversed(hosts)]
    restarted = [one for one in reversed(done) if one.action in ("drain", "restart")]
    # A restart also ends a drain.
    for step in {(one.host, one.unit): one for one in restarted}.values():
        back += [replace(step, action="restart"), replace(step, action="check")]
    return back
