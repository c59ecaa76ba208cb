"""Computes the metrics of a step from its batch and result.

Owns their definitions, among them the yield J (in words: docs/services/trainer.md).
`services.trainer.metrics` exports them to Prometheus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import fmean, median
from typing import Any, NamedTuple

from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.types import StepResult
from forge.rl.losses.stats import PolicyStats
from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2 as pb
from services.trainer.samples.samples import BatchSamples

_YIELD_STEPS = 5
"""Number of first, and of last, steps whose mean rewards the yield compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Parts of the time of one step."""

    step_s: float
    """Forward, backward, update."""
    wait_s: float
    """From the end of the step before to the arrival of the batch."""
    publish_s: float
    checkpoint_s: float = 0.0
    """Copying for a checkpoint, after the step before."""
    run_s: float = 0.0
    """Time of the run at the end of the step; 0 if unknown."""

    @property
    def accounted_s(self) -> float:
        """Sum of the parts."""
        return self.step_s + self.wait_s + self.publish_s + self.checkpoint_s


def step_metrics(
    *,
    step: int,
    weight_version: int,
    batch: BatchSamples,
    result: StepResult,
    times: StepTimes,
    earlier: Sequence[pb.StepMetrics],
) -> pb.StepMetrics:
    """The metrics of one step that updated the weights."""
    metrics = pb.StepMetrics(
        step=step,
        weight_version=weight_version,
        trained_tokens_per_s=result.plan.trained_tokens / max(1e-9, times.step_s),
        domains=_domains(batch, result),
        engines=_engines(batch, result),
    )
    for of_source in (
        _batch_metrics(batch),
        _plan_metrics(result.plan),
        _update_metrics(result),
        _loss_metrics(result.stats),
        _replay_metrics(result),
        _time_metrics(times, earlier),
    ):
        metrics.MergeFrom(of_source)
    steps = [*earlier, metrics]
    whole = training_yield(steps)
    metrics.yield_j = whole.j
    metrics.yield_tokens_per_s, metrics.yield_gain = whole
    for domain, own in metrics.domains.items():
        own.yield_j = domain_yield(steps, domain).j
    return metrics


def _batch_metrics(batch: BatchSamples) -> pb.StepMetrics:
    overlong = (turns for (_, reason), turns in batch.left_out.items() if reason == "overlong")
    names = ("reward_components", "groups", "trajectories", "overlong_penalty", "flat_groups")
    return pb.StepMetrics(
        **_same(batch, *names, "refill_groups"),
        mean_reward=batch.mean_outcome,
        reward_by_domain={domain: fmean(values) for domain, values in batch.outcomes.items()},
        overlong_turns_left_out=sum(overlong),
        truncated_turns=batch.cuts.get("corrected", 0),
        truncated_turns_left_out=batch.cuts.get("share_missing", 0),
        sampling_unknown_turns=batch.cuts.get("unknown", 0),
    )


def _plan_metrics(plan: BatchPlan) -> pb.StepMetrics:
    return pb.StepMetrics(
        **_same(plan, "tree_tokens", "sample_tokens", "trained_tokens", "token_budget"),
        merge_ratio=plan.sample_tokens / max(1, plan.tree_tokens),
    )


def _update_metrics(result: StepResult) -> pb.StepMetrics:
    names = ("loss", "grad_norm", "memory_retries", "empty_passes", "balance_loss", "updates")
    return pb.StepMetrics(
        **_same(result, *names),
        rank_imbalance=result.imbalance,
        value_loss=result.critic.value_loss,
        value_explained_variance=result.critic.explained_variance,
        mtp_loss=fmean(result.mtp.losses) if result.mtp.losses else 0.0,
        mtp_acceptance={str(k): value for k, value in enumerate(result.mtp.acceptance, 1)},
    )


def _loss_metrics(stats: PolicyStats) -> pb.StepMetrics:
    names = (one.name for one in fields(stats) if one.name != "gaps")
    return pb.StepMetrics(**_same(stats, *names))


def _replay_metrics(result: StepResult) -> pb.StepMetrics:
    replay, plan = result.replay, result.plan
    return pb.StepMetrics(
        replayed_tokens=replay.replayed,
        unreplayed_tokens=replay.tokens - replay.replayed,
        replay_changed_share=replay.changed_share,
        replay_compared_tokens=replay.compared,
        replay_gap_mean=replay.gap,
        replay_free_gap_mean=replay.gap_free,
        replay_split_nodes=plan.split_nodes,
        replay_unfit_records=plan.unfit_routes,
    )


def _time_metrics(times: StepTimes, earlier: Sequence[pb.StepMetrics]) -> pb.StepMetrics:
    names = ("step_s", "wait_s", "publish_s", "checkpoint_s", "run_s")
    return pb.StepMetrics(**_same(times, *names), lost_s=lost_s(times, earlier))


def _same(source: object, *names: str) -> dict[str, Any]:
    """The values that have the same name in `source` as in the metrics."""
    return {name: getattr(source, name) for name in names}


def warn_of_untrained_domains(batch: BatchSamples, batch_id: str, step: int) -> None:
    """Log a warning for each domain without a trained turn."""
    for domain in batch.untrained_domains:
        log.warning(
            "domain_not_trained",
            step=step,
            batch_id=batch_id,
            domain=domain,
            turns={reason: turns for (of, reason), turns in batch.left_out.items() if of == domain},
            remedy="greedy turns: domain_sampling = override, or bound",
        )


def lost_s(times: StepTimes, earlier: Sequence[pb.StepMetrics]) -> float:
    """Seconds since the step before that the parts do not contain; 0 where the end of that step is
    unknown."""
    before_s = earlier[-1].run_s if earlier else 0.0
    if not times.run_s or (earlier and not before_s):
        return 0.0
    return max(0.0, times.run_s - before_s - times.accounted_s)


def _domains(batch: BatchSamples, result: StepResult) -> dict[str, pb.DomainMetrics]:
    domains = {}
    for domain, outcomes in batch.outcomes.items():
        shown = pb.DomainMetrics(
            mean_reward=fmean(outcomes),
            trajectories=len(outcomes),
            length_tokens=fmean(batch.lengths.get(domain, [0])),
            completion_s=median(batch.completions_s.get(domain, [0.0])),
            timed_trajectories=len(batch.completions_s.get(domain, [])),
            speed_baseline_s=batch.baselines_s.get(domain, 0.0),
        )
        stats = result.domains.get(domain)
        if stats is not None:
            shown.trained_tokens = stats.tokens
            shown.entropy = stats.entropy
            shown.clip_fraction = stats.clip_fraction
            shown.staleness_mean = stats.staleness_mean
            shown.gradient_share = stats.gradient_share
        domains[domain] = shown
    return domains


def _engines(batch: BatchSamples, result: StepResult) -> dict[str, pb.EngineMetrics]:
    engines = {
        engine: pb.EngineMetrics(mean_reward=fmean(outcomes), trajectories=len(outcomes))
        for engine, outcomes in batch.outcomes_by_engine.items()
    }
    for engine, stats in result.engines.items():
        shown = engines.setdefault(engine, pb.EngineMetrics())
        shown.trained_tokens = stats.tokens
        shown.logprob_gap_mean = stats.logprob_gap_mean
        shown.inference_gap_mean = stats.inference_gap_mean
        shown.inference_gap_staleness = stats.inference_gap_staleness
        shown.staleness_mean = stats.staleness_mean
    return engines


class Yield(NamedTuple):
    """The factors of J."""

    tokens_per_s: float
    """Sampled tokens trained on per second of the run."""
    gain: float
    """Reward gained per trajectory."""

    @property
    def j(self) -> float:
        """The product of throughput and sample efficiency."""
        return self.tokens_per_s * self.gain


def training_yield(steps: Sequence[pb.StepMetrics]) -> Yield:
    """J so far: trained tokens per second times gain in mean outcome per trajectory.

    The seconds are the whole time of the run: steps, waiting, checkpoints, and time lost to
    crashes. The gain is the mean reward of the last few steps minus that of the first few, per
    trained trajectory: 0 before the second step, negative when rewards fall.
    """
    return _yield(
        seconds=_seconds(steps),
        tokens=sum(step.trained_tokens for step in steps),
        trajectories=sum(step.trajectories for step in steps),
        rewards=[step.mean_reward for step in steps],
    )


def domain_yield(steps: Sequence[pb.StepMetrics], domain: str) -> Yield:
    """J of one domain: its tokens, rewards and trajectories over the whole time of the run, so that
    the throughputs of domains add up to the total."""
    own = [step.domains[domain] for step in steps if domain in step.domains]
    return _yield(
        seconds=_seconds(steps),
        tokens=sum(step.trained_tokens for step in own),
        trajectories=sum(step.trajectories for step in own),
        rewards=[step.mean_reward for step in own],
    )


def _seconds(steps: Sequence[pb.StepMetrics]) -> float:
    return sum(
        step.step_s + step.wait_s + step.publish_s + step.checkpoint_s + step.lost_s
        for step in steps
    )


def _yield(*, seconds: float, tokens: int, trajectories: int, rewards: Sequence[float]) -> Yield:
    few = min(_YIELD_STEPS, len(rewards) // 2)
    if not (few and seconds and trajectories):
        return Yield(0.0, 0.0)
    gain = fmean(rewards[-few:]) - fmean(rewards[:few])
    return Yield(tokens / seconds, gain / trajectories)
