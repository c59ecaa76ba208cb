"""The numbers of a step: put together, and what a scrape of /metrics finds of them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from prometheus_client import REGISTRY

from forge.rl.learner.batch_plan import plan_batch
from forge.rl.learner.types import StepResult
from forge.rl.losses.stats import TokenStats, domain_stats, engine_stats, policy_stats
from forge.v1 import trainer_pb2 as pb
from services.trainer import metrics
from services.trainer.reporting import step_metrics
from services.trainer.samples.samples import BatchSamples
from tests.support.rl.models import make_sample

VERSION = 7
# code: two samples of two tokens and one; qa: one of two.
LENGTHS, DOMAINS = (2, 1, 2), ("code", "code", "qa")
ENGINES = ("vllm", "embedded", "vllm")
BATCH = BatchSamples(
    samples=(),
    outcomes={"code": [1.0, 0.0, 0.5], "qa": [0.25], "flat": [0.0, 0.0]},
    outcomes_by_engine={"vllm": [1.0, 0.0], "embedded": [0.5, 0.25], "several": [0.0, 0.0]},
    lengths={"code": [2, 1, 6], "qa": [2], "flat": [3, 4]},
    completions_s={"code": [1.0, 9.0, 2.5]},
    baselines_s={"code": 4.0},
    groups=3,
    trajectories=6,
    flat_groups=1,
    excluded=0,
    cuts={"none": 1, "corrected": 2, "share_missing": 3, "unknown": 4},
    left_out={("code", "overlong"): 2, ("qa", "greedy"): 3, ("qa", "overlong"): 4},
    overlong_penalty=-0.25,
    refill_groups=2,
)
ELSEWHERE = {
    "step_s": "step_seconds_sum",
    "wait_s": "wait_seconds",
    "publish_s": "publish_seconds",
    "checkpoint_s": "checkpoint_capture_seconds",
    "lost_s": "lost_seconds_total",
    "run_s": "run_seconds",
    "trained_tokens": "trained_tokens_total",
    "trained_tokens_per_s": "trained_tokens_per_second",
    "memory_retries": "memory_retries_total",
    "empty_passes": "empty_passes_total",
    "truncated_turns": "truncated_turns_total",
    "truncated_turns_left_out": "truncated_turns_left_out_total",
    "sampling_unknown_turns": "sampling_unknown_turns_total",
    "overlong_turns_left_out": "overlong_turns_left_out_total",
    "flat_groups": "flat_groups_total",
    "refill_groups": "refill_groups_total",
}
"""Of the record's numbers, those with another name or kind on /metrics."""
COUNTED = (
    "step_seconds_sum",
    "trained_tokens_total",
    "memory_retries_total",
    "empty_passes_total",
    "truncated_turns_total",
    "truncated_turns_left_out_total",
    "sampling_unknown_turns_total",
    "overlong_turns_left_out_total",
    "flat_groups_total",
    "refill_groups_total",
    "lost_seconds_total",
)
"""Of those, the ones that add up over steps."""


def stats() -> list[TokenStats]:
    """Five tokens in one tree."""
    return [
        TokenStats(
            logprobs=torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0]),
            behavior=torch.tensor([-1.0, -1.5, -1.0, -1.25, -1.0]),
            entropy=torch.tensor([0.5, 1.0, 3.0, 2.0, 1.0]),
            versions=torch.tensor([7, 6, 5, 7, 3]),
            clipped=torch.tensor([True, False, False, True, True]),
            masked=torch.tensor([False, False, False, True, False]),
            reference_kl=torch.zeros(5),
            teacher_gaps=torch.tensor([0.5, 0.0, 0.5, 0.25, 0.0]),
            gradient_size=torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0]),
            advantages=torch.zeros(5),
            lengths=torch.tensor(LENGTHS),
            domains=DOMAINS,
            engines=ENGINES,
        )
    ]


def one_step(*earlier: pb.StepMetrics) -> pb.StepMetrics:
    rng = Random(0)
    prompt = [1, 2, 3]
    samples = [
        make_sample([*prompt, *range(4, 4 + length)], (3, 3 + length), rng=rng)
        for length in LENGTHS
    ]
    result = StepResult(
        loss=0.5,
        grad_norm=2.0,
        skipped="",
        stats=policy_stats(stats(), weight_version=VERSION),
        domains=domain_stats(stats(), weight_version=VERSION),
        engines=engine_stats(stats(), weight_version=VERSION),
        compute_s=2.0,
        updates=3,
        plan=replace(plan_batch(samples, token_budget=64, channels=16), token_budget=64),
    )
    return step_metrics.step_metrics(
        step=len(earlier) + 1,
        weight_version=VERSION + 1,
        batch=BATCH,
        result=result,
        times=step_metrics.StepTimes(
            step_s=2.0, wait_s=1.5, publish_s=0.5, checkpoint_s=0.25, run_s=9.0
        ),
        earlier=earlier,
    )


