"""The kernel of vLLM's sampler of drafts that this package replaces on a CPU."""

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
