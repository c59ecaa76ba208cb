"""The metrics of a step: put together, and shown to Prometheus.

Owns their definitions (docs/training.md has them in words), the yield J among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from forge.rl.learner.types import StepResult
from forge.runtime.telemetry import counter, gauge, histogram
from forge.v1 import trainer_pb2 as pb
from services.trainer.data.samples import BatchSamples

_YIELD_STEPS = 5
"""Steps whose mean reward stands for the beginning, and for now, in the yield."""

_STEPS = counter("forge_trainer_steps_total", "Optimizer steps taken.")
_SKIPPED = counter("forge_trainer_batches_skipped_total", "Batches that gave no usable gradient.")
_TOKENS = counter("forge_trainer_trained_tokens_total", "Sampled tokens trained on.")
_FLAT = counter(
    "forge_trainer_flat_groups_total", "Groups whose rollouts all earned the same but for speed."
)
_EXCLUDED = counter("forge_trainer_excluded_trajectories_total", "Trajectories that do not add up.")
_UNTIMED = counter(
    "forge_trainer_untimed_trajectories_total", "Trajectories without a speed, for want of times."
)
_MEMORY = counter(
    "forge_trainer_memory_retries_total", "Batches begun anew in smaller trees, for want of memory."
)
_CHECKPOINT_STEP = gauge("forge_trainer_checkpoint_step", "Step of the newest durable checkpoint.")
_CHECKPOINT_S = gauge("forge_trainer_checkpoint_seconds", "Writing the newest checkpoint.")
_CHECKPOINT_FAILING = gauge(
    "forge_trainer_checkpoint_failing", "1 when the newest checkpoint could not be written."
)
_STEP_S = histogram(
    "forge_trainer_step_seconds", "Computing one step.", buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300)
)
_TRUNCATED = counter(
    "forge_trainer_truncated_turns_total", "Turns sampled with top_p or top_k that were trained on."
)
_LEFT_OUT = counter(
    "forge_trainer_truncated_turns_left_out_total",
    "Turns sampled with top_p or top_k that were left out: the share that the cut left is unknown.",
)
_UNKNOWN = counter(
    "forge_trainer_sampling_unknown_turns_total",
    "Turns trained on that were recorded before top_p and top_k were.",
)
_THROUGHPUT = gauge(
    "forge_trainer_trained_tokens_per_second", "Sampled tokens trained on, over computing the step."
)
_WAIT_S = gauge("forge_trainer_wait_seconds", "From the end of a step until the next batch.")
_PUBLISH_S = gauge("forge_trainer_publish_seconds", "Copying and announcing the newest weights.")
_CAPTURE_S = gauge("forge_trainer_checkpoint_capture_seconds", "Copying what a checkpoint saves.")
_LOST_S = counter(
    "forge_trainer_lost_seconds_total", "Steps taken back, resuming, batches given up."
)
_RUN_S = gauge("forge_trainer_run_seconds", "Of the run, stops on purpose left out.")
_GAUGES = {
    name: gauge(f"forge_trainer_{name}", help)
    for name, help in (
        ("step", "Newest optimizer step."),
        ("loss", "Loss of the newest step."),
        ("mean_reward", "Mean outcome reward of the newest batch."),
        ("groups", "Groups of the newest batch."),
        ("trajectories", "Trajectories of the newest batch."),
        ("entropy", "Mean entropy over trained tokens, nats."),
        ("clip_fraction", "Share of tokens whose ratio met a bound of the loss."),
        ("masked_fraction", "Share of tokens left out by the off-policy correction."),
        ("reference_kl", "Mean k3 estimate of KL(policy || reference) per token."),
        ("behavior_kl", "Mean k3 estimate of KL(behavior || policy) per token."),
        ("inference_gap_mean", "Mean |log pi - log pi_behavior|, freshest tokens."),
        ("inference_gap_staleness", "Staleness of the freshest tokens."),
        ("grad_norm", "Gradient norm before clipping."),
        ("staleness_mean", "Mean weight versions between sampling and training."),
        ("staleness_max", "Most weight versions between sampling and training."),
        ("logprob_gap_mean", "Mean |log pi - log pi_behavior|."),
        ("logprob_gap_p99", "99th percentile of |log pi - log pi_behavior|."),
        ("sample_tokens", "Tokens of all samples of the newest batch."),
        ("tree_tokens", "Tokens of its merged trees: those that were computed."),
        ("merge_ratio", "Tokens of all samples over tokens of the merged trees."),
        ("token_budget", "Most tokens in one pass: lowered when memory did not suffice."),
        ("value_loss", "Half the mean squared error of the critic's values."),
        ("value_explained_variance", "Share of the targets' variance that values explain."),
        ("balance_loss", "Load-balance loss of the experts."),
        ("mtp_loss", "Mean loss of the draft heads."),
        ("yield_j", "Effective agent training yield so far."),
    )
}
_ACCEPTANCE = gauge(
    "forge_trainer_mtp_acceptance", "Share of drafts that would be accepted, by head.", ["head"]
)
_REWARD = gauge("forge_trainer_reward", "Mean outcome reward of the newest batch.", ["domain"])
_DOMAIN_GAUGES = {
    name: gauge(f"forge_trainer_domain_{name}", help, ["domain"])
    for name, help in (
        ("trajectories", "Trajectories of the newest batch."),
        ("trained_tokens", "Tokens trained on in the newest step."),
        ("length_tokens", "Mean sampled tokens per trajectory."),
        ("completion_s", "Median completion time in the newest batch, seconds."),
        ("timed_trajectories", "Trajectories of the newest batch that have a completion time."),
        ("speed_baseline_s", "Completion time with speed 1/2 in the newest batch, seconds."),
        ("entropy", "Mean entropy over trained tokens, nats."),
        ("clip_fraction", "Share of tokens whose ratio met a bound of the loss."),
        ("staleness_mean", "Mean weight versions between sampling and training."),
        ("gradient_share", "Share of the sum over tokens of |d loss / d log pi|."),
        ("yield_j", "Effective agent training yield so far."),
    )
}
_EVALUATIONS = counter("forge_trainer_evaluations_total", "Evaluations that fell due.", ["result"])
_EVALUATING = gauge("forge_trainer_evaluating", "1 while an evaluation is in flight.")
_EVALUATION_GAUGES = {
    name: gauge(f"forge_trainer_evaluation_{name}", help)
    for name, help in (
        ("step", "Step that the newest evaluation is about."),
        ("min_weight_version", "Oldest weights that sampled in the newest evaluation."),
        ("max_weight_version", "Newest weights that sampled in the newest evaluation."),
        ("mean_reward", "Mean outcome reward of the newest evaluation."),
        ("mean_reward_low", "Lower end of its 95 % confidence interval."),
        ("mean_reward_high", "Upper end of its 95 % confidence interval."),
        ("rollouts", "Rollouts of the newest evaluation."),
        ("failed", "Rollouts of the newest evaluation that were given up."),
    )
}
_EVALUATION_DOMAIN_GAUGES = {
    name: gauge(f"forge_trainer_evaluation_domain_{name}", help, ["domain"])
    for name, help in (
        ("mean_reward", "Mean outcome reward in the newest evaluation."),
        ("mean_reward_low", "Lower end of its 95 % confidence interval."),
        ("mean_reward_high", "Upper end of its 95 % confidence interval."),
        ("solved_share", "Share of rollouts in the newest evaluation whose outcome was 1."),
        ("length_tokens", "Mean sampled tokens per rollout in the newest evaluation."),
        ("failed", "Rollouts in the newest evaluation that were given up."),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where the time of one step went."""

    step_s: float
    """Forward, backward, update."""
    wait_s: float
    """From the end of the previous step until the batch was there."""
    publish_s: float
    checkpoint_s: float = 0.0
    """Copying for a checkpoint, after the step before."""
    run_s: float = 0.0
    """Of the run, at the end of the step; 0: not known."""

    @property
    def told_s(self) -> float:
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
    """All about one step that updated the weights."""
    stats, plan = result.stats, result.plan
    metrics = pb.StepMetrics(
        step=step,
        weight_version=weight_version,
        loss=result.loss,
        mean_reward=batch.mean_outcome,
        reward_by_domain={domain: fmean(values) for domain, values in batch.outcomes.items()},
        clip_fraction=stats.clip_fraction,
        entropy=stats.entropy,
        grad_norm=result.grad_norm,
        staleness_mean=stats.staleness_mean,
        staleness_max=stats.staleness_max,
        logprob_gap_mean=stats.logprob_gap_mean,
        logprob_gap_p99=stats.logprob_gap_p99,
        merge_ratio=plan.sample_tokens / max(1, plan.tree_tokens),
        tree_tokens=plan.tree_tokens,
        sample_tokens=plan.sample_tokens,
        trained_tokens=plan.trained_tokens,
        step_s=times.step_s,
        wait_s=times.wait_s,
        publish_s=times.publish_s,
        checkpoint_s=times.checkpoint_s,
        lost_s=lost_s(times, earlier),
        run_s=times.run_s,
        groups=batch.groups,
        trajectories=batch.trajectories,
        trained_tokens_per_s=plan.trained_tokens / max(1e-9, times.step_s),
        masked_fraction=stats.masked_fraction,
        reference_kl=stats.reference_kl,
        behavior_kl=stats.behavior_kl,
        inference_gap_mean=stats.inference_gap_mean,
        inference_gap_staleness=stats.inference_gap_staleness,
        token_budget=plan.token_budget,
        memory_retries=result.memory_retries,
        value_loss=result.critic.value_loss,
        value_explained_variance=result.critic.explained_variance,
        domains=_domains(batch, result),
        balance_loss=result.balance_loss,
        mtp_loss=fmean(result.mtp.losses) if result.mtp.losses else 0.0,
        truncated_turns=batch.cuts.get("corrected", 0),
        truncated_turns_left_out=batch.cuts.get("share_missing", 0),
        sampling_unknown_turns=batch.cuts.get("unknown", 0),
        mtp_acceptance={str(k): value for k, value in enumerate(result.mtp.acceptance, 1)},
    )
    steps = [*earlier, metrics]
    metrics.yield_j = training_yield(steps)
    for domain, own in metrics.domains.items():
        own.yield_j = domain_yield(steps, domain)
    return metrics


