"""The kernels of vLLM that this package replaces on a CPU."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from tests.contract import engines

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")


def test_each_row_of_a_draft_has_the_values_of_its_request() -> None:
    """Real and whole numbers, for requests without drafts, too; a temperature of 0 divides by 1.
    Through vLLM's own call, whose kernel leaves the rows as they are."""
    sampler: Any = import_module("vllm.v1.sample.rejection_sampler")
    import_module("services.inference.engines.vllm.engine_core.cpu_kernels").install()
    ends = torch.tensor([2, 2, 5, 6], dtype=torch.int32)
    heat = torch.tensor([0.6, 1.0, 0.0, 1.3])
    found = sampler.expand_batch_to_tokens(heat, ends, 6, replace_from=0, replace_to=1)
    assert torch.equal(found, torch.tensor([0.6, 0.6, 1.0, 1.0, 1.0, 1.3]))
    found = sampler.expand_batch_to_tokens(torch.tensor([7, 8, 0, 9]), ends, 6)
    assert found.tolist() == [7, 7, 0, 0, 0, 9]


def test_top_k_in_a_step_without_drafts() -> None:
    """The first step of a request with top_k ended vLLM's process."""
    sampler: Any = import_module("vllm.v1.sample.rejection_sampler")
    import_module("services.inference.engines.vllm.engine_core.cpu_kernels").install()
    none, drafts = torch.empty(0, 9), torch.arange(18.0).reshape(2, 9)
    assert sampler.apply_top_k_top_p(none, torch.empty(0, dtype=torch.int32), None) is none
    top_k = torch.tensor([1, 3], dtype=torch.int32)
    found = sampler.apply_top_k_top_p(drafts, top_k, None)
    assert found.isfinite().sum(-1).tolist() == [1, 3]


@pytest.mark.parametrize("heads_apart", [False, True])
def test_all_heads_of_a_token_are_rotated_by_its_position(heads_apart: bool) -> None:
    """With a dimension for heads, as in latent attention, and without one."""
    base: Any = import_module("vllm.model_executor.layers.rotary_embedding.base")
    import_module("services.inference.engines.vllm.engine_core.extension")
    rotary = base.RotaryEmbedding.__new__(base.RotaryEmbedding)
    torch.nn.Module.__init__(rotary)
    angles = torch.arange(40)[:, None] / 100 ** (torch.arange(8) / 8)
    rotary.cos_sin_cache = torch.cat([angles.cos(), angles.sin()], -1)
    rotary.head_size = rotary.rotary_dim = 16
    rotary.is_neox_style, rotary.use_aiter = False, False
    positions, query, key = torch.arange(7), torch.randn(7, 4, 32)[..., 16:], torch.randn(7, 1, 16)
    pairs = torch.view_as_complex(query.reshape(7, 4, 8, 2))
    turned = pairs * torch.polar(torch.ones(7, 8), angles[:7])[:, None]
    if not heads_apart:
        query, key = query.reshape(7, -1), key.reshape(7, -1)
    found, _ = rotary.forward_cpu(positions, query.clone(), key)
    assert torch.allclose(found.view(7, 4, 16), torch.view_as_real(turned).flatten(-2), atol=1e-5)
