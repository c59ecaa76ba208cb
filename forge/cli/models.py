"""Gets the starting weights of a model onto disk.

The work itself needs torch and lives in the trainer's package; this module runs it as a process
of its own, so that the command line stays light.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from forge.core.errors import FailedPrecondition


def ensure_model(model: str, *, seed: int, root: Path) -> Path:
    """Directory of the model's starting weights, made or fetched when it is not there yet.

    Raises `FailedPrecondition` when that fails; the process has said why by then.
    """
    models = root / "models"
    if model == "tiny":
        path = models / f"tiny-seed{seed}"
        command = ["services.trainer.warm_start", "--out", str(path), "--seed", str(seed)]
    elif Path(model).is_dir():
        return Path(model).resolve()
    else:
        path = models / model.replace("/", "_")
        command = ["services.trainer.model_fetch", model, "--out", str(path)]
    if not (path / "config.json").exists():
        try:
            models.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FailedPrecondition(
                f"{models}: {error.strerror}; name another place with --root"
            ) from None
        # Threads that spin while they wait would starve each other on a busy machine.
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ
        if subprocess.run([sys.executable, "-m", *command], env=environment).returncode != 0:
            raise FailedPrecondition(f"no starting weights for model {model!r}")
    return path.resolve()
