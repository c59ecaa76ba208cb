"""Gets the starting weights of a model onto disk.

The work itself needs torch and lives in the trainer's package; this module runs it as a process
of its own, so that the command line stays light.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from forge.core.errors import FailedPrecondition

TINY_COURSE = 4
"""Which lessons the tiny model's starting weights were taught. Raise it with every change of the
domains, of the split into training tasks and held-out tasks, or of the warm start: weights on disk
that were taught otherwise are then left alone, and not used."""


async def ensure_model(model: str, *, seed: int, root: Path) -> Path:
    """Directory of the model's starting weights, made or fetched when it is not there yet.

    Raises `FailedPrecondition` when that fails; the process has said why by then.
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
        try:
            models.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FailedPrecondition(
                f"{models}: {error.strerror}; name another place with --root"
            ) from None
        if await _run(command) != 0:
            raise FailedPrecondition(f"no starting weights for model {model!r}")
    return path.resolve()


def tiny_directory(root: Path, *, seed: int) -> Path:
    """Where the tiny model's starting weights of `seed` are kept."""
    return root / "models" / f"tiny-seed{seed}-course{TINY_COURSE}"


async def _run(module: Sequence[str]) -> int:
    """The exit code of `python -m`. Cancelled, it takes the process and its children along."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *module),
        # Threads that spin while they wait would starve each other on a busy machine.
        env={"OMP_WAIT_POLICY": "passive"} | os.environ,
        # A Ctrl-C is ours alone: it would answer with a traceback.
        start_new_session=True,
    )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
