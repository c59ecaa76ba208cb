"""An exported model has the names and shapes of the hub, whatever transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM
from typer.testing import CliRunner

from forge.cli.local_run.models.kept import read_kept
from forge.cli.main import app
from services.trainer.checkpoint.files import Contents
from services.trainer.checkpoint.hub_export import ExportOutcome, export
from services.trainer.checkpoint.reading import read_published
from services.trainer.model.full_weights import own_tensors
from tests.support.rl.models import EXPERTS, SHAPE, tiny_model

CONVERTED = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next")
AS_THEY_ARE = ("gpt_oss", "qwen3", "llama")
"""The last one with a tied head."""


def model_of(family: str) -> Any:
    """A tiny model in float32."""
    if family != "glm4_moe":
        return tiny_model(family, torch.float32)
    torch.manual_seed(0)
    sizes = {"n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**{**SHAPE, **EXPERTS, **sizes}, pad_token_id=None))
    model.set_experts_implementation("eager")
    return model.float()


def saved(model: Any, directory: Path) -> dict[str, Tensor]:
    """The tensors of transformers' own `save_pretrained`."""
    model.save_pretrained(directory)
    return {
        name: one
        for file in directory.glob("*.safetensors")
        for name, one in load_file(file).items()
    }


def checkpoint_of(model: Any, directory: Path, *, heads: dict[str, Tensor] | None = None) -> Path:
    """A checkpoint of the trainer with the state that it does not export."""
    path, described = directory / "step-00000001", directory / "described"
    path.mkdir()
    model.config.save_pretrained(described)
    own = {name: tensor.contiguous() for name, tensor in own_tensors(model).items()}
    Contents(model=own, heads=heads or {}, learner={}, model_path=described).write(path)
    return path


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(torch.tensor([[1, 2, 3, 4, 5]]), use_cache=False).logits
    return found


@pytest.mark.parametrize("family", CONVERTED)
def test_export_is_what_transformers_would_save(family: str, tmp_path: Path) -> None:
    """The same names and bytes, and stock transformers computes the same from it."""
    model = model_of(family)
    expected = saved(model, tmp_path / "saved")
    assert expected.keys() != own_tensors(model).keys()
    checkpoint, out = checkpoint_of(model, tmp_path), tmp_path / "out"
    model.config.save_pretrained(out)
    assert export(checkpoint, out) == ExportOutcome(written=True)
    found = load_file(out / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    loaded, about = AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not about["missing_keys"] and not about["unexpected_keys"]
    loaded.set_experts_implementation("eager")
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("family", AS_THEY_ARE)
def test_names_that_are_those_of_the_hub_stay(family: str, tmp_path: Path) -> None:
    """Nothing is written: the files of the checkpoint are copied."""
    model = model_of(family)
    out = tmp_path / "out"
    out.mkdir()
    assert export(checkpoint_of(model, tmp_path), out) == ExportOutcome()
    assert not [*out.iterdir()]
    assert saved(model, tmp_path / "saved").keys() == own_tensors(model).keys()


def test_large_model_is_written_in_several_files_with_an_index(tmp_path: Path) -> None:
    """Each of them complete before the next one is read; draft heads stay in theirs."""
    model = tiny_model("mixtral", torch.bfloat16)
    heads = {"mtp.0.w": torch.ones(2, dtype=torch.bfloat16)}
    checkpoint, out = checkpoint_of(model, tmp_path, heads=heads), tmp_path / "out"
    model.config.save_pretrained(out)
    assert export(checkpoint, out, file_bytes=1200).written
    (out / "mtp.safetensors").write_bytes((checkpoint / "mtp.safetensors").read_bytes())
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    files = {*weight_map.values()}
    assert len(files) > 3
    assert files == {one.name for one in out.glob("model-*.safetensors")}
    for name in files:
        stored = load_file(out / name)
        assert len(stored) == 1 or sum(one.nbytes for one in stored.values()) <= 1200
    published = read_published(out)
    assert [*published] == [*weight_map, "mtp.0.w"]
    kept = read_kept(out)
    assert (kept.dtype, kept.tensor_names) == ("bfloat16", tuple(published))
    (out / "mtp.safetensors").unlink()
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    loaded.set_experts_implementation("eager")
    assert torch.equal(logits(loaded), logits(model))


def test_unknown_family_is_no_error(tmp_path: Path) -> None:
    """The command copies the files then, and says why."""
    checkpoint = checkpoint_of(tiny_model("qwen3", torch.float32), tmp_path)
    (checkpoint / "config.json").write_text('{"model_type": "unheard_of"}')
    outcome = export(checkpoint, tmp_path)
    assert not outcome.written and "unheard_of" in outcome.reason


def test_command_exports_with_the_names_of_the_hub(tmp_path: Path) -> None:
    """Without the state of training; it names both digests."""
    model = tiny_model("mixtral", torch.bfloat16)
    checkpoint, out = checkpoint_of(model, tmp_path), tmp_path / "out"
    told = CliRunner().invoke(app, ["model", "export", str(checkpoint), "--out", str(out)])
    assert told.exit_code == 0, told.output
    kept = read_kept(out)
    before = read_kept(checkpoint).digest
    assert f"41 tensors in bfloat16, sha256 {kept.digest} (published {before})" in told.output
    files = {one.name for one in out.iterdir()}
    assert files == {"config.json", "model.safetensors", "published.json"}
    assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in kept.tensor_names


def test_command_says_why_names_are_not_those_of_the_hub(tmp_path: Path) -> None:
    """The model is exported all the same."""
    checkpoint = checkpoint_of(tiny_model("qwen3", torch.float32), tmp_path)
    (checkpoint / "config.json").unlink()
    out = tmp_path / "out"
    told = CliRunner().invoke(app, ["model", "export", str(checkpoint), "--out", str(out)])
    assert told.exit_code == 0, told.output
    assert "not of the hub: config.json is missing" in told.output
    assert read_kept(out).digest == read_kept(checkpoint).digest
