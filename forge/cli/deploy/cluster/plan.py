"""The order of a roll: steps of an upgrade, and those of its rollback. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forge.cli.deploy.inventory.kinds import ETCD, KINDS, RANKS
from forge.cli.deploy.render.rendered import Manifest, UnitEntry

Action = Literal["copy", "swap", "drain", "stop", "restart", "check", "roles", "back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step on one host. Each can be repeated."""

    action: Action
    host: str
    unit: str = ""
    kind: str = ""
    instance_id: str = ""
    further: tuple[str, ...] = ()
    """Units that restart at the same time."""

    @property
    def units(self) -> tuple[str, ...]:
        """All units of the step."""
        return (self.unit, *self.further) if self.unit else ()

    def __str__(self) -> str:
        """Returns a line of the plan."""
        words = {
            "copy": "copy its files",
            "swap": "install the files, lead /opt/forge/.venv to the release",
            "drain": f"drain {self.instance_id}",
            "stop": f"stop {self.unit}",
            "restart": f"restart {', '.join(self.units)}",
            "check": f"wait until {self.unit} is healthy",
            "roles": "apply users, roles and tokens of etcd",
            "back": "install the files and the release of before",
        }
        return f"{self.host}: {words[self.action]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUnit:
    """A unit of a host."""

    host: str
    unit: UnitEntry

    def step(self, action: Action) -> Step:
        """Return a step of it."""
        one = self.unit
        return Step(
            action=action,
            host=self.host,
            unit=one.name,
            kind=one.kind,
            instance_id=one.instance_id,
        )


def roll_order(
    manifests: Mapping[str, Manifest], leaders: Collection[str]
) -> list[tuple[HostUnit, ...]]:
    """Return the units of all hosts but etcd's: kind by kind, of each the leaders last. Those in
    one entry restart together: the ranks of a trainer, and of a host one worker of each role, since
    without the other one each would only wait."""
    kinds = list(KINDS)
    found = [
        HostUnit(host=host, unit=unit)
        for host, manifest in manifests.items()
        for unit in manifest.units
        if unit.kind != ETCD
    ]
    found.sort(key=lambda one: (kinds.index(one.unit.kind), one.unit.instance_id in leaders))
    together: dict[tuple[str, ...], list[HostUnit]] = {}
    for one in found:
        together.setdefault(_turn(one), []).append(one)
    ranks = sorted(together.get((RANKS,), ()), key=lambda one: one.unit.name)
    return [tuple(ranks if turn == (RANKS,) else units) for turn, units in together.items()]


def _turn(one: HostUnit) -> tuple[str, ...]:
    """Units with an equal turn restart together."""
    kind = KINDS[one.unit.kind]
    if one.unit.kind == RANKS:
        return (RANKS,)
    if kind.drains:
        number = one.unit.name.partition("@")[2].rpartition("-")[2]
        return (one.host, kind.service, number)
    return (one.host, one.unit.name)


def needed(together: Sequence[HostUnit], units: Mapping[str, Collection[str]]) -> list[HostUnit]:
    """Return those that restart for these units, by host: of ranks all, or none."""
    found = [one for one in together if one.unit.name in units[one.host]]
    return [*together] if found and found[0].unit.kind == RANKS else found


def upgrade_steps(manifests: Mapping[str, Manifest], leaders: Collection[str]) -> list[Step]:
    """Return the steps of an upgrade. `leaders`: ids of instances that lead now.

    A host changes its release right before its first unit restarts.
    """
    admin = next(host for host, manifest in manifests.items() if manifest.is_admin)
    steps = [Step(action="copy", host=host) for host in manifests]
    swapped: set[str] = set()
    for together in roll_order(manifests, leaders):
        for host in (one.host for one in together):
            if host not in swapped:
                swapped.add(host)
                steps.append(Step(action="swap", host=host))
        steps += restart_steps(together)
    steps += [Step(action="swap", host=host) for host in manifests if host not in swapped]
    return [*steps, Step(action="roles", host=admin)]


def restart_steps(together: Sequence[HostUnit]) -> Iterator[Step]:
    """Yield the steps of units that restart together.

    Rank 0 stops first: it writes a checkpoint with all ranks. A stop of another host would cost the
    steps since the last checkpoint. All hosts stop before one starts: a changing number of them
    would meet without host 0.
    """
    first, *others = together
    if first.unit.kind == RANKS and others:
        for one in together:
            yield one.step("stop")
        for one in (*others, first):
            yield one.step("restart")
    else:
        for one in together:
            if KINDS[one.unit.kind].drains:
                yield one.step("drain")
        names = tuple(one.unit.name for one in others)
        yield replace(first.step("restart"), further=names)
    for one in (*others, first):
        yield one.step("check")


def rollback_steps(steps: Sequence[Step], begun: int) -> list[Step]:
    """Return the steps that undo the first `begun` steps of an upgrade: first all hosts get their
    release back, then units restart in the reverse order."""
    done = steps[:begun]
    hosts = dict.fromkeys(step.host for step in done if step.action == "swap")
    back = [Step(action="back", host=host) for host in reversed(hosts)]
    restarted = [one for one in reversed(done) if one.action in ("drain", "stop", "restart")]
    ranks = [
        one for one in steps if one.kind == RANKS and one.action in ("stop", "restart", "check")
    ]
    turned: set[tuple[str, str]] = set()
    for step in restarted:
        units = {(step.host, unit) for unit in step.units}
        if step.kind == RANKS:
            # All ranks together, once, in the order of the upgrade.
            back += ranks
            ranks = []
        elif not units & turned:
            # It also ends a drain.
            back.append(replace(step, action="restart"))
            back += [
                one for one in steps if one.action == "check" and (one.host, one.unit) in units
            ]
        turned |= units
    return back
