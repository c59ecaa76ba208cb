"""The trainer's Prometheus metrics.

Owns names and updates. `services.trainer.reporting.step_metrics` computes the values of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from forge.runtime.telemetry import counter, gauge, histogram
from forge.runtime.weights import WeightHold
from forge.v1 import trainer_pb2 as pb
from services.trainer.samples.samples import BatchSamples

WEIGHT_VERSION = gauge("forge_trainer_weight_version", "Newest published weight version.")
_HELD_VERSION = gauge(
    "forge_trainer_held_weight_version",
    "Version that workers serve instead of the newest, after a rollback or beside a canary; 0: "
    "none.",
)
_CANARY_VERSION = gauge(
    "forge_trainer_canary_weight_version", "Version that the workers of a canary serve; 0: none."
)
VersionRole = Literal["base", "canary"]
_VERSION_GAUGES = {
    name: gauge(f"forge_trainer_version_{name}", text, ["weights"])
    for name, text in (
        (
            "mean_reward",
            "Mean outcome of the trained trajectories that a held version alone sampled; weights: "
            "base, canary.",
        ),
        ("trajectories", "Trained trajectories that a held version alone sampled."),
        (
            "logprob_gap",
            "Mean |log pi - log pi_behavior| over the trained tokens that a held version sampled.",
        ),
        ("tokens", "Trained tokens that a held version sampled."),
    )
}
_STEPS = counter("forge_trainer_steps_total", "Optimizer steps taken.")
_SKIPPED = counter("forge_trainer_batches_skipped_total", "Batches without a usable gradient.")
_EXCLUDED = counter(
    "forge_trainer_excluded_trajectories_total",
    "Trajectories left out because their records contradict each other, or have an id "
    "outside the policy's vocabulary.",
)
_UNTIMED = counter(
    "forge_trainer_untimed_trajectories_total",
    "Trajectories without a speed, because their records lack a time.",
)
_CHECKPOINT_STEP = gauge("forge_trainer_checkpoint_step", "Step of the newest durable checkpoint.")
_CHECKPOINT_S = gauge("forge_trainer_checkpoint_seconds", "Time to write the newest checkpoint.")
CHECKPOINT_FAILING = gauge(
    "forge_trainer_checkpoint_failing", "1 if the newest write of a checkpoint failed, else 0."
)
CHECKPOINT_COPY_FAILING = gauge(
    "forge_trainer_checkpoint_copy_failing",
    "1 if the newest copy of a checkpoint to checkpoint.copy_to failed, else 0.",
)
TOKEN_VALUE_BYTES = gauge("forge_trainer_token_value_bytes", "Size of the stored token values.")
TOKEN_VALUES_LOST = counter(
    "forge_trainer_token_values_lost_total",
    "Steps whose token values were not stored; cause: disk (a write failed), busy (earlier writes "
    "had not ended).",
    ["cause"],
)
_STEP_S = histogram(
    "forge_trainer_step_seconds", "Duration of a step.", buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300)
)
_NOT_TRAINED = counter(
    "forge_trainer_left_out_turns_total",
    "Turns that were not trained, by reason: empty, aborted, greedy (temperature 0), overlong (cut "
    "off by a token limit), share_missing, side_call, excluded (by the agent), other_model.",
    ["domain", "reason"],
)
_UNTRAINED_DOMAIN = counter(
    "forge_trainer_untrained_domain_batches_total",
    "Batches in which every turn of a domain was left out; forge_trainer_left_out_turns_total has "
    "the reasons.",
    ["domain"],
)
ANNOUNCE_S = gauge(
    "forge_trainer_announce_seconds",
    "Time to digest and announce the newest weights, while the next step runs.",
)
CANARIES = counter(
    "forge_trainer_canaries_total",
    "Automatic canaries, by outcome: begun, promoted, rolled_back, ended (too few workers decode).",
    ["outcome"],
)
WEIGHT_SEGMENTS = gauge(
    "forge_trainer_weight_segments",
    "Ranks that send segments of the newest version; 0: rank 0 sends all of it.",
)
WEIGHT_SENT_BYTES = counter(
    "forge_trainer_weight_sent_bytes_total",
    "Bytes of weights sent over gRPC, by rank. Ranks above 0 report theirs at each publication.",
    ["rank"],
)
WEIGHT_FILES = counter(
    "forge_trainer_weight_files_total",
    "Versions stored for workers, by way (memory, directory) and outcome: written, failed.",
    ["way", "outcome"],
)
WEIGHT_GROUPS = counter(
    "forge_trainer_weight_groups_total",
    "Groups of workers that were to receive a version together, by outcome: complete, failed, or "
    "not_formed (a fleet that starts, or a newer version).",
    ["outcome"],
)
WEIGHT_GROUP_MEMBERS = gauge(
    "forge_trainer_weight_group_members", "Workers of the newest group that formed."
)
_COUNTERS = {
    "lost_s": counter(
        "forge_trainer_lost_seconds_total", "Time lost by rewinds, resumes and skipped batches."
    ),
} | {
    name: counter(f"forge_trainer_{name}_total", help)
    for name, help in (
        ("trained_tokens", "Sampled tokens trained on."),
        ("flat_groups", "Flat groups: all rollouts have the same outcome and process rewards."),
        ("refill_groups", "Groups leased in place of flat ones."),
        ("memory_retries", "Retries of a batch in smaller trees after memory ran out."),
        ("empty_passes", "Passes without effect, so that all data groups run the same number."),
        ("truncated_turns", "Trained turns that were sampled with top_p or top_k."),
        (
            "truncated_turns_left_out",
            "Turns sampled with top_p or top_k and left out: the share of allowed tokens is "
            "unknown.",
        ),
        (
            "overlong_turns_left_out",
            "Turns left out by overlong.mask: a token limit cut off their answer, or another "
            "answer of their trajectory.",
        ),
        (
            "sampling_unknown_turns",
            "Trained turns of earlier releases, which did not record top_p and top_k.",
        ),
    )
}
"""By field of the step's metrics; so are the gauges."""
_GAUGES = {
    "trained_tokens_per_s": gauge(
        "forge_trainer_trained_tokens_per_second",
        "Sampled tokens trained on, per second of the step.",
    ),
    "wait_s": gauge("forge_trainer_wait_seconds", "Time from the end of a step to the next batch."),
    "publish_s": gauge(
        "forge_trainer_publish_seconds",
        "Time that training waited for the copy of the new weights and the previous publication.",
    ),
    "checkpoint_s": gauge(
        "forge_trainer_checkpoint_capture_seconds", "Time to copy a checkpoint's state."
    ),
    "run_s": gauge("forge_trainer_run_seconds", "Time of the run, without intended stops."),
} | {
    name: gauge(f"forge_trainer_{name}", help)
    for name, help in (
        ("step", "Newest optimizer step."),
        ("loss", "Loss of the newest step."),
        ("mean_reward", "Mean outcome reward of the newest batch."),
        ("groups", "Groups of the newest batch."),
        ("trajectories", "Trajectories of the newest batch."),
        ("entropy", "Mean entropy over trained tokens, nats."),
        ("clip_fraction", "Share of trained tokens whose ratio exceeds a bound of the loss."),
        ("masked_fraction", "Share of trained tokens that the off-policy correction masks."),
        ("reference_kl", "Mean k3 estimate of KL(policy || reference) per token."),
        ("teacher_kl", "Mean of log pi - log pi_teacher per token, an estimate of their KL."),
        ("behavior_kl", "Mean k3 estimate of KL(behavior || policy) per token."),
        ("inference_gap_mean", "Mean |log pi - log pi_behavior| over tokens of least staleness."),
        (
            "inference_gap_staleness",
            "Least staleness of the trained tokens: see inference_gap_mean.",
        ),
        ("grad_norm", "Gradient norm before clipping."),
        ("staleness_mean", "Mean number of weight versions between sampling and training."),
        ("staleness_max", "Largest number of weight versions between sampling and training."),
        ("logprob_gap_mean", "Mean |log pi - log pi_behavior|."),
        ("logprob_gap_p99", "99th percentile of |log pi - log pi_behavior|."),
        ("sample_tokens", "Tokens of all samples of the newest batch."),
        ("tree_tokens", "Tokens computed in the newest batch: those of its prefix trees."),
        ("merge_ratio", "Tokens of all samples over tokens of the prefix trees."),
        ("token_budget", "Most tokens in one forward pass; lowered when memory runs out."),
        ("value_loss", "Half the mean squared error of the critic's values."),
        ("value_explained_variance", "Share of the targets' variance that the critic explains."),
        ("rank_imbalance", "Time that data groups wait for each other, over their computing time."),
        ("replayed_tokens", "Computed tokens whose recorded experts were replayed."),
        ("unreplayed_tokens", "Computed tokens without recorded experts, with routing_replay."),
        ("replay_changed_share", "Share of replayed tokens for which the model chose otherwise."),
        ("replay_compared_tokens", "Trained tokens computed with and without replay."),
        ("replay_gap_mean", "Mean |log pi - log pi_behavior| of compared tokens, with replay."),
        ("replay_free_gap_mean", "Mean |log pi - log pi_behavior| of them, without replay."),
        ("replay_unfit_records", "Records of experts that do not fit the model."),
        ("replay_split_nodes", "Tree nodes split because the recorded experts of samples differ."),
        ("balance_loss", "Load-balance loss of the experts."),
        ("mtp_loss", "Mean loss of the draft heads."),
        ("updates", "Updates of the weights by the newest step."),
        ("overlong_penalty", "Mean penalty on long answers per trajectory; at most 0."),
        ("yield_j", "Effective agent training yield so far."),
        ("yield_tokens_per_s", "Factor of the yield: sampled tokens trained on per second."),
        ("yield_gain", "Factor of the yield: reward gained per trajectory."),
    )
}
_ACCEPTANCE = gauge(
    "forge_trainer_mtp_acceptance", "Share of drafts that decode would accept.", ["head"]
)
_REWARD = gauge("forge_trainer_reward", "Mean outcome reward of the newest batch.", ["domain"])
_COMPONENT = gauge(
    "forge_trainer_reward_component",
    "Mean of the rewards of one name over the newest batch's trajectories that have one.",
    ["name"],
)
_DOMAIN_GAUGES = {
    name: gauge(f"forge_trainer_domain_{name}", help, ["domain"])
    for name, help in (
        ("trajectories", "Trajectories of the newest batch."),
        ("trained_tokens", "Trained tokens of the newest step."),
        ("length_tokens", "Mean sampled tokens per trajectory."),
        ("completion_s", "Median completion time in the newest batch, seconds."),
        ("timed_trajectories", "Trajectories of the newest batch that have a completion time."),
        ("speed_baseline_s", "Completion time of speed 1/2 in the newest batch, seconds."),
        ("entropy", "Mean entropy over trained tokens, nats."),
        ("clip_fraction", "Share of trained tokens whose ratio exceeds a bound of the loss."),
        ("staleness_mean", "Mean number of weight versions between sampling and training."),
        ("gradient_share", "Share of the sum over tokens of |d loss / d log pi|."),
        ("yield_j", "Effective agent training yield so far."),
    )
}
_ENGINE_GAUGES = {
    name: gauge(f"forge_trainer_engine_{name}", help, ["engine"])
    for name, help in (
        ("mean_reward", "Mean outcome reward of the trajectories that the engine sampled alone."),
        ("trajectories", "Trajectories of the newest batch that the engine sampled alone."),
        ("trained_tokens", "Trained tokens of the newest step that the engine sampled."),
        ("logprob_gap_mean", "Mean |log pi - log pi_behavior| over the engine's tokens."),
        (
            "inference_gap_mean",
            "Mean |log pi - log pi_behavior| over the engine's tokens of least staleness.",
        ),
        ("inference_gap_staleness", "Least staleness of the engine's tokens."),
        ("staleness_mean", "Mean number of weight versions between sampling and training."),
    )
}
_OVER = {"mean_reward": "trajectories", "trajectories": "trajectories"}
"""The count that a gauge of an engine is a mean over, or is itself; of others `trained_tokens`."""
EVALUATIONS = counter(
    "forge_trainer_evaluations_total",
    "Due evaluations, by result: done, skipped, refused.",
    ["result"],
)
EVALUATING = gauge("forge_trainer_evaluating", "1 while an evaluation is in flight.")
_EVALUATION_GAUGES = {
    name: gauge(f"forge_trainer_evaluation_{name}", help)
    for name, help in (
        ("step", "Step of the newest evaluation."),
        ("min_weight_version", "Oldest weight version that sampled in the newest evaluation."),
        ("max_weight_version", "Newest weight version that sampled in the newest evaluation."),
        ("mean_reward", "Mean outcome reward of the newest evaluation."),
        ("mean_reward_low", "Lower end of the 95 % confidence interval of mean_reward."),
        ("mean_reward_high", "Upper end of the 95 % confidence interval of mean_reward."),
        ("rollouts", "Rollouts of the newest evaluation."),
        ("failed", "Failed rollouts of the newest evaluation."),
    )
}
_EVALUATION_DOMAIN_GAUGES = {
    name: gauge(f"forge_trainer_evaluation_domain_{name}", help, ["domain"])
    for name, help in (
        ("mean_reward", "Mean outcome reward in the newest evaluation."),
        ("mean_reward_low", "Lower end of the 95 % confidence interval of mean_reward."),
        ("mean_reward_high", "Upper end of the 95 % confidence interval of mean_reward."),
        ("solved_share", "Share of rollouts in the newest evaluation with outcome 1."),
        ("length_tokens", "Mean sampled tokens per rollout in the newest evaluation."),
        ("failed", "Failed rollouts in the newest evaluation."),
    )
}


