"""Compiled layers of a model that ranks shard."""

from __future__ import annotations

import pytest

from tests.support.rl.torchrun import torchrun

pytestmark = pytest.mark.timeout(1800)


def test_compiled_layers_on_shards_have_the_gradients_of_one_process() -> None:
    """Gathered in their own type and in bfloat16, up to the order of sums in 16 bits."""
    found: dict[str, float] = torchrun(2, "tests.support.rl.compiled_world", timeout_s=1700)
    assert [*found] == ["None", "torch.bfloat16"]
    assert found["None"] < 1e-2
    assert found["torch.bfloat16"] < 3e-2
