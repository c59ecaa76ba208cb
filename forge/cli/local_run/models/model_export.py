"""Copies the kept model of a run to a model directory, without the state of training.

The trainer's code writes the names and shapes of the hub, in a process of its own: it needs torch
and transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from forge.cli.local_run.models.kept import MODEL_FILES, PUBLISHED_FILE, KeptModel, read_kept
from forge.cli.rundir import RunDirectory
from forge.core.errors import FailedPrecondition, NotFound, ResourceExhausted
from forge.core.extras import missing_packages
from forge.runtime.files.unfinished import new_directory

_STATE_OF_TRAINING = {
    *("master.safetensors", "adapter", "state", "learner.pt", "history.jsonl", "state.json")
}
_INDEX_FILE = "model.safetensors.index.json"
_CONVERSION = "services.trainer.checkpoint.hub_export"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """A model directory that was written."""

    kept: KeptModel
    """As it is in the directory."""
    published: str
    """Digest of the kept model in the checkpoint."""
    note: str
    """Why the names are those of transformers' modules; "" if they are those of the hub."""


def export_model(source: Path, out: Path) -> ExportedModel:
    """Writes the kept model of a run directory, or of one checkpoint, to the new directory `out`,
    with the names and shapes that it has on the hub. Compares the files with the published digest
    before; `out` appears complete or not at all.

    Raises `NotFound` when `source` keeps no model, `DataLoss` when its files are damaged,
    `FailedPrecondition` when `out` exists or the conversion fails, `ResourceExhausted` when it
    cannot be written.
    """
    checkpoint = _checkpoint_of(source)
    if out.exists():
        raise FailedPrecondition(f"--out {out} exists already: name another directory")
    published = read_kept(checkpoint)
    try:
        with new_directory(out) as filling:
            note = _fill(checkpoint, filling)
            kept = read_kept(filling)
            filling.chmod(0o755)
    except OSError as error:
        raise ResourceExhausted(f"--out {out} cannot be written: {error.strerror}") from None
    return ExportedModel(kept=replace(kept, path=out), published=published.digest, note=note)


def _fill(checkpoint: Path, filling: Path) -> str:
    """Write the files of the model; return why its names are not those of the hub."""
    written, note = _write_for_hub(checkpoint, filling)
    for file in checkpoint.iterdir():
        weights = file.suffix == ".safetensors" and file.name != MODEL_FILES[1]
        describes_weights = file.name in (PUBLISHED_FILE, _INDEX_FILE)
        of_model = file.name not in _STATE_OF_TRAINING
        if of_model and not (written and (weights or describes_weights)):
            shutil.copyfile(file, filling / file.name)
    return note


def _write_for_hub(checkpoint: Path, filling: Path) -> tuple[bool, str]:
    """Write the weights with the names of the hub, if these are others. Returns whether it did, and
    why it could not. Raises `OSError`."""
    if not (checkpoint / "config.json").is_file():
        return False, "config.json is missing"
    if missing := missing_packages(["trainer"]) & {"torch", "transformers", "safetensors"}:
        return False, f"not installed: {', '.join(sorted(missing))}"
    found = subprocess.run(
        [sys.executable, "-m", _CONVERSION, str(checkpoint), str(filling)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        said = found.stderr.strip().splitlines()[-1:] or [f"exit code {found.returncode}"]
        raise FailedPrecondition(
            f"the weights of {checkpoint} cannot be converted: {said[0]}. This directory is itself "
            "a model directory, with the names of transformers' modules"
        )
    outcome = json.loads(found.stdout.splitlines()[-1])
    if outcome["error"]:
        raise OSError(0, outcome["error"])
    return outcome["written"], outcome["reason"]


def _checkpoint_of(source: Path) -> Path:
    """Returns the newest checkpoint of a run, or `source` if it is a checkpoint."""
    newest = RunDirectory(source).checkpoints / "latest"
    if newest.is_dir():
        return newest.resolve()
    if any((source / name).is_file() for name in (PUBLISHED_FILE, *MODEL_FILES)):
        return source.resolve()
    raise NotFound(f"{source} is neither a run with a checkpoint nor a checkpoint")
