"""Two ranks under torchrun that shard the parameters compute what one process computes."""

from __future__ import annotations

import pytest

from tests.support.rl.torchrun import torchrun


@pytest.mark.timeout(600)
def test_two_shards_are_exact() -> None:
    """Loss and every gradient in fp64: a tied head, experts in relayed trees, adapters; each rank
    holds half of the parameters. `make test-ranks` has all meshes and cases."""
    found = torchrun(2, "tests.support.rl.worlds", "--lean", timeout_s=580)
    held = found.pop("1x2x1 held")
    assert held == pytest.approx(5904 / 2, rel=0.02)
    assert len(found) == 3
    assert not {case: error for case, error in found.items() if not error <= 1e-10}
