"""Checkpoints as earlier releases wrote them: all state in learner.pt, and no state/."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from forge.rl.parallel.state_memory import placed
from services.trainer.checkpoint.reading import fill_learner, master_weights, read_learner


def as_format_2(path: Path) -> None:
    """Rewrite a checkpoint in place."""
    outline = read_learner(path)
    if not (path / "adapter").exists():
        master = master_weights(path, adapters=False)
        if master.source.name == "state":
            save_file(master.read(), path / "master.safetensors", metadata={"format": "pt"})
    state = placed(outline)
    fill_learner(state, outline, path)
    del state["random_states"]
    if "heads" in state["mtp"] and not (path / "master.safetensors").exists():
        del state["mtp"]["heads"]
    torch.save(state, path / "learner.pt")
    shutil.rmtree(path / "state")
    as_listed(path, format=2)


def as_listed(path: Path, **changed: object) -> None:
    """Let state.json list the files that are there now."""
    about = json.loads((path / "state.json").read_text()) | changed
    about["files"] = {
        str(file.relative_to(path)): file.stat().st_size
        for file in path.rglob("*")
        if file.is_file() and file.name != "state.json"
    }
    (path / "state.json").write_text(json.dumps(about))
