"""`forge doctor --engine NAME`: the checks of an engine, in the engine's own Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from forge.cli.doctor import Finding, report


def examine_engine(name: str, *, python: Path | None = None, model: Path | None = None) -> int:
    """Prints the findings of an engine as they come. `python`: the interpreter of its environment,
    by default this one. Returns the exit code: 0 without problems, otherwise 1."""
    command = [str(python or sys.executable), "-m", "services.inference.engines.doctor", name]
    if model is not None:
        command += ["--model", str(model)]
    ok = True
    for finding in _findings(command):
        report(finding)
        ok &= finding.ok
    return 0 if ok else 1


def _findings(command: list[str]) -> Iterator[Finding]:
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as error:
        yield Finding(ok=False, text=f"{command[0]}: {error}", remedy=_REMEDY)
        return
    assert process.stdout is not None
    for line in process.stdout:
        # Other lines are logs of the engine.
        if line.startswith("{"):
            yield Finding(**json.loads(line))
    _, errors = process.communicate()
    if process.returncode:
        reason = errors.strip().rpartition("\n")[2] or f"exit code {process.returncode}"
        yield Finding(ok=False, text=f"the checks ended early: {reason}", remedy=_REMEDY)


_REMEDY = "Name the Python of an environment with Forge and the engine: --engine-python."