def show(metrics: pb.StepMetrics, batch: BatchSamples) -> None:
    """A step was taken."""
    _STEPS.inc()
    _show_left_out(batch)
    _UNTIMED.inc(batch.untimed)
    _STEP_S.observe(metrics.step_s)
    for name, counted in _COUNTERS.items():
        counted.inc(getattr(metrics, name))
    for name, shown in _GAUGES.items():
        shown.set(getattr(metrics, name))
    for head, accepted in metrics.mtp_acceptance.items():
        _ACCEPTANCE.labels(head).set(accepted)
    for domain, reward in metrics.reward_by_domain.items():
        _REWARD.labels(domain).set(reward)
    _COMPONENT.clear()
    for name, value in metrics.reward_components.items():
        _COMPONENT.labels(name).set(value)
    for domain, own in metrics.domains.items():
        for name, shown in _DOMAIN_GAUGES.items():
            shown.labels(domain).set(getattr(own, name))
    _show_engines(metrics)


def _show_engines(metrics: pb.StepMetrics) -> None:
    for shown in _ENGINE_GAUGES.values():
        # An engine that has left the fleet has no value in later batches.
        shown.clear()
    for engine, of_engine in metrics.engines.items():
        for name, shown in _ENGINE_GAUGES.items():
            over = _OVER.get(name, "trained_tokens")
            # A mean over nothing is no zero.
            if over == name or getattr(of_engine, over):
                shown.labels(engine).set(getattr(of_engine, name))


