"""`forge doctor --engine NAME`: the checks of an engine, in the engine's own Python."""

from __future__ import annotations

import sys
from pathlib import Path

from forge.cli.finding import findings_of, report


def examine_engine(name: str, *, python: Path | None, model: Path | None) -> int:
    """Prints the findings of an engine as they come. `python`: the interpreter of its environment,
    by default this one. Returns the exit code: 0 without problems, otherwise 1."""
    command = [str(python or sys.executable), "-m", "services.inference.engines.doctor", name]
    if model is not None:
        command += ["--model", str(model)]
    ok = True
    for finding in findings_of(command, remedy=_REMEDY):
        report(finding)
        ok &= finding.ok
    return 0 if ok else 1


_REMEDY = "Name the Python of an environment with Forge and the engine: --engine-python."
