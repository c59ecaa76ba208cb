"""Weights on their way to vLLM's process: checked whole, then in memory without a name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM
from xxhash import xxh3_64_intdigest

from services.inference.engines.base import BrokenWeights, UnfitWeights
from services.inference.engines.vllm.exchange.shared_memory import open_shared
from services.inference.engines.vllm.staging import Checkpoint, shared
from tests.contract.engines import CONFIGS, published, reference


def checkpoint(family: str, *, served: torch.dtype = torch.float32) -> Checkpoint:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[family])
    return Checkpoint(model, served=served)


@pytest.mark.parametrize("family", CONFIGS)
def test_published_weights_are_staged_by_the_names_of_the_checkpoint(family: str) -> None:
    """Tied weights once, under their first name, whichever one was published; draft heads are left
    out."""
    weights = published(reference(family))
    if family == "qwen3":
        tied = weights.pop("model.embed_tokens.weight")
        weights["lm_head.weight"] = replace(tied, name="lm_head.weight")
    drafts = {"mtp.0.norm": next(iter(weights.values()))}
    staged = checkpoint(family).stage(weights | drafts, version=4)
    names = [tensor.name for tensor in staged.tensors]
    assert names == list(published(reference(family)))
    assert (staged.version, staged.rounded) == (4, False)


def test_16_bits_are_known_for_the_probe() -> None:
    """Published in 16 bits, or served in them."""
    weights = published(reference("llama"))
    half = published(reference("llama").to(torch.bfloat16))
    assert checkpoint("llama").stage(half, version=1).rounded
    assert checkpoint("llama", served=torch.bfloat16).stage(weights, version=1).rounded


def test_unfit_weights_are_refused_before_vllm_gets_them() -> None:
    """Of another shape, another set of names, or with NaN in one element."""
    weights = published(reference("llama"))
    name, tensor = next(iter(weights.items()))
    bent = {name: replace(tensor, shape=(tensor.shape[1], tensor.shape[0]))}
    broken = {name: replace(tensor, data=bytes(tensor.data)[:-4] + b"\xff" * 4)}
    with pytest.raises(UnfitWeights, match=name):
        checkpoint("llama").stage(weights | bent, version=2)
    with pytest.raises(UnfitWeights, match="missing"):
        checkpoint("llama").stage({name: tensor}, version=2)
    with pytest.raises(BrokenWeights, match=name):
        checkpoint("llama").stage(weights | broken, version=2)


def test_shared_memory_has_every_tensor_with_its_checksum() -> None:
    """By the path that another process opens; after the block the memory is gone."""
    weights = published(reference("qwen3"))
    staged = checkpoint("qwen3").stage(weights, version=1)
    with shared(staged) as update:
        with open_shared(update["address"]) as file:
            data = file.read()
        for name, dtype, shape, start, size, checksum in update["tensors"]:
            part = data[start : start + size]
            assert part == bytes(weights[name].data)
            assert (dtype, tuple(shape)) == (weights[name].dtype, weights[name].shape)
            assert xxh3_64_intdigest(part) == checksum
    with pytest.raises(OSError):
        open_shared(update["address"])