def show_hold(hold: WeightHold) -> None:
    """A hold began, changed or ended."""
    _HELD_VERSION.set(hold.base.weight_version if hold.base is not None else 0)
    _CANARY_VERSION.set(hold.canary.weight_version if hold.canary is not None else 0)


def follow_qualities(quality_of: Callable[[VersionRole], object]) -> None:
    """Show the quality of the held versions whenever it is read: an object with an attribute for
    each of these gauges."""
    roles: tuple[VersionRole, ...] = ("base", "canary")

    def value(role: VersionRole, name: str) -> float:
        return float(getattr(quality_of(role), name))

    for role in roles:
        for name, shown in _VERSION_GAUGES.items():
            shown.labels(role).set_function(partial(value, role, name))


def show_checkpoint(step: int, write_s: float) -> None:
    """A checkpoint is durable."""
    _CHECKPOINT_STEP.set(step)
    _CHECKPOINT_S.set(write_s)
    CHECKPOINT_FAILING.set(0)


def show_skipped(batch: BatchSamples) -> None:
    """A batch was skipped."""
    _SKIPPED.inc()
    _show_left_out(batch)


def _show_left_out(batch: BatchSamples) -> None:
    _EXCLUDED.inc(batch.excluded)
    for (domain, reason), turns in batch.left_out.items():
        _NOT_TRAINED.labels(domain, reason).inc(turns)
    for domain in batch.untrained_domains:
        _UNTRAINED_DOMAIN.labels(domain).inc()


def show_evaluation(evaluation: pb.Evaluation) -> None:
    """An evaluation ended."""
    EVALUATIONS.labels("done").inc()
    for name, shown in _EVALUATION_GAUGES.items():
        shown.set(getattr(evaluation, name))
    for domain, own in evaluation.domains.items():
        for name, shown in _EVALUATION_DOMAIN_GAUGES.items():
            shown.labels(domain).set(getattr(own, name))
