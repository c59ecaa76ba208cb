"""Frozen weights: the files of a model directory that are served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from forge.core.named_tensor import NamedTensor
from services.inference.engines.base import UnfitWeights
from services.inference.engines.tensor_bytes import from_named
from services.inference.engines.weight_checks import match_names
from services.inference.worker.weights.frozen_weights import load_frozen, read_weights
from tests.support.rl.models import tiny_model


def test_checkpoint_is_read_with_its_draft_heads(tmp_path: Path) -> None:
    """The published model and its heads, not the master weights of the optimizer."""
    for file, name in (("model", "w"), ("mtp", "mtp.0.gate.weight"), ("master", "w")):
        save_file({name: torch.full((2,), float(len(file)))}, tmp_path / f"{file}.safetensors")
    found = read_weights(tmp_path)
    assert sorted(found) == ["mtp.0.gate.weight", "w"]
    assert bytes(found["w"].data) == torch.full((2,), 5.0).numpy().tobytes()


class _Engine:
    """Takes the names of a model as a trainer publishes them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.tensors: Mapping[str, NamedTensor] = {}

    async def load(self, tensors: Mapping[str, NamedTensor], *, version: int) -> None:
        match_names([[name] for name in self._names], tensors, version=version)
        self.tensors = tensors


def _context(directory: Path) -> Any:
    return SimpleNamespace(config=SimpleNamespace(model_path=str(directory)), metadata={})


async def test_directory_with_the_names_of_the_hub_is_served(tmp_path: Path) -> None:
    """Experts one by one under other names, and draft heads in a file of their own."""
    model = tiny_model("mixtral", torch.bfloat16)
    model.save_pretrained(tmp_path)
    save_file({"mtp.0.w": torch.ones(2)}, tmp_path / "mtp.safetensors")
    expected = model.state_dict()
    engine = _Engine([*expected])
    assert expected.keys().isdisjoint(name for name in read_weights(tmp_path) if "experts" in name)
    await load_frozen(_context(tmp_path), cast(Any, engine))
    assert engine.tensors.keys() == {*expected, "mtp.0.w"}
    for name, tensor in expected.items():
        assert torch.equal(from_named(engine.tensors[name]), tensor)


async def test_weights_of_another_model_stay_unfit(tmp_path: Path) -> None:
    """The message is that of the engine."""
    tiny_model("qwen3", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(UnfitWeights, match=r"missing .'other.weight'."):
        await load_frozen(_context(tmp_path), cast(Any, _Engine(["other.weight"])))
    (tmp_path / "config.json").unlink()
    with pytest.raises(UnfitWeights, match=r"missing .'other.weight'."):
        await load_frozen(_context(tmp_path), cast(Any, _Engine(["other.weight"])))