def test_domain_metrics_cover_its_own_part_of_the_batch() -> None:
    """Rewards and lengths over its trajectories, the rest over its trained tokens; a domain without
    trained tokens has the former only. J is over the seconds of both steps."""
    before = pb.StepMetrics(mean_reward=0.0, trajectories=4, trained_tokens=7, step_s=5.75)
    for domain, reward in (("code", 0.1), ("qa", 0.5)):
        own = pb.DomainMetrics(mean_reward=reward, trained_tokens=3, trajectories=1)
        before.domains[domain].CopyFrom(own)
    found = one_step(before)

    code, qa, flat = (found.domains[name] for name in ("code", "qa", "flat"))
    assert (code.mean_reward, code.trajectories, code.length_tokens) == (0.5, 3, 3.0)
    assert (code.trained_tokens, code.entropy) == (3, 1.5)
    assert (code.clip_fraction, code.staleness_mean) == pytest.approx((1 / 3, 1.0))
    assert code.gradient_share == 0.75
    assert (code.completion_s, code.timed_trajectories, code.speed_baseline_s) == (2.5, 3, 4.0)
    assert code.yield_j == pytest.approx(6 / 10 * (0.5 - 0.1) / 4)
    assert (qa.mean_reward, qa.trajectories, qa.length_tokens) == (0.25, 1, 2.0)
    assert (qa.trained_tokens, qa.entropy, qa.clip_fraction) == (2, 1.5, 1.0)
    assert (qa.staleness_mean, qa.gradient_share) == (2.0, 0.25)
    assert qa.yield_j == pytest.approx(5 / 10 * (0.25 - 0.5) / 2)
    assert flat == pb.DomainMetrics(trajectories=2, length_tokens=3.5)
    assert found.yield_j == pytest.approx(12 / 10 * (1.75 / 6) / 10)
    assert (found.yield_tokens_per_s, found.yield_gain) == pytest.approx((1.2, 1.75 / 60))
    assert dict(found.reward_by_domain) == {"code": 0.5, "qa": 0.25, "flat": 0.0}


def test_engine_metrics_compare_rewards_and_log_probs() -> None:
    """Rewards over the trajectories of one engine, gaps over its trained tokens, with the gap of
    its freshest ones apart; trajectories of several engines count for none of them."""
    engines = one_step().engines
    assert engines["vllm"] == pb.EngineMetrics(
        mean_reward=0.5,
        trajectories=2,
        trained_tokens=4,
        logprob_gap_mean=0.1875,
        inference_gap_mean=0.125,
        inference_gap_staleness=0.0,
        staleness_mean=1.25,
    )
    assert engines["embedded"] == pb.EngineMetrics(
        mean_reward=0.375,
        trajectories=2,
        trained_tokens=1,
        inference_gap_staleness=2.0,
        staleness_mean=2.0,
    )
    assert engines["several"] == pb.EngineMetrics(trajectories=2)
    metrics.show(one_step(), BATCH)
    alone = one_step()
    del alone.engines["vllm"]
    alone.engines["embedded"].trajectories = 0
    metrics.show(alone, BATCH)
    name = "forge_trainer_engine_mean_reward"
    assert REGISTRY.get_sample_value(name, {"engine": "embedded"}) is None
    assert REGISTRY.get_sample_value(name, {"engine": "several"}) == 0.0
    name = "forge_trainer_engine_staleness_mean"
    assert REGISTRY.get_sample_value(name, {"engine": "several"}) is None
    name = "forge_trainer_engine_trajectories"
    assert REGISTRY.get_sample_value(name, {"engine": "embedded"}) == 0
    assert REGISTRY.get_sample_value(name, {"engine": "vllm"}) is None


def test_every_step_metric_is_on_the_metrics_endpoint() -> None:
    """Under its name in the record, except for units and counters; a domain's and an engine's by
    label."""
    counted = {name: shown(name) for name in COUNTED}
    found = one_step()
    assert found.trained_tokens_per_s == 2.5 and found.merge_ratio == 14 / 5
    metrics.show(found, BATCH)

    for field in pb.StepMetrics.DESCRIPTOR.fields:
        if field.message_type is None and field.name != "weight_version":
            name = ELSEWHERE.get(field.name, field.name)
            value = getattr(found, field.name)
            assert shown(name) == counted.get(name, 0.0) + value, field.name
    assert (shown("wait_seconds"), shown("publish_seconds")) == (1.5, 0.5)
    assert (shown("groups"), shown("trajectories"), shown("tree_tokens")) == (3, 6, 5)
    for domain, own in found.domains.items():
        assert shown("reward", domain=domain) == own.mean_reward
        for field in pb.DomainMetrics.DESCRIPTOR.fields:
            if field.name != "mean_reward":
                assert shown(f"domain_{field.name}", domain=domain) == getattr(own, field.name)
    for engine, of_engine in found.engines.items():
        for field in pb.EngineMetrics.DESCRIPTOR.fields:
            if engine != "several" or field.name in ("mean_reward", "trajectories"):
                value = getattr(of_engine, field.name)
                assert shown(f"engine_{field.name}", engine=engine) == value


def shown(name: str, **labels: str) -> float:
    """What is on /metrics now."""
    value: float | None = REGISTRY.get_sample_value(f"forge_trainer_{name}", labels)
    assert value is not None, name
    return value
