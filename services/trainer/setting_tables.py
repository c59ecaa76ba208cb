"""Tables of the trainer's settings.

Owns the tables that only the trainer reads. Not here: those of the optimizer step
(`forge.rl.config`), of credit (`forge.core.credit`) and of the mesh (`services.trainer.mesh`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from forge.core.credit.advantages import SPREAD_FLOOR, AdvantageRules, Baseline, Spread
from forge.core.errors import InvalidArgument
from forge.rl.algorithms import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters (LoRA)."""

    rank: Annotated[int, Meta(ge=0)] = 0
    """Train adapters of this rank on frozen weights; 0: train all weights."""
    alpha: Annotated[float, Meta(ge=0)] = 32.0
    """The output of the adapters is scaled by alpha / rank."""
    dropout: Annotated[float, Meta(ge=0, le=0.99)] = 0.0
    """Dropout before the adapters."""
    targets: tuple[str, ...] = ("all-linear",)
    """Linear layers with adapters, by name or end of name; all-linear: all but the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints of the learner's state."""

    dir: str = ".forge/checkpoints"
    """Directory of the checkpoints."""
    copy_to: str = ""
    """URL of fsspec, e.g. s3://bucket/run, to which the trainer copies each checkpoint; it
    continues from there if it lacks the newest one. Empty: none. s3:// needs the package s3fs."""
    every_steps: Annotated[int, Meta(ge=1)] = 10
    """Optimizer steps between checkpoints: the work that a crash can cost."""
    keep_last: Annotated[int, Meta(ge=1)] = 2
    """Newest checkpoints to keep; if one is damaged, the trainer restores the one before."""
    keep_every_steps: Annotated[int, Meta(ge=0)] = 0
    """Also keep, for good, the first checkpoint at or after each multiple of this number of steps;
    0: none. The pool does not wait for them: it frees groups once the keep_last newest include
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanarySettings:
    """Automatic canary: new weights serve a share of the workers before all of them."""

    share: Annotated[float, Meta(ge=0, le=0.9)] = 0.0
    """Share of the workers that serve a new version first; 0: all follow the newest at once."""
    trajectories: Annotated[int, Meta(ge=1)] = 64
    """Trained trajectories that each of canary and base must have sampled alone before the
    judgement."""
    max_logprob_gap: Annotated[float, Meta(ge=0)] = 0.2
    """Largest mean |log-prob of trainer - engine| of the canary's tokens, staleness included."""
    max_broken_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Largest share of answers of the canary that end with a log-prob that is not finite."""
    max_reward_drop: Annotated[float, Meta(ge=0)] = 0.2
    """Largest amount by which the mean reward of the canary may be below that of its base."""
    max_wait_s: Annotated[float, Meta(ge=0)] = 21600.0
    """Longest time from its begin to its judgement; then the canary is rolled back. 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValuesSettings:
    """Token values, for the token view of the console."""

    tokens_per_step: Annotated[int, Meta(ge=0, le=16_777_216)] = 65536
    """Most trained tokens of a step whose values (log-prob, importance ratio, entropy, advantage)
    the trainer stores: whole turns of groups in random order; 0: none."""
    max_mib: Annotated[float, Meta(ge=1)] = 256.0
    """Size of the store in checkpoint.dir; above it the trainer removes the oldest steps. A token
    takes 10 bytes."""
    max_age_h: Annotated[float, Meta(ge=0)] = 168.0
    """Age in hours at which the trainer removes the values of a step, also those of erased
    trajectories; 0: no limit."""

    def check(self) -> None:
        """Raises `InvalidArgument` if the store has no room for one step."""
        if self.tokens_per_step * 10 > self.max_mib * 0.9 * (1 << 20):  # turns are named, too
            raise InvalidArgument(
                f"token_values.tokens_per_step = {self.tokens_per_step} is not allowed with "
                f"token_values.max_mib = {self.max_mib:g}: a token takes 10 bytes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Evaluation on held-out tasks during training."""

    tasks: str = ""
    """JSON Lines file of held-out tasks, as `forge queue submit` takes; a task without a group_size
    is attempted once; empty: no evaluation."""
    every_steps: Annotated[int, Meta(ge=0)] = 0
    """Optimizer steps between evaluations; 0: only those of at_start and at_end."""
    at_start: bool = False
    """Evaluate the starting weights."""
    at_end: bool = True
    """Evaluate the weights of step max_steps."""

    def due(self, step: int, *, max_steps: int) -> bool:
        """Whether the weights of a step are evaluated."""
        if step == 0:
            return self.at_start
        if step == max_steps:
            return self.at_end
        return bool(self.every_steps) and step % self.every_steps == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """Rules that make advantages of returns."""

    baseline: Literal["auto", Baseline] = "auto"
    """Value subtracted from a return; auto: the algorithm's own."""
    normalize_std: Literal["auto", Spread] = "auto"
    """Returns whose standard deviation divides the advantages; auto: the algorithm's own choice."""
    spread_floor: Annotated[float, Meta(ge=1e-6)] = SPREAD_FLOOR
    """Least standard deviation that divides advantages; a smaller one is replaced by it."""
    domain_weights: Mapping[str, Annotated[float, Meta(ge=0)]] = field(default_factory=dict)
    """Factor on the advantages of a domain; 1 unless named."""
    train_side_calls: tuple[str, ...] = ()
    """Domains whose side calls (no tools, another system prompt, not continued) are trained."""
    drop_flat_groups: bool = False
    """Leave out groups whose rollouts all have the same return, apart from speed (DAPO)."""
    refill_groups: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Most groups leased beyond those of a batch, in place of flat ones (DAPO's dynamic sampling);
    0: none. Needs drop_flat_groups."""
    refill_wait_s: Annotated[float, Meta(ge=0, le=86400)] = 30.0
    """Longest wait for refill groups; then the batch is trained without them."""

    def rules(self, own: Algorithm) -> AdvantageRules:
        """The settings with `auto` replaced by the values of the algorithm's preset."""
        return AdvantageRules(
            baseline=own.baseline if self.baseline == "auto" else self.baseline,
            spread=own.spread if self.normalize_std == "auto" else self.normalize_std,
            spread_floor=self.spread_floor,
            domain_weights=self.domain_weights,
        )
