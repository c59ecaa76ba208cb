"""Settings of the trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from forge.core.credit.overlong import OverlongRules
from forge.core.credit.rewards import RewardWeights
from forge.core.errors import InvalidArgument
from forge.rl.algorithms import preset
from forge.rl.config import (
    Correction,
    CriticConfig,
    LearnerConfig,
    MeshShape,
    MtpConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RoutingReplayConfig,
)
from forge.runtime.settings import ServiceConfig
from forge.runtime.settings.agreed import agreed_model, agreed_settings
from forge.runtime.settings.bulk_settings import BulkSettings
from forge.runtime.settings.weight_group_settings import WeightGroupSettings
from services.trainer.mesh import MeshSettings, check_reading
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.setting_tables import (
    AdvantageSettings,
    CanarySettings,
    CheckpointSettings,
    EvaluationSettings,
    LoraSettings,
    TokenValuesSettings,
)
from services.trainer.torchrun_rank import under_torchrun

_AGREED = (
    *("max_steps", "batch_groups", "passes_per_batch", "mini_batches", "seed"),
    *("balance_coef", "nominal_tokens_per_s", "rewards", "overlong", "advantages", "objective"),
    *("correction", "optimizer", "critic", "mtp", "lora", "routing_replay"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(ServiceConfig):
    """The learner: pulls batches from the scheduler, pushes weights to inference."""

    drain_s: Annotated[float, Meta(ge=0, le=3600)] = 600.0
    """Longest wait, when the process stops, for the current step and a checkpoint of it."""
    model_path: str = ""
    """Model directory of the starting weights, in the layout of transformers."""
    start_over: str = ""
    """Id of a lineage to end, as the error at the start names it: train from the starting weights
    instead of its checkpoint. No effect once that lineage has ended."""
    max_steps: Annotated[int, Meta(ge=0)] = 0
    """Optimizer steps to train for; 0: no end."""
    batch_groups: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Groups in a batch; 0: the scheduler's setting."""
    passes_per_batch: Annotated[int, Meta(ge=1, le=64)] = 1
    """Passes over each batch, each of mini_batches optimizer updates."""
    mini_batches: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Parts of a batch with an optimizer update each: whole groups, of nearly equal tokens; fewer
    if the batch has fewer groups. Weights are published once per batch."""
    max_skipped_batches: Annotated[int, Meta(ge=0)] = 10
    """Most batches in a row without a usable gradient; then the run ends. 0: no limit."""
    patience_s: Annotated[float, Meta(ge=1)] = 600.0
    """Longest wait for an unreachable scheduler or pool."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Seed of all random numbers in the trainer."""
    metrics_file: str = ""
    """File to append each step's metrics to; empty: none."""
    tensorboard_dir: str = ""
    """Directory of TensorBoard event files; empty: none."""
    wandb_project: str = ""
    """Project of Weights & Biases; empty: none."""
    trackio_project: str = ""
    """Project of Trackio; empty: none."""
    logged_rollouts: Annotated[int, Meta(ge=0, le=64)] = 0
    """Rollouts of a batch, with their conversations, in a table of Weights & Biases and Trackio; 0:
    none, so prompts and answers stay in the pool."""
    logged_rollouts_every_steps: Annotated[int, Meta(ge=1)] = 10
    """Steps between two of these tables."""
    logprob_gap_alarm: Annotated[float, Meta(ge=0)] = 0.05
    """Mean |log-prob of trainer - engine| over the tokens of least staleness, above which a step
    logs a warning; 0: no warning."""
    device: str = "cpu"
    """Torch device, e.g. cpu or cuda:0; cuda with ranks: one device for each."""
    ranks: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Trainer processes (ranks) on this machine. Under torchrun its number of processes applies
    instead, and this one only in checks of the settings."""
    mesh: MeshSettings = field(default_factory=MeshSettings)
    torch_threads: Annotated[int, Meta(ge=0)] = 0
    """Threads of the tensor library; 0: half the cores, inference has the rest."""
    autocast: Literal["none", "auto", "bfloat16"] = "none"
    """Type of the model's backbone; auto: bfloat16 where the device has it; master weights and the
    head are float32."""
    publish_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights sent to inference; auto: that of the backbone, so float32 unless autocast
    is on."""
    publish_from: Literal["rank_0", "ranks"] = "rank_0"
    """Holder of published weights: rank_0 (all), or ranks (each holds and sends a segment of equal
    size). ranks needs mesh.dp_shard or mesh.tp above 1, workers that reach the gRPC port of each
    rank (port plus its number, on its host), and workers of this release or later."""
    read_from: Literal["rank_0", "ranks"] = "rank_0"
    """Reader and planner of trajectories: rank_0 (all), or ranks (the first of each data group).
    ranks needs data groups, mesh.dp_shard or mesh.tp above 1, and ranks that reach the pool."""
    rank_token_file: str = ""
    """File with a token of `forge token issue rank`, for ranks that read; empty: key_file."""
    kept_versions: Annotated[int, Meta(ge=2, le=64)] = 2
    """Newest published versions in host memory, each as large as the model: `forge weights
    rollback` can return to them."""
    canary: CanarySettings = field(default_factory=CanarySettings)
    weights_dir: str = ""
    """Directory on any mounted file system where the trainer stores each published version for
    workers with the same setting; empty: none. Both must run as the same user."""
    bulk: BulkSettings = field(default_factory=BulkSettings)
    weight_group: WeightGroupSettings = field(default_factory=WeightGroupSettings)
    recompute_activations: bool = False
    """Compute each layer again in the backward pass: a third more work, and only the inputs of
    the layers stay in memory."""
    recompute_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Share of the layers, spread evenly, to which recompute_activations applies."""
    compile_layers: bool = False
    """Compile layers for merged trees. Needs a GPU, a dense model and autocast; not with adapters
    or mesh.tp."""
    token_budget: Annotated[int, Meta(ge=1)] = 16384
    """Most tokens in one forward pass; gradients of several passes are accumulated."""
    token_budget_floor: Annotated[int, Meta(ge=1)] = 256
    """Lower bound of the token budget, which the trainer halves when memory runs out."""
    reference_path: str = ""
    """Model directory of the reference policy; empty: model_path, the starting weights."""
    teacher_path: str = ""
    """Model directory of the teacher of objective.teacher_coef, with the policy's tokenizer; empty:
    none."""
    balance_coef: Annotated[float, Meta(ge=0)] = 0.0
    """Weight of the load-balance loss of a mixture of experts; 0: none."""
    nominal_tokens_per_s: Annotated[float, Meta(ge=1e-3)] = 50.0
    """Rate at which completion times count sampled tokens; the engine's speed has no effect."""
    rewards: RewardWeights = field(default_factory=RewardWeights)
    overlong: OverlongRules = field(default_factory=OverlongRules)
    advantages: AdvantageSettings = field(default_factory=AdvantageSettings)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    correction: Correction = field(default_factory=Correction)
    critic: CriticConfig = field(default_factory=CriticConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraSettings = field(default_factory=LoraSettings)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    routing_replay: RoutingReplayConfig = field(default_factory=RoutingReplayConfig)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    token_values: TokenValuesSettings = field(default_factory=TokenValuesSettings)

    def validate(self) -> None:
        """Raises `InvalidArgument` that names setting and value of an invalid combination."""
        schedule = self.optimizer.learning_rate_schedule
        if schedule != "constant" and not self.max_steps:
            raise InvalidArgument(
                f"optimizer.learning_rate_schedule = {schedule} is not allowed with max_steps = 0: "
                "it falls until the last step"
            )
        if not self.evaluation.tasks and (self.evaluation.every_steps or self.evaluation.at_start):
            name = "every_steps" if self.evaluation.every_steps else "at_start"
            raise InvalidArgument(
                f"evaluation.{name} = {getattr(self.evaluation, name)} is not allowed without "
                "evaluation.tasks, the file of tasks to evaluate on"
            )
        self.token_values.check()
        self.overlong.check()
        self.objective.check(self.correction)
        self._check_advantages()
        self._check_refill()
        self._check_teacher()
        if self.publish_from == "ranks" and not self.mesh_shape.sharded:
            raise InvalidArgument(
                "publish_from = ranks is not allowed with mesh.dp_shard = 1 and mesh.tp = 1: every "
                "rank then has all weights, and rank 0 publishes them"
            )
        check_reading(self.read_from, self.rank_token_file, self.mesh_shape)
        self._check_devices()
        self._check_parts()
        if self.weight_group.backend != "off":
            # It imports gRPC, which `--help` does without.
            from forge.runtime.weights.group_process import require_private

            require_private(self.weight_group, self)

    def _check_devices(self) -> None:
        shape = self.mesh_shape
        if ":" in self.device and shape.ranks > 1:
            kind = self.device.partition(":")[0]
            raise InvalidArgument(
                f"device = {self.device} is not allowed with {shape.ranks} ranks: all would share "
                f"one device; use {kind}, which gives each rank its own"
            )
        mesh = f"mesh.dp_shard = {shape.dp_shard}, mesh.tp = {shape.tp}"
        if shape.sharded and self.optimizer.name == "muon":
            raise InvalidArgument(
                f"optimizer.name = muon is not allowed with {mesh}: it steps whole matrices; use "
                "adamw or adamw_8bit"
            )
        if not self.compile_layers:
            return
        for name, value, least in (("mesh.tp", shape.tp, 1), ("lora.rank", self.lora.rank, 0)):
            if value > least:
                raise InvalidArgument(f"compile_layers = True is not allowed with {name} = {value}")
        if self.autocast == "none":
            raise InvalidArgument(
                "compile_layers = True is not allowed with autocast = none: use bfloat16"
            )

    def _check_parts(self) -> None:
        dropout = self.lora.rank and self.lora.dropout
        for name, value in (("mtp.heads", self.mtp.heads), ("lora.dropout", dropout)):
            if value and self.mesh.tp > 1:
                raise InvalidArgument(
                    f"{name} = {value} is not allowed with mesh.tp = {self.mesh.tp}: ranks have "
                    "parts of a layer; use mesh.dp_shard and mesh.cp"
                )

    def _check_advantages(self) -> None:
        algorithm, advantages = self.objective.algorithm, self.advantages
        if preset(algorithm).critic:
            for name in ("baseline", "normalize_std"):
                if getattr(advantages, name) not in ("auto", "none"):
                    raise InvalidArgument(
                        f"advantages.{name} = {getattr(advantages, name)} is not allowed with "
                        f"objective.algorithm = {algorithm}: its advantages are the critic's"
                    )
        baseline = advantages.rules(preset(algorithm)).baseline
        if advantages.drop_flat_groups and baseline not in ("group_mean", "leave_one_out"):
            raise InvalidArgument(
                "advantages.drop_flat_groups = True is not allowed with the baseline "
                f"{baseline}: a group of equal rewards has advantages there; use group_mean or "
                "leave_one_out"
            )

    def _check_refill(self) -> None:
        if self.advantages.refill_groups and not self.advantages.drop_flat_groups:
            raise InvalidArgument(
                f"advantages.refill_groups = {self.advantages.refill_groups} is not allowed with "
                "advantages.drop_flat_groups = False: flat groups then stay in the batch"
            )

    def _check_teacher(self) -> None:
        coef = self.objective.teacher_coef
        if bool(coef) != bool(self.teacher_path):
            raise InvalidArgument(
                f"objective.teacher_coef = {coef} is not allowed with teacher_path = "
                f"{self.teacher_path!r}: a teacher needs both"
            )
        if coef and self.advantages.drop_flat_groups:
            raise InvalidArgument(
                "advantages.drop_flat_groups = True is not allowed with objective.teacher_coef = "
                f"{coef}: a group of equal rewards has the teacher's advantages"
            )

    def agreed(self) -> Mapping[str, str]:
        """A standby continues the leader's optimization."""
        # It imports gRPC, which `--help` does without.
        from forge.runtime.weights import DEFAULT_POLICY

        return (
            agreed_settings("trainer", self, *_AGREED)
            | agreed_model(self.model_path)
            | {"/policy": DEFAULT_POLICY}
        )

    def learner(self) -> LearnerConfig:
        """The settings of the optimizer step."""
        return LearnerConfig(
            optimizer=self.optimizer,
            total_updates=self.max_steps * self.passes_per_batch * self.mini_batches,
            objective=self.objective,
            correction=self.correction,
            critic=self.critic,
            mtp=self.mtp,
            passes_per_batch=self.passes_per_batch,
            mini_batches=self.mini_batches,
            compare_replay_every=self.routing_replay.compare_every_steps,
            token_budget=self.token_budget,
            token_budget_floor=self.token_budget_floor,
        )

    def credit_rules(self) -> CreditRules:
        """The settings of rewards and advantages."""
        own = preset(self.objective.algorithm)
        return CreditRules(
            weights=self.rewards,
            tokens_per_s=self.nominal_tokens_per_s,
            advantages=self.advantages.rules(own),
            overlong=self.overlong,
            critic=own.critic,
            train_side_calls=frozenset(self.advantages.train_side_calls),
            drop_flat_groups=self.advantages.drop_flat_groups,
        )

    @property
    def mesh_shape(self) -> MeshShape:
        """The mesh of all ranks. Raises `InvalidArgument` for settings that make none."""
        return self.mesh.shape(int(os.environ["WORLD_SIZE"]) if under_torchrun() else self.ranks)

    def threads(self) -> int:
        """Intra-operation threads of each rank."""
        here = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else self.ranks
        return self.torch_threads or max(1, (os.cpu_count() or 2) // 2 // here)
