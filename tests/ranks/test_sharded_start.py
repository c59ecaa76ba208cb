"""Ranks that shard a model start without a copy of it on each."""

from __future__ import annotations

import pytest

from tests.support.rl.torchrun import torchrun
from tests.support.trainer.starts import FAMILIES

pytestmark = pytest.mark.timeout(900)


def test_sharded_start_has_the_weights_of_the_whole_model() -> None:
    """Every parameter, buffer and tie, bit for bit, of tied, untied and converted models, and of
    frozen ones, whose matrices stay in 16 bits; and the largest resident size of a rank grows by
    less than half as much."""
    found: dict[str, float] = torchrun(4, "tests.support.trainer.starts", "1024")
    assert [found[f"{family} equal"] for family in FAMILIES] == [1.0] * len(FAMILIES)
    assert [found[f"{family} frozen"] for family in FAMILIES] == [1.0] * len(FAMILIES)
    assert found["sharded peak_mb"] < 0.6 * found["whole peak_mb"], found
