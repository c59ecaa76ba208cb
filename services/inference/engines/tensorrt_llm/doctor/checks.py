"""Findings of `forge doctor --engine tensorrt_llm`: library, features, GPUs, checklist."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from forge.core.errors import ConfigError
from services.inference.engines.provider import EngineFinding
from services.inference.engines.tensorrt_llm.doctor.checklist import CHECKS, run_checks
from services.inference.engines.tensorrt_llm.library.library import (
    Found,
    find_library,
    load_library,
)
from services.inference.engines.tensorrt_llm.library.surface import TARGET, Feature

_COMMAND = "In an environment of Python 3.12: pip install -r deploy/requirements/tensorrt-llm.txt ."
_GPUS = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
_DISTRIBUTIONS = ("tensorrt_llm", "tensorrt-llm")


def examine(model_path: str = "", *, root: Path | None = None) -> Iterator[EngineFinding]:
    """Yield findings. `root`: folder of the library, if not the installed one. With a GPU and
    `model_path` the checklist runs, which takes minutes."""
    try:
        found = find_library(root)
    except ConfigError as error:
        yield EngineFinding(ok=False, text=str(error), remedy=_COMMAND)
        found = None
    if found is not None:
        yield from _library_findings(found)
    gpus = _gpus()
    yield EngineFinding(
        ok=bool(gpus),
        text=f"GPUs: {'; '.join(gpus)}" if gpus else "no NVIDIA GPU is visible",
        remedy="Install the NVIDIA driver, and make GPUs visible (nvidia-smi -L).",
    )
    yield from _checklist(found, model_path, has_gpu=bool(gpus))


def _library_findings(found: Found) -> Iterator[EngineFinding]:
    yield EngineFinding(ok=True, text=f"tensorrt_llm {found.version} in {found.root}")
    python = ".".join(map(str, sys.version_info[:2]))
    yield EngineFinding(
        ok=python in found.surface.pythons,
        text=f"Python {python}; tensorrt_llm has wheels for {', '.join(found.surface.pythons)}",
        remedy="Make the environment of this engine with Python 3.12.",
    )
    yield from _surface(found)
    yield EngineFinding(
        ok=find_spec("ray") is not None,
        text="ray" if find_spec("ray") else "ray is missing: weights are updated through Ray alone",
        remedy="pip install 'ray[default]', which tensorrt_llm does not require by itself.",
    )
    yield _requirements()


def _surface(found: Found) -> Iterator[EngineFinding]:
    """Differences to the surface, then features."""
    for one in found.differences:
        yield EngineFinding(
            ok=False,
            text=f"{one.path}: {one.text}",
            remedy=f"Install tensorrt_llm {found.surface.version}, or another with a surface.",
        )
    if not found.differences:
        yield EngineFinding(ok=True, text=f"surface {found.surface.version}: no difference")
    had = sorted(one.value for one in found.features)
    yield EngineFinding(ok=True, text=f"features: {', '.join(had) or 'none'}")
    for feature in Feature:
        if feature not in found.features:
            lacks = ", ".join(found.surface.missing(feature))
            yield EngineFinding(
                ok=True, text=f"lacks {feature.value} ({lacks}): install {TARGET} or newer for it"
            )


def _requirements() -> EngineFinding:
    """Compare the environment with the requirements in the library's own metadata."""
    wrong = []
    for name in _DISTRIBUTIONS:
        try:
            demanded = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        wrong = [problem for text in demanded if (problem := _unmet(Requirement(text)))]
        break
    return EngineFinding(
        ok=not wrong,
        text=f"packages: {', '.join(wrong[:5])}" if wrong else "packages",
        remedy=_COMMAND,
    )


def _unmet(requirement: Requirement) -> str:
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return ""
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(version, prereleases=True):
        return ""
    return f"{requirement.name} {version} is not {requirement.specifier}"


def _gpus() -> list[str]:
    try:
        shown = subprocess.run(_GPUS, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in shown.stdout.splitlines() if line.strip()]


def _checklist(found: Found | None, model_path: str, *, has_gpu: bool) -> Iterator[EngineFinding]:
    reasons = {
        "there is no GPU": not has_gpu,
        "the library cannot be used": found is None or bool(found.differences),
        "no model is named (--model DIRECTORY)": not model_path,
    }
    reason = next((text for text, applies in reasons.items() if applies), "")
    if reason or found is None:
        for check in CHECKS:
            yield EngineFinding(ok=True, text=f"not run: {check.text}; {reason}", was_run=False)
        return
    library = load_library(found)
    for check, problem in asyncio.run(run_checks(library, Path(model_path))):
        yield EngineFinding(
            ok=not problem,
            text=f"{check.text}{f': {problem}' if problem else ''}",
            remedy=check.remedy,
        )
