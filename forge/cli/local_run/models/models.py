"""Makes or fetches the starting weights of a model.

The trainer's package does the work, which needs torch; this module runs it as a separate process,
so the command line stays light.
"""

from __future__ import annotations

import os
from pathlib import Path

from forge.cli.local_run.programs import run_module
from forge.core.errors import FailedPrecondition
from forge.core.extras import require_extra

TINY_COURSE = 4
"""Version of the tiny model's warm start. Increment it with every change of the domains, of the
split into training tasks and held-out tasks, or of the warm start: existing weights of another
version are then ignored."""


async def ensure_model(model: str, *, seed: int, root: Path) -> Path:
    """Returns the directory of the model's starting weights; makes or fetches missing ones.

    Raises `FailedPrecondition` on a failure, after the process has printed the reason, and
    `ConfigError` without the packages that it needs.
    """
    models = root / "models"
    if model == "tiny":
        path = tiny_directory(root, seed=seed)
        command = [
            "services.trainer.starting_weights.tiny",
            "--out",
            str(path),
            "--seed",
            str(seed),
        ]
    elif Path(model).is_dir():
        return Path(model).resolve()
    else:
        path = models / model.replace("/", "_")
        command = ["services.trainer.starting_weights.fetch", model, "--out", str(path)]
    if not (path / "config.json").exists():
        require_extra("trainer")
        try:
            models.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FailedPrecondition(
                f"{models}: {error.strerror}; name another directory with --root"
            ) from None
        # Threads that spin while they wait would slow each other down on a busy machine.
        env = {"OMP_WAIT_POLICY": "passive"} | os.environ
        code, _ = await run_module(command[0], command[1:], env)
        if code != 0:
            raise FailedPrecondition(f"no starting weights for model {model!r}")
    return path.resolve()


def tiny_directory(root: Path, *, seed: int) -> Path:
    """Returns the directory of the tiny model's starting weights for `seed`."""
    return root / "models" / f"tiny-seed{seed}-course{TINY_COURSE}"
