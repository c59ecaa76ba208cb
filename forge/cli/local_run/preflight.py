"""Checks before `forge run` and `forge up` make weights or start a process.

Owns the checks of a stack on this machine. `--check` of each service owns those of its settings,
`forge.cli.doctor.machine` those of the machine.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

from forge.agents.environments import get_domain
from forge.agents.sandbox.program_sandbox import SANDBOX
from forge.cli.connection import CONNECT_S
from forge.cli.local_run.dataset import held_out_tasks
from forge.cli.local_run.member_checks import check_members
from forge.cli.local_run.presets import PRESETS, PROCESSES, Preset
from forge.cli.local_run.stack import StackPlan, etcd_binary, reach_etcd
from forge.core.errors import (
    ConfigError,
    FailedPrecondition,
    ForgeError,
    InvalidArgument,
    NotFound,
    raise_all,
)
from forge.core.extras import missing_packages, not_installed
from forge.runtime.process.host_check import failures, require_writable

_DOMAIN_TABLES = {
    "scheduler": ("queue.domain_shares", "domain_context_tokens", "domain_sampling"),
    "trainer": ("advantages.domain_weights",),
}
"""Settings by service: tables by domain."""


async def preflight(plan: StackPlan, preset: Preset, *, model: str, campaign: bool) -> None:
    """Raises one error with a line for each problem. Writes nothing.

    `campaign`: only the preset's domains are trained.
    """
    # Alone: every other file is below it.
    _require_directory(plan.directory.path)
    errors = failures(
        [
            lambda: _require_model(model),
            lambda: _require_own_ports(plan),
            lambda: _require_domains(plan, preset) if campaign else None,
            lambda: _require_packages(preset, campaign=campaign),
            lambda: held_out_tasks(preset.domains, seed=0, count=1, attempts=1, tag=""),
        ]
    )
    for found in await asyncio.gather(_etcd(plan), _sandbox(plan, preset), check_members(plan)):
        errors += found
    raise_all(errors)


def _require_directory(path: Path) -> None:
    try:
        require_writable("run directory", str(path))
    except ForgeError as error:
        raise InvalidArgument(f"{error}; name another directory with --root or --run-dir") from None


def _require_model(model: str) -> None:
    """Raises `NotFound` for a path without a directory; a hub id is known to the hub alone."""
    if model not in PRESETS and model.startswith((".", "/", "~")) and not Path(model).is_dir():
        problem = "is not a directory" if Path(model).exists() else "this directory does not exist"
        raise NotFound(f"--model {model}: {problem}; name another, or a hub id")


def _require_own_ports(plan: StackPlan) -> None:
    services = defaultdict(list)
    for name, chosen in plan.settings.items():
        for key in ("port", "metrics_port", "http.port", "bulk.port"):
            if (port := chosen.get(key, "0")) != "0":
                services[port].append(f"{name}.{key}")
    for port, keys in services.items():
        if len(keys) > 1:
            raise InvalidArgument(
                f"{' and '.join(keys)} are both {port}: choose different ones, or 0 for any free "
                "one"
            )


def _require_domains(plan: StackPlan, preset: Preset) -> None:
    for service, keys in _DOMAIN_TABLES.items():
        for key in keys:
            table = plan.settings.get(service, {}).get(key, "")
            names = [pair.partition("=")[0].strip() for pair in table.split(",") if pair.strip()]
            if unknown := sorted({*names} - preset.domains.keys()):
                raise InvalidArgument(
                    f"{service}.{key} = {table!r}: this run has no domain {', '.join(unknown)}; "
                    f"it has {', '.join(preset.domains)}"
                )


def _require_packages(preset: Preset, *, campaign: bool) -> None:
    """Raises `ConfigError` without a package of a service, or without the SDK of the campaign's
    agents. Of the extra `agents` a runner needs no more: bubblewrap may be the system's."""
    services = [
        module.partition(".")[2]
        for module in dict.fromkeys(PROCESSES.values())
        if module.startswith("services.")
    ]
    missing = missing_packages(services)
    if campaign and any(get_domain(name).scaffold == "blackbox" for name in preset.domains):
        missing |= missing_packages(["agents"]) & {"openai"}
    if missing:
        raise ConfigError(not_installed(missing, "all"))


async def _etcd(plan: StackPlan) -> list[ForgeError]:
    try:
        if plan.etcd:
            await reach_etcd(plan.etcd, cluster=plan.cluster, timeout_s=CONNECT_S)
        else:
            etcd_binary()
    except ForgeError as error:
        return [error]
    return []


async def _sandbox(plan: StackPlan, preset: Preset) -> list[ForgeError]:
    unsafe = plan.settings.get("runner", {}).get("unsafe_sandbox", "").lower() == "true"
    if "code" not in preset.domains or unsafe:
        return []
    probe = asyncio.create_task(SANDBOX.problem())
    try:
        problem = await asyncio.shield(probe)
    finally:
        # A cancel while asyncio starts the process of the probe would print a warning.
        await probe
    if not problem:
        return []
    return [FailedPrecondition(problem.replace("set unsafe", "pass --set runner.unsafe"))]
