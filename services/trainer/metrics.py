"""What the trainer counts, for Prometheus.

Owns names and updates. The values of a step come from `services.trainer.reporting.step_metrics`.
"""

from __future__ import annotations

from typing import Literal

from forge.runtime.telemetry import counter, gauge, histogram
from forge.v1 import trainer_pb2 as pb
from services.trainer.data.samples import BatchSamples

WEIGHT_VERSION = gauge("forge_trainer_weight_version", "Newest version of the weights published.")
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
