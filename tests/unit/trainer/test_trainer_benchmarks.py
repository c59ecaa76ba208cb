"""The benchmarks of training run, and what they compare is the same gradient."""

from __future__ import annotations

import math
import time

import pytest

from benchmarks import credit, prefix_tree
from benchmarks.support.training.tree_workloads import make_workloads
from benchmarks.support.training.trl_peer import HAS_TRL
from benchmarks.support.training.ways import Bench

MEASUREMENTS = 6
"""Of one step; the highest is its peak."""


def test_benchmark_times_every_way_to_train_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged, one by one, padded, packed, by trajectory, by TRL: one gradient between them."""
    monkeypatch.setattr(prefix_tree, "has_prefix_grouper", lambda: False)
    bench, workload = Bench(hidden=64, layers=1), make_workloads(16)[0]
    found = prefix_tree.measure(bench, workload, rounds=1, clock=time.perf_counter, without=())
    assert found["sample_tokens"] > found["tree_tokens"] > 0 and found["flop_bound"] > 1
    assert found["loss_err"] < 1e-5 and found["grad_err"] < 1e-4
    assert all(math.isfinite(value) for value in found.values())
    timed = {name.removesuffix("_s") for name in found if name.endswith("_s")}
    trl = {"trl"} if HAS_TRL else set()
    assert timed == {"tree", "per_request", "padded", "varlen", "trajectories"} | trl


@pytest.mark.matrix
@pytest.mark.parametrize("index", [0, 2, 3])
def test_merged_step_peaks_no_higher_than_a_packed_step(index: int) -> None:
    """Per computed token, although more of a tree's tokens were sampled and have logits: neither
    these nor attention masks are held beside the backbone's activations."""
    bench, samples = Bench(hidden=128, layers=2), make_workloads(4)[index].samples
    bench.tree(make_workloads(16)[0].samples)  # first calls allocate
    plan = bench.learner.plan(samples)
    # Single measurements are at times lower by up to 0.07 %, never higher.
    steps = [prefix_tree.step_bytes_per_token(bench, samples, plan) for _ in range(MEASUREMENTS)]
    merged, packed = map(max, zip(*steps, strict=True))
    assert merged <= packed


@pytest.mark.parametrize("process", [False, True])
def test_benchmark_compares_ways_to_credit_turns(process: bool) -> None:
    """Relative to the whole return at every turn, which is unbiased like a return-to-go; a discount
    is not, if only the last turn is rewarded."""
    world = credit.make_world(8, process=process, noise=1.0)
    found = credit.measure(world, credit.roll_out(world, 512))
    assert set(found) == {f"{way}.{key}" for way in credit.WAYS for key in credit.KEYS}
    assert found["whole.trace"] == found["whole.samples"] == 1.0
    assert found["whole.cosine"] == pytest.approx(1.0) == found["to_go_loo.cosine"]
    assert all(math.isfinite(value) for value in found.values())
    assert process or found["to_go_g95.cosine"] < 1.0
