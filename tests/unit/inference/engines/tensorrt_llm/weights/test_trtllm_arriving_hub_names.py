"""Tests: stacked experts reach the ranks under the names of the hub during their fetch."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from forge.core.named_tensor import HubPart, NamedTensor
from services.inference.engines.base import BrokenWeights, UnfitWeights
from services.inference.engines.tensorrt_llm.arguments import Role
from services.inference.engines.tensorrt_llm.engine import TensorRtLlm
from services.inference.engines.tensorrt_llm.weights import buckets, own_names
from services.inference.engines.tensorrt_llm.weights.checkpoint import read_checkpoint
from tests.contract.engines import published
from tests.support.inference.hub_parts import with_hub_names
from tests.support.inference.modelopt_checkpoints import save_quantized
from tests.support.inference.tensorrt_llm import core_of, started
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour
from tests.support.runtime.waiting import settle, until
from tests.unit.inference.engines.tensorrt_llm.weights.test_trtllm_arriving import (
    NEVER_S,
    Fetch,
    reloads,
    served_before,
)
from tests.unit.inference.engines.tensorrt_llm.weights.test_trtllm_hub_names import model_of
from tests.unit.inference.engines.tensorrt_llm.weights.test_trtllm_modelopt import equal

__all__ = ["reloads"]

STACK = "model.layers.2.mlp.experts.gate_up_proj"
CASES = [("mixtral", ""), ("qwen3_moe", "FP8"), ("deepseek_v3", "NVFP4")]
"""Family, and how the checkpoint is quantized."""


def checkpoint(folder: Path, model: PreTrainedModel, algorithm: str) -> dict[str, torch.Tensor]:
    """Write the checkpoint of a model; return its tensors."""
    if algorithm:
        save_quantized(folder, model, algorithm)
    else:
        model.save_pretrained(folder)
    return dict(load_file(folder / "model.safetensors"))


def named(model: PreTrainedModel) -> dict[str, NamedTensor]:
    """A version under the names of transformers, with those of the hub, too."""
    return with_hub_names(model, published(model))


@asynccontextmanager
async def serving(
    model: PreTrainedModel, algorithm: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[TensorRtLlm, dict[str, torch.Tensor]]]:
    """An engine with version 1 of a model, and what its ranks have of it. transformers converts no
    names, and a load begins as soon as it may."""
    fresh = checkpoint(folder / "model", model, algorithm)
    monkeypatch.setattr(buckets, "MIB", 1 << 13)
    updates = str(folder / "updates")
    async with started(folder / "model", Role.BOTH, update_dir=updates, tensor_parallel=2) as made:
        monkeypatch.setitem(sys.modules, own_names.__name__, None)
        await made.load(named(model), version=1)
        made._llm._load_s = NEVER_S
        yield made, fresh


def check_ranks(engine: TensorRtLlm, fresh: dict[str, torch.Tensor]) -> None:
    """All have the bits of a checkpoint."""
    for rank in core_of(engine).ranks:
        assert rank.stored.keys() == fresh.keys()
        assert [name for name in fresh if not equal(rank.stored[name], fresh[name])] == []


@pytest.mark.parametrize(("family", "algorithm"), CASES)
async def test_ranks_load_experts_before_the_last_tensor_is_here(
    behaviour: Behaviour,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reloads: list[int],
    family: str,
    algorithm: str,
) -> None:
    """Also in the form of a quantized checkpoint. All ranks have its bits at the end."""
    new = model_of(family, seed=1)
    fresh = checkpoint(tmp_path / "new", new, algorithm)
    old = model_of(family, seed=0)
    async with serving(old, algorithm, tmp_path, monkeypatch) as (engine, _):
        reloads.clear()
        fetch = Fetch(named(new))
        loading = asyncio.create_task(engine.load_arriving(fetch, version=2))
        fetch.let_in(but=1)
        await until(lambda: fetch.kept or loading.done())
        assert fetch.kept
        await until(lambda: len(reloads) >= 4 or loading.done())
        assert not loading.done()
        fetch.let_in()
        await loading
        assert max(reloads) <= buckets.AT_ONCE
        assert core_of(engine).control_actions == 2
        check_ranks(engine, fresh)


@pytest.mark.parametrize(("family", "algorithm"), [CASES[0], CASES[2]])
async def test_broken_experts_in_the_middle_restore_the_version_before(
    behaviour: Behaviour,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reloads: list[int],
    family: str,
    algorithm: str,
) -> None:
    """A stack with NaN arrives after ranks have changed. The version before had come during its
    fetch, too: the engine starts again with what it kept of it."""
    old = model_of(family, seed=0)
    async with serving(old, algorithm, tmp_path, monkeypatch) as (engine, fresh):
        again = Fetch(named(old))
        again.let_in()
        await engine.load_arriving(again, version=1)
        assert again.kept
        engine._llm._load_s = NEVER_S
        tensors = named(model_of(family, seed=1))
        data = bytes(tensors[STACK].data)[:-4] + b"\xff" * 4
        fetch = Fetch({**tensors, STACK: replace(tensors[STACK], data=data)})
        with served_before(engine, restarts=1):
            loading = asyncio.create_task(engine.load_arriving(fetch, version=2))
            reloads.clear()
            fetch.let_in(but=len(tensors) - list(tensors).index(STACK))
            await until(lambda: fetch.kept or loading.done())
            assert fetch.kept
            await until(lambda: reloads or loading.done())
            fetch.let_in()
            with pytest.raises(BrokenWeights, match=f"{STACK} has NaN"):
                await loading
        check_ranks(engine, fresh)


@pytest.mark.parametrize("algorithm", ["", "NVFP4"])
async def test_manifest_without_names_of_the_hub_waits_for_all_data(
    behaviour: Behaviour, tmp_path: Path, reloads: list[int], algorithm: str
) -> None:
    """Of a trainer of an earlier release: transformers converts it."""
    new = model_of("qwen3_moe", seed=1)
    fresh = checkpoint(tmp_path / "model", new, algorithm)
    async with started(tmp_path / "model", Role.BOTH) as engine:
        fetch = Fetch(published(new))
        await engine.load_arriving(fetch, version=1)
        assert not fetch.kept
        check_ranks(engine, fresh)


async def test_load_given_up_before_the_first_bucket_waits_for_no_tensor(
    behaviour: Behaviour, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reloads: list[int]
) -> None:
    """Quantized tensors fill a bucket later than published ones."""
    model = model_of("qwen3_moe", seed=0)
    async with serving(model, "NVFP4", tmp_path, monkeypatch) as (engine, _):
        reloads.clear()
        fetch = Fetch(named(model_of("qwen3_moe", seed=1)))
        # All tensors but the last: quantized, they fill no bucket.
        sizes = [memoryview(one.data).nbytes for one in fetch.all.values()]
        monkeypatch.setattr(buckets, "MIB", sum(sizes[:-1]))
        with served_before(engine, restarts=0):
            loading = asyncio.create_task(engine.load_arriving(fetch, version=2))
            fetch.let_in(but=1)
            await until(lambda: fetch.kept)
            await settle()
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
        assert not reloads


def test_forms_are_those_of_the_data(tmp_path: Path) -> None:
    """Names, types and shapes of the checkpoint, in the order in which tensors have them. A name
    of the version may be that of another tensor on the hub."""
    model = model_of("mixtral", seed=0)
    model.save_pretrained(tmp_path)
    tensors = named(model)
    query, key = (f"model.layers.1.self_attn.{one}_proj.weight" for one in ("q", "o"))
    for name, other in ((query, key), (key, query)):
        tensors[name] = replace(tensors[name], hub=(HubPart(other, tensors[name].shape),))
    fitting = read_checkpoint(str(tmp_path)).fit_forms(Fetch(tensors).forms, version=1)
    assert fitting
    views = [part for one in tensors.values() for part in fitting.parts(one)]
    assert [(one.name, one.dtype, one.shape, len(one.data)) for one in views] == [
        (name, form.dtype, form.shape, form.size_bytes) for name, form in fitting.loaded.items()
    ]
    assert next(one for one in views if one.name == key).data == tensors[query].data


def test_other_forms_are_refused_without_their_data(tmp_path: Path) -> None:
    """A model of other experts, and a quantized checkpoint in whose form nothing is converted."""
    model = model_of("mixtral", seed=0)
    model.save_pretrained(tmp_path)
    checkpoint = read_checkpoint(str(tmp_path))
    tensors = named(model)
    stack = tensors[STACK]
    (first, *rest) = stack.hub
    turned = first._replace(shape=first.shape[::-1])
    wrong = Fetch({**tensors, STACK: replace(stack, hub=(turned, *rest))})
    with pytest.raises(UnfitWeights, match=r"weights 1: .*block_sparse_moe.experts.0"):
        checkpoint.fit_forms(wrong.forms, version=1)
    del tensors["model.norm.weight"]
    with pytest.raises(UnfitWeights, match=r"1 tensors are missing \(model.norm.weight\)"):
        checkpoint.fit_forms(Fetch(tensors).forms, version=1)
    tensors["draft"] = replace(stack, name="draft", hub=(HubPart("draft", stack.shape),))
    assert checkpoint.fit_forms(Fetch(tensors).forms, version=1) is None
