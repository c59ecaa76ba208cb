"""The settings of the services of this host, as `--print-config` of each prints them.

A directory like /etc/forge has one TOML file for each service, and `<service>@<instance>.env` with
variables of one instance, as the systemd units read them. The units have variables too.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.cli.rundir import RunDirectory
from forge.core.errors import InvalidArgument, NotFound

MODULES = {
    "agents": "forge.agents",
    "console": "services.console",
    "gateway": "services.gateway",
    "inference": "services.inference",
    "pool": "services.pool",
    "scheduler": "services.scheduler",
    "trainer": "services.trainer",
}
"""Program of each settings file, by the file's name without its ending."""
_FURTHER_UNITS = {"pool": ("pool-replica",), "trainer": ("trainer-rank",)}
"""Further units of a program."""
UNIT_SETTINGS = Path("/etc/forge")
"""Directory that the systemd units read."""
_LIMIT_S = 60.0
NO_END = "no end within"
"""Begin of the error of a program that was still busy at the time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One service with the flags and variables that it is started with."""

    name: str
    module: str
    flags: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    """File with the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedSettings:
    """The settings of a program, or why it has none."""

    program: Program
    text: str
    """TOML; empty with errors."""
    errors: tuple[str, ...] = ()
    """One line for each wrong setting, and for each fault of this host that `--check` finds."""

    def value(self, key: str) -> Any:
        """Returns a setting, "" if there is none. `key`: `name`, or `table.name`."""
        found: Any = tomllib.loads(self.text)
        for part in key.split("."):
            found = found.get(part, "") if isinstance(found, dict) else ""
        return found


def programs_in(directory: Path) -> list[Program]:
    """Returns the services with a file in a settings directory, one for each instance with
    variables of its own; in /etc/forge also those of its systemd unit. Raises `InvalidArgument`
    for a directory without settings."""
    try:
        instances = _of_units() if directory.resolve() == UNIT_SETTINGS else {}
        files = {file.stem: _variables(file.read_text()) for file in directory.glob("*.env")}
        for name in sorted({*instances, *(one for one in files if "@" in one)}):
            # Of all instances, as of the ranks of a trainer, then of this one.
            for one in (name.partition("@")[0], name):
                instances.setdefault(name, {}).update(files.get(one, {}))
    except OSError as error:
        raise InvalidArgument(f"{error.filename}: {error.strerror}") from None
    found = []
    for name in MODULES:
        kinds = (name, *_FURTHER_UNITS.get(name, ()))
        own = {at: one for at, one in instances.items() if at.partition("@")[0] in kinds}
        source = str(directory / f"{name}.toml")
        if Path(source).exists():
            found += [
                Program(
                    name=instance,
                    module=MODULES[name],
                    flags=("--config", source),
                    environ=environ,
                    source=source,
                )
                for instance, environ in (own or {name: {}}).items()
            ]
    if not found:
        names = ", ".join(f"{name}.toml" for name in MODULES)
        raise InvalidArgument(f"{directory} has no settings of a service: none of {names}")
    return found


def programs_of_run(directory: Path) -> list[Program]:
    """Returns the services of a run, as it started them last, named `run/NAME`. Raises
    `NotFound`."""
    file = RunDirectory(directory).processes
    try:
        started = json.loads(file.read_text())
    except (OSError, ValueError):
        raise NotFound(f"{file} is missing: the run was started by an earlier release") from None
    return [
        Program(
            name=f"run/{name}", module=one["module"], flags=tuple(one["flags"]), source=str(file)
        )
        for name, one in started.items()
    ]


def _of_units() -> dict[str, dict[str, str]]:
    """Returns the variables in the units of this host's services, by `<service>@<instance>`."""
    listed = _systemctl("list-units", "--all", "--plain", "--no-legend", "forge-*@*.service")
    units = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return {
        unit.removeprefix("forge-").removesuffix(".service"): _variables(
            _systemctl("show", "--property=Environment", "--value", unit)
        )
        for unit in units
    }


def _systemctl(*words: str) -> str:
    try:
        ended = subprocess.run(
            ["systemctl", *words], capture_output=True, text=True, timeout=_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout


def _variables(text: str) -> dict[str, str]:
    """Returns NAME=value pairs as systemd reads them, from lines or from one line."""
    return dict(
        word.split("=", 1)
        for line in text.splitlines()
        for word in shlex.split(line, comments=True)
        if "=" in word
    )


def print_settings(programs: Sequence[Program], *, check: bool) -> list[PrintedSettings]:
    """Returns the settings of programs; with `check` also the faults that their `--check` finds."""

    def one(program: Program) -> PrintedSettings:
        printed = _run(program, "--print-config")
        if printed.returncode or not check:
            return _read(program, printed)
        return _read(program, _run(program, "--check"), text=printed.stdout)

    # Two at once: each is a Python that imports the code of its service.
    with ThreadPoolExecutor(max_workers=2) as threads:
        return list(threads.map(one, programs))


def _run(program: Program, mode: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", program.module, *program.flags, mode]
    environ = {**os.environ, **program.environ}
    try:
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 1, "", f"{NO_END} {_LIMIT_S:g} s")


def _read(
    program: Program, ended: subprocess.CompletedProcess[str], *, text: str = ""
) -> PrintedSettings:
    if not ended.returncode:
        return PrintedSettings(program=program, text=text or ended.stdout)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("forge ")]
    errors = [line.partition(": ")[2] for line in lines] or ended.stderr.splitlines()[-1:]
    return PrintedSettings(
        program=program, text=text, errors=tuple(errors) or (f"exit code {ended.returncode}",)
    )