def lost_s(times: StepTimes, earlier: Sequence[pb.StepMetrics]) -> float:
    """Seconds since the step before that its times do not account for; 0 where the end of the step
    before is not known."""
    before_s = earlier[-1].run_s if earlier else 0.0
    if not times.run_s or (earlier and not before_s):
        return 0.0
    return max(0.0, times.run_s - before_s - times.told_s)


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


def training_yield(steps: Sequence[pb.StepMetrics]) -> float:
    """J so far: sampled tokens per second times mean outcome gained per trajectory.

    Throughput counts the sampled tokens that were trained on, over all the time of the run: steps,
    waiting, checkpoints, and what crashes lost. The gain is the mean reward of the last few steps
    less that of the first few, per trajectory consumed: 0 until there are two steps, negative when
    training makes it worse.
    """
    return _yield(
        seconds=_seconds(steps),
        tokens=sum(step.trained_tokens for step in steps),
        trajectories=sum(step.trajectories for step in steps),
        rewards=[step.mean_reward for step in steps],
    )


def domain_yield(steps: Sequence[pb.StepMetrics], domain: str) -> float:
    """J of one domain: its tokens, rewards and trajectories, over all the time there was, so that
    throughputs of domains add up to that of the whole."""
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


def _yield(*, seconds: float, tokens: int, trajectories: int, rewards: Sequence[float]) -> float:
    few = min(_YIELD_STEPS, len(rewards) // 2)
    if not (few and seconds and trajectories):
        return 0.0
    gain = fmean(rewards[-few:]) - fmean(rewards[:few])
    return tokens / seconds * gain / trajectories


def show(metrics: pb.StepMetrics, batch: BatchSamples) -> None:
    """To Prometheus."""
    _STEPS.inc()
    _TOKENS.inc(metrics.trained_tokens)
    _FLAT.inc(batch.flat_groups)
    _EXCLUDED.inc(batch.excluded)
    _UNTIMED.inc(batch.untimed)
    _MEMORY.inc(metrics.memory_retries)
    _TRUNCATED.inc(metrics.truncated_turns)
    _LEFT_OUT.inc(metrics.truncated_turns_left_out)
    _UNKNOWN.inc(metrics.sampling_unknown_turns)
    _STEP_S.observe(metrics.step_s)
    _THROUGHPUT.set(metrics.trained_tokens_per_s)
    _WAIT_S.set(metrics.wait_s)
    _PUBLISH_S.set(metrics.publish_s)
    _CAPTURE_S.set(metrics.checkpoint_s)
    _LOST_S.inc(metrics.lost_s)
    _RUN_S.set(metrics.run_s)
    for name, shown in _GAUGES.items():
        shown.set(getattr(metrics, name))
    for head, accepted in metrics.mtp_acceptance.items():
        _ACCEPTANCE.labels(head).set(accepted)
    for domain, reward in metrics.reward_by_domain.items():
        _REWARD.labels(domain).set(reward)
    for domain, own in metrics.domains.items():
        for name, shown in _DOMAIN_GAUGES.items():
            shown.labels(domain).set(getattr(own, name))


def show_checkpoint(step: int, write_s: float) -> None:
    """To Prometheus: one is durable."""
    _CHECKPOINT_STEP.set(step)
    _CHECKPOINT_S.set(write_s)
    _CHECKPOINT_FAILING.set(0)


def show_checkpoint_failed() -> None:
    """To Prometheus: one could not be written."""
    _CHECKPOINT_FAILING.set(1)


def show_skipped(batch: BatchSamples) -> None:
    """To Prometheus: a batch that changed nothing."""
    _SKIPPED.inc()
    _EXCLUDED.inc(batch.excluded)


def show_evaluating(in_flight: bool) -> None:
    """To Prometheus."""
    _EVALUATING.set(in_flight)


def show_evaluation(evaluation: pb.Evaluation) -> None:
    """To Prometheus: one ended."""
    _EVALUATIONS.labels("done").inc()
    for name, shown in _EVALUATION_GAUGES.items():
        shown.set(getattr(evaluation, name))
    for domain, own in evaluation.domains.items():
        for name, shown in _EVALUATION_DOMAIN_GAUGES.items():
            shown.labels(domain).set(getattr(own, name))


def show_no_evaluation(result: Literal["skipped", "refused"]) -> None:
    """To Prometheus: one that fell due was left out, or refused by the scheduler."""
    _EVALUATIONS.labels(result).inc()
