"""`forge deploy upgrade`: performs the steps of a plan, and undoes them after a failure.

Owns the journal, by which an interrupted upgrade continues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from forge.cli.deploy.cluster.cluster import Cluster, HostAway, StepFailed, reachable
from forge.cli.deploy.cluster.plan import Step, rollback_steps, upgrade_steps
from forge.cli.deploy.inventory.kinds import RANKS
from forge.core.errors import FailedPrecondition, raise_all
from forge.runtime.files.private import replace_private_file

JOURNAL = "upgrade.json"
_LINK = ("readlink", "/opt/forge/.venv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """An upgrade: its steps, and how many are done."""

    to: str
    before: str
    """Release that a rollback restores."""
    steps: list[Step]
    done: int = 0
    state: Literal["rolling", "rolling back", "done", "rolled back"] = "rolling"
    back: list[Step] = field(default_factory=list)
    undone: int = 0
    reason: str = ""
    """Reason of the rollback."""

    @property
    def is_open(self) -> bool:
        """Whether steps are left."""
        return self.state in ("rolling", "rolling back")

    @property
    def progress(self) -> str:
        """The releases that units run, as a clause."""
        units = {(one.host, one.unit) for one in self.steps if one.action == "check"}
        begun = self.steps[: self.done + 1]
        turned = {(one.host, unit) for one in begun for unit in one.units}
        back = {(one.host, one.unit) for one in self.back[: self.undone] if one.action == "check"}
        have = len(turned - back)
        return f"{have} of {len(units)} units may run {self.to}, the others run {self.before}"


class Upgrade:
    """One upgrade of a rendered cluster."""

    def __init__(self, cluster: Cluster, report: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._report = report
        self._file = cluster.out / JOURNAL

    def plan(self) -> Journal:
        """Return the open upgrade, or a new one. Raises `FailedPrecondition` for an open one to
        another release, `Unavailable` for a host that is not ready for it."""
        (to,) = {one.release for one in self._cluster.manifests.values()}
        journal = read_journal(self._file)
        if journal is not None and journal.is_open:
            if journal.to != to:
                raise FailedPrecondition(
                    f"the upgrade to {journal.to} is not finished; render release {journal.to} "
                    "and finish it, or roll it back with --rollback"
                )
            return journal
        raise_all(list(reachable(self._cluster)))
        links = {host: self._cluster.run(host, *_LINK).strip() for host in self._cluster.manifests}
        if (journal is None or journal.state == "done") and set(links.values()) == {to}:
            raise FailedPrecondition(
                f"every host has release {to}; forge deploy apply installs changed settings"
            )
        before = sorted({link for link in links.values() if link != to}) or [to]
        if len(before) > 1:
            raise FailedPrecondition(
                f"hosts have the releases {', '.join(before)}; a rollback needs one"
            )
        steps = upgrade_steps(self._cluster.manifests, self._cluster.leaders())
        return Journal(to=to, before=before[0], steps=steps)

    def begun(self) -> Journal:
        """Return the open upgrade. Raises `FailedPrecondition` without one."""
        journal = read_journal(self._file)
        if journal is None or not journal.is_open:
            raise FailedPrecondition("no upgrade is open: --rollback undoes an unfinished one")
        return journal

    def run(self, journal: Journal) -> bool:
        """Perform the remaining steps; return whether the upgrade is done, False after a rollback.

        Raises `StepFailed` for a rollback that has steps left; the same command continues it.
        """
        if journal.state == "rolling":
            journal = self._forward(journal)
        if journal.state == "rolling back":
            journal = self._backward(journal)
        return journal.state == "done"

    def roll_back(self, journal: Journal, reason: str) -> Journal:
        """Turn an upgrade around; the step that may have begun is undone too."""
        back = rollback_steps(journal.steps, journal.done + 1)
        return self._save(replace(journal, state="rolling back", back=back, reason=reason))

    def _forward(self, journal: Journal) -> Journal:
        self._save(journal)
        while journal.done < len(journal.steps):
            step = journal.steps[journal.done]
            self._report(f"{journal.done + 1}/{len(journal.steps)} {step}")
            try:
                self._cluster.perform(step, release=journal.to)
            except StepFailed as error:
                self._report(f"failed: {error}")
                return self.roll_back(journal, str(error))
            journal = self._save(replace(journal, done=journal.done + 1))
        return self._save(replace(journal, state="done"))

    def _backward(self, journal: Journal) -> Journal:
        self._report(f"rolling back to {journal.before}: {journal.reason}")
        faults: list[_Fault] = []
        while journal.undone < len(journal.back):
            step = journal.back[journal.undone]
            if any(one.holds(step) for one in faults):
                raise StepFailed(self._unfinished(journal, faults))
            self._report(f"back {journal.undone + 1}/{len(journal.back)} {step}")
            try:
                self._cluster.perform(step, release=journal.before)
            except StepFailed as error:
                self._report(f"failed: {error}")
                faults.append(_Fault(step=step, error=error))
                back = faults[-1].deferred(journal.back, journal.undone)
                journal = self._save(replace(journal, back=back))
            else:
                journal = self._save(replace(journal, undone=journal.undone + 1))
        return self._save(replace(journal, state="rolled back"))

    def _unfinished(self, journal: Journal, faults: Sequence[_Fault]) -> str:
        left = len(journal.back) - journal.undone
        return (
            f"the rollback to {journal.before} is not finished, {left} steps are left: "
            f"{'; '.join(str(one.error) for one in faults)}. {journal.progress}. "
            f"Mend that, then repeat: forge deploy upgrade --out {self._cluster.out}"
        )

    def interrupted(self) -> str:
        """Return the state that an interruption leaves, and what continues, in a line."""
        journal = read_journal(self._file)
        if journal is None or not journal.is_open:
            return "interrupted: nothing was changed"
        command = f"forge deploy upgrade --out {self._cluster.out}"
        if journal.state == "rolling":
            at = f"at step {journal.done + 1} of {len(journal.steps)}"
            remedy = f"To continue: {command}; to undo it: {command} --rollback"
        else:
            at = f"at step {journal.undone + 1} of {len(journal.back)} of the rollback"
            remedy = f"To continue: {command}"
        return f"interrupted {at}, which may still run on its host: {journal.progress}. {remedy}"

    def _save(self, journal: Journal) -> Journal:
        # After the step: a kill in between repeats the step, which changes nothing more.
        replace_private_file(self._file, msgspec.json.encode(journal).decode() + "\n")
        return journal


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """A failed step of a rollback: the other hosts and units are rolled back without it."""

    step: Step
    error: StepFailed

    def holds(self, one: Step) -> bool:
        """Return whether a step cannot succeed before this one."""
        if isinstance(self.error, HostAway) or self.step.action == "back":
            return one.host == self.step.host
        if self.step.kind == RANKS:
            return one.kind == RANKS
        return one.host == self.step.host and not {*self.step.units}.isdisjoint(one.units)

    def deferred(self, steps: Sequence[Step], begin: int) -> list[Step]:
        """Return steps with those that this fault holds at the end, from a begin on."""
        return [*steps[:begin], *sorted(steps[begin:], key=self.holds)]


def read_journal(file: Path) -> Journal | None:
    """Return a stored upgrade; None for none. Raises `FailedPrecondition` for a damaged one."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Journal)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise FailedPrecondition(
            f"{file} is damaged: {error}; compare the hosts with forge deploy check, then remove it"
        ) from None
