"""`forge doctor --engine NAME`: the checks of an engine, in the engine's own Python."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

from forge.cli.doctor.machine import template_findings
from forge.cli.finding import findings_of, report


def examine_engine(name: str, *, python: Path | None, model: Path | None) -> int:
    """Prints the findings of an engine as they come, and those of the model's chat template.
    `python`: the interpreter of the engine's environment, by default this one. Returns the exit
    code: 0 without problems, otherwise 1."""
    command = [str(python or sys.executable), "-m", "services.inference.engines.doctor", name]
    if model is not None:
        command += ["--model", str(model)]
    findings = findings_of(command, remedy=_REMEDY)
    if model is not None:
        findings = chain(findings, template_findings(str(model)))
    ok = True
    for finding in findings:
        report(finding)
        ok &= finding.ok
    return 0 if ok else 1


_REMEDY = "Name the Python of an environment with Forge and the engine: --engine-python."
