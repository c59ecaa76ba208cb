"""Matrices in oneDNN's layout: the same products, swapped with the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig

from services.inference.engines.embedded.model import packed_linears
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.probe import logprobs
from services.inference.engines.tensor_bytes import to_named

IDS = tuple(range(1, 40))
packs_bfloat16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="oneDNN has no products in bfloat16 on this CPU (no AVX-512)",
)
KINDS = ["float32", pytest.param("bfloat16", marks=packs_bfloat16)]

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


def config(*, tied: bool) -> LlamaConfig:
    """A small Llama with biases."""
    return LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        attention_bias=True, initializer_range=0.2, tie_word_embeddings=tied,
    )  # fmt: skip


def weights(*, tied: bool, seed: int) -> dict[str, Any]:
    """Random weights of the model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(tied=tied), dtype=torch.float32)
    for name, one in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(one)
    return {name: to_named(name, one) for name, one in model.state_dict().items()}


def policy(folder: Path, dtype: str) -> Policy:
    """A policy without weights."""
    return Policy.build(str(folder), dtype=dtype, device="cpu")


@torch.inference_mode()
def logprobs_with(policy: Policy, tensors: dict[str, Any], *, version: int) -> torch.Tensor:
    """Log-probs after a swap to these weights."""
    policy.swap(policy.stage(tensors, version=version))
    return logprobs(policy, IDS)


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack matrices of any size."""
    monkeypatch.setattr(packed_linears, "_LEAST_NARROW", 1)
    monkeypatch.setattr(packed_linears, "_LEAST_WIDE", 1)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", KINDS)
def test_packed_layers_compute_the_plain_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, tied: bool
) -> None:
    """All linear layers are packed, and the log-probs are those of plain layers, also after a
    second publication."""
    config(tied=tied).save_pretrained(tmp_path)
    plain = policy(tmp_path, dtype)
    assert not plain._packable
    monkeypatch.setattr(packed_linears, "_LEAST_NARROW", 1)
    monkeypatch.setattr(packed_linears, "_LEAST_WIDE", 1)
    packed = policy(tmp_path, dtype)
    assert len(packed._packable) == 15
    for version in (1, 2):
        tensors = weights(tied=tied, seed=version)
        expected = logprobs_with(plain, tensors, version=version)
        found = logprobs_with(packed, tensors, version=version)
        assert (found - expected).abs().max() < 1e-4


@pytest.mark.usefixtures("least")
@pytest.mark.parametrize("dtype", KINDS)
def test_matrix_that_its_model_reads_itself_stays_plain(tmp_path: Path, dtype: str) -> None:
    """Mamba multiplies with the matrix of `dt_proj` and never calls the layer."""
    torch.manual_seed(0)
    shape = MambaConfig(
        vocab_size=97, hidden_size=64, state_size=8, num_hidden_layers=2, time_step_rank=4
    )
    shape.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()
    served = policy(tmp_path, dtype)
    tensors = {name: to_named(name, one) for name, one in model.state_dict().items()}
    found = logprobs_with(served, tensors, version=1)
    with torch.inference_mode():
        logits_TV = model(torch.tensor([IDS]), use_cache=False).logits[0, :-1]
    expected = logits_TV.log_softmax(-1).gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]
    error = (found - expected).abs().max()
    assert error < (1e-4 if dtype == "float32" else 0.1)


@pytest.mark.usefixtures("least")
@pytest.mark.parametrize("dtype", KINDS)
def test_swap_back_serves_the_earlier_matrices(tmp_path: Path, dtype: str) -> None:
    """The weights that a swap returned compute what they computed before."""
    config(tied=False).save_pretrained(tmp_path)
    served = policy(tmp_path, dtype)
    before = logprobs_with(served, weights(tied=False, seed=1), version=1)
    with torch.inference_mode():
        first = served.swap(served.stage(weights(tied=False, seed=2), version=2))
        assert not torch.equal(logprobs(served, IDS), before)
        served.swap(first)
        assert torch.equal(logprobs(served, IDS), before)
    assert served.version == 1


@packs_bfloat16
@pytest.mark.usefixtures("least")
def test_packed_matrix_has_no_plain_copy(tmp_path: Path) -> None:
    """Only the head, which draft heads read, and the embedding keep their plain matrices."""
    config(tied=False).save_pretrained(tmp_path)
    served = policy(tmp_path, "bfloat16")
    served.swap(served.stage(weights(tied=False, seed=1), version=1))
    plain = {
        name
        for name, one in served.module.named_parameters()
        if one.ndim == 2 and one.untyped_storage().nbytes() > 64
    }
    assert plain == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.usefixtures("least")
def test_identity_of_weights_does_not_depend_on_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of keys and values finds the blocks of the same weights."""
    config(tied=False).save_pretrained(tmp_path)
    tensors = weights(tied=False, seed=1)
    packed = policy(tmp_path, "float32").stage(tensors, version=1, architecture=b"one")
    monkeypatch.setattr(packed_linears, "_LEAST_WIDE", 1 << 40)
    plain = policy(tmp_path, "float32").stage(tensors, version=2, architecture=b"one")
    other = policy(tmp_path, "float32").stage(tensors, version=2, architecture=b"two")
    assert len(packed.identity) == 16
    assert packed.identity == plain.identity != other.identity
