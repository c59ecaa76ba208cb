"""Copies the kept model of a run to a model directory, without the state of training."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from forge.cli.local_run.models.kept import MODEL_FILES, PUBLISHED_FILE, KeptModel, read_kept
from forge.cli.rundir import RunDirectory
from forge.core.errors import FailedPrecondition, NotFound, ResourceExhausted

_STATE_OF_TRAINING = {
    *("master.safetensors", "adapter", "state", "learner.pt", "history.jsonl", "state.json")
}


def export_model(source: Path, out: Path) -> KeptModel:
    """Copies the kept model of a run directory, or of one checkpoint, to the new directory `out`,
    and returns it. Compares the files with the published digest before the copy; `out` appears
    complete or not at all.

    Raises `NotFound` when `source` keeps no model, `DataLoss` when its files are damaged,
    `FailedPrecondition` when `out` exists, `ResourceExhausted` when it cannot be written.
    """
    checkpoint = _checkpoint_of(source)
    if out.exists():
        raise FailedPrecondition(f"--out {out} exists already: name another directory")
    read_kept(checkpoint)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        filling = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            for file in checkpoint.iterdir():
                if file.name not in _STATE_OF_TRAINING:
                    shutil.copyfile(file, filling / file.name)
            copied = read_kept(filling)
            filling.chmod(0o755)
            filling.rename(out)
        finally:
            shutil.rmtree(filling, ignore_errors=True)
    except OSError as error:
        raise ResourceExhausted(f"--out {out} cannot be written: {error.strerror}") from None
    return replace(copied, path=out)


def _checkpoint_of(source: Path) -> Path:
    """Returns the newest checkpoint of a run, or `source` if it is a checkpoint."""
    newest = RunDirectory(source).checkpoints / "latest"
    if newest.is_dir():
        return newest.resolve()
    if any((source / name).is_file() for name in (PUBLISHED_FILE, *MODEL_FILES)):
        return source.resolve()
    raise NotFound(f"{source} is neither a run with a checkpoint nor a checkpoint")
