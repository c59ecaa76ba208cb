"""Two and four ranks under torchrun compute what one process computes (`make test-ranks`)."""

from __future__ import annotations

import pytest

from tests.support.rl.torchrun import torchrun

pytestmark = pytest.mark.timeout(900)
LIMITS = {"fp64": 1e-10, "fp32": 2e-6}
"""Largest relative error; the measured ones in fp64 are below 1e-14."""


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> dict[str, float]:
    """All cases of all meshes of that many ranks."""
    cases: dict[str, float] = torchrun(request.param, "tests.support.rl.worlds")
    return cases


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_worlds_are_exact(found: dict[str, float], precision: str) -> None:
    """Loss and every gradient on sharded, replicated and shared trees: merged and relayed, tied and
    untied heads, experts, adapters; and steps with each part of a loss."""
    cases = {case: error for case, error in found.items() if precision in case}
    assert len(cases) > 10
    assert not {case: error for case, error in cases.items() if not error <= LIMITS[precision]}


def test_token_values_of_all_ranks_are_on_rank_0(found: dict[str, float]) -> None:
    """On every mesh, to the precision of their type."""
    cases = {case: error for case, error in found.items() if case.endswith("fp16 token values")}
    assert len(cases) >= 3 and max(cases.values()) <= 1e-3


def test_parameters_of_a_rank_fall_with_the_number_of_shards(found: dict[str, float]) -> None:
    """To within the padding of tensors that do not divide."""
    held = {case.split()[0]: size for case, size in found.items() if case.endswith(" held")}
    assert len(held) >= 3
    for mesh, size in held.items():
        replicate, shard, cp = map(int, mesh.split("x"))
        shards = shard * cp if shard > 1 else 1
        assert size == pytest.approx(5904 / shards, rel=0.02), (mesh, replicate)
