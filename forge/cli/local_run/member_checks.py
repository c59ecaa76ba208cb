"""Checks of the processes of a stack by their own programs, before the start.

Owns the choice of the checks that a resumed run repeats. `--check` of each service owns the checks.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Collection, Mapping
from dataclasses import replace

from forge.cli.local_run.presets import PROCESSES
from forge.cli.local_run.programs import run_module
from forge.cli.local_run.stack import Member, StackPlan, flags_of, members, quiet_environment
from forge.cli.rundir import RunDirectory
from forge.core.errors import ForgeError, InvalidArgument

_ANY_START = ("--etcd=", "--max-steps=", "--evaluation.tasks=")
"""Flags that may differ from start to start, without effect on the model."""


async def check_members(plan: StackPlan) -> list[ForgeError]:
    """Checks the settings and this host with the programs themselves; returns all problems."""
    served = served_flags(plan.directory)
    checked = [to_check(plan, member, served.get(member.name, ())) for member in members(plan)]
    ended = await asyncio.gather(
        *(
            run_module(
                member.module,
                ("--check", *flags_of(plan, member, plan.etcd)),
                quiet_environment(),
                quiet=True,
                python=member.python,
            )
            for member in checked
        )
    )
    names: dict[str, list[str]] = {}
    for member, (code, output) in zip(checked, ended, strict=True):
        for problem in _problems(code, output):
            names.setdefault(_as_given(plan, member, problem), []).append(member.name)
    return [
        InvalidArgument(f"{', '.join(each)} cannot start: {problem}")
        for problem, each in names.items()
    ]


def _problems(code: int, output: str) -> list[str]:
    """Returns those that a check found, or why it found none."""
    if code == 0:
        return []
    lines = output.splitlines()
    if found := [line.partition(": ")[2] for line in lines if line.startswith("forge ")]:
        return found
    if code < 0:
        hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
        return [f"its check was killed by {signal.Signals(-code).name}{hint}"]
    return lines[-1:] or [f"its check ended with exit code {code} and without a message"]


def _as_given(plan: StackPlan, member: Member, problem: str) -> str:
    """Returns a problem of a flag as one of the `--set` that it comes from."""
    flag, _, text = problem.partition(": ")
    # Gateways have the settings of one service, and names of their own.
    service = "gateway" if member.module == PROCESSES["gateway"] else member.name
    key = flag.removeprefix("--").replace("-", "_")
    if not flag.startswith("--") or key not in plan.settings.get(service, {}):
        return problem
    pages = f"`python -m {member.module} --help` and the reference page Settings have them"
    return f"--set {service}.{key}: {text.replace('see --help', pages)}"


def served_flags(directory: RunDirectory) -> Mapping[str, Collection[str]]:
    """Returns the flags of each process at the last start of a run that has sampled its model."""
    state = directory.load()
    if state is None or state.phase == "before":
        return {}
    try:
        started = json.loads(directory.processes.read_text())
    except (OSError, ValueError):
        return {}
    return {name: one["flags"] for name, one in started.items()}


def to_check(plan: StackPlan, member: Member, served: Collection[str]) -> Member:
    """Returns the member without its model if it has served it with the same settings: torch is
    imported for a check of the model alone, for seconds."""
    if _fixed(flags_of(plan, member, plan.etcd)) != _fixed(served):
        return member
    return replace(member, settings={k: v for k, v in member.settings.items() if k != "model_path"})


def _fixed(flags: Collection[str]) -> set[str]:
    return {flag for flag in flags if not flag.startswith(_ANY_START)}
