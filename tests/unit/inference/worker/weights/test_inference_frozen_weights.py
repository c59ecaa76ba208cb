"""Frozen weights: the files of a model directory that are served."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from services.inference.worker.weights.frozen_weights import read_weights


def test_checkpoint_is_read_with_its_draft_heads(tmp_path: Path) -> None:
    """The published model and its heads, not the master weights of the optimizer."""
    for file, name in (("model", "w"), ("mtp", "mtp.0.gate.weight"), ("master", "w")):
        save_file({name: torch.full((2,), float(len(file)))}, tmp_path / f"{file}.safetensors")
    found = read_weights(tmp_path)
    assert sorted(found) == ["mtp.0.gate.weight", "w"]
    assert bytes(found["w"].data) == torch.full((2,), 5.0).numpy().tobytes()
