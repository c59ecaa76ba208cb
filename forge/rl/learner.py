"""One optimizer step on a batch of samples, and the state a checkpoint needs to repeat it.

Owns planning into trees, gradient accumulation, several passes over a batch, the guard against a
step that is not finite, the learning-rate schedule and the optimizer. What is optimized is
`forge.rl.losses`; where batches come from and what happens to the weights afterwards is the
trainer service's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.core.packing import Sample, plan_trees
from forge.rl.losses import (
    BatchSize,
    Objective,
    ObjectiveConfig,
    PolicyStats,
    TokenStats,
    TrainedTokens,
    policy_stats,
)
from forge.rl.policy import TreePolicy
from forge.rl.tree_batch import TreeBatch, build_tree_batch

Schedule = Literal["constant", "linear", "cosine"]

FINAL_RATE_SHARE = 0.1
"""Of the learning rate, where a falling schedule ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerConfig:
    """How to step."""

    learning_rate: float = 1e-5
    warmup_steps: int = 0
    """Updates over which the learning rate rises linearly to its full value."""
    schedule: Schedule = "constant"
    """How it goes on from there, to `FINAL_RATE_SHARE` of it at `total_updates`."""
    total_updates: int = 0
    """At which the schedule ends; a constant one needs none."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest gradient norm; a larger one is scaled down to it."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    passes: int = 1
    """Updates per batch, each on all of it."""
    token_budget: int = 16384
    """Most tokens in one forward pass; more become several, with accumulated gradients."""

    def rate(self, update: int) -> float:
        """Learning rate of an update, counted from 0."""
        rise = min(1.0, (update + 1) / max(1, self.warmup_steps))
        done = min(1.0, update / max(1, self.total_updates))
        match self.schedule:
            case "constant":
                left = 1.0
            case "linear":
                left = 1.0 - done
            case "cosine":
                left = 0.5 * (1.0 + math.cos(math.pi * done))
        return self.learning_rate * rise * max(left, FINAL_RATE_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A batch, merged and ready; made ahead of its step, on any thread."""

    trees: tuple[TreeBatch, ...]
    plan_s: float

    @property
    def trained_tokens(self) -> int:
        """Over all samples."""
        return sum(tree.trained_tokens for tree in self.trees)

    @property
    def size(self) -> BatchSize:
        """What the loss is divided by."""
        return BatchSize(
            tokens=self.trained_tokens, samples=sum(len(tree.lengths_S) for tree in self.trees)
        )

    @property
    def tree_tokens(self) -> int:
        """Tokens that are computed."""
        return sum(tree.tokens for tree in self.trees)

    @property
    def sample_tokens(self) -> int:
        """Tokens that would be computed without merging."""
        return sum(tree.sample_tokens for tree in self.trees)


def plan_batch(samples: Sequence[Sample], *, token_budget: int, channels: int) -> BatchPlan:
    """Merge a batch's samples into trees, on any thread: no weights are involved.

    `channels` is `attention_channels` of the model. Raises `InvalidArgument` for a malformed
    sample.
    """
    began = time.perf_counter()
    for sample in samples:
        sample.validate()
    trainable = [sample for sample in samples if sample.trained]
    plans = plan_trees(trainable, token_budget=token_budget)
    trees = tuple(build_tree_batch(plan, trainable, channels=channels) for plan in plans)
    return BatchPlan(trees=trees, plan_s=time.perf_counter() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    loss: float
    grad_norm: float
    """Before clipping."""
    skipped: str
    """Why the weights were left alone; "" when they were updated."""
    stats: PolicyStats
    """Of the first pass, like loss and gradient norm: before this batch changed anything."""
    compute_s: float
    cut_short: str = ""
    """Why the batch's later passes were left out, after an update; "" when none was."""


@dataclass(slots=True, kw_only=True)
class _Frozen:
    """Log-probs of a tree that stay as they are over the passes."""

    old: Tensor
    reference: Tensor | None


class Learner:
    """A policy with its optimizer. Not thread-safe."""

    def __init__(
        self, policy: TreePolicy, config: LearnerConfig, *, reference: TreePolicy | None = None
    ) -> None:
        """`reference` is what a KL penalty keeps the policy close to; it is never changed.

        Raises `InvalidArgument` for an objective that cannot be.
        """
        self.policy = policy
        self.config = config
        self.objective = Objective(config.objective)
        self._reference = reference
        if self.objective.needs_reference and reference is None:
            raise InvalidArgument(
                f"kl_coef = {config.objective.kl_coef} is not allowed: there is no reference policy"
            )
        self.steps = 0
        """Optimizer steps taken so far."""
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def plan(self, samples: Sequence[Sample]) -> BatchPlan:
        """`plan_batch` for this policy."""
        return plan_batch(
            samples, token_budget=self.config.token_budget, channels=self.policy.channels
        )

    def step(self, plan: BatchPlan, *, weight_version: int) -> StepResult:
        """Update on a batch, unless its loss or gradient is not finite.

        Advantages that are all zero make a step by momentum alone; a batch without a trained token
        is skipped. `weight_version` names the weights stepped from.
        """
        began = time.perf_counter()
        frozen: list[_Frozen] = []
        loss, stats = self.accumulate(plan, weight_version=weight_version, frozen=frozen)
        grad_norm, skipped = self._update(loss) if plan.trees else (0.0, "no trained tokens")
        cut_short = ""
        for _ in range(1, 1 if skipped else self.config.passes):
            again, _ = self.accumulate(plan, weight_version=weight_version, frozen=frozen)
            _, cut_short = self._update(again)
            if cut_short:
                break
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            skipped=skipped,
            stats=policy_stats(stats, weight_version=weight_version),
            compute_s=time.perf_counter() - began,
            cut_short=cut_short,
        )

    def accumulate(
        self, plan: BatchPlan, *, weight_version: int = 0, frozen: list[_Frozen] | None = None
    ) -> tuple[float, list[TokenStats]]:
        """The loss over the whole batch; its gradient is on the parameters.

        `frozen` is filled by the first pass over a batch and used by the later ones.
        """
        self._optimizer.zero_grad(set_to_none=True)
        frozen = [] if frozen is None else frozen
        size = plan.size
        loss = 0.0
        stats = []
        for index, tree in enumerate(plan.trees):
            logprobs_T, entropy_T = self.policy.logprobs(tree)
            if index == len(frozen):
                frozen.append(self._freeze(tree, logprobs_T.detach()))
            tokens = TrainedTokens(
                logprobs=logprobs_T,
                old=frozen[index].old,
                behavior=tree.behavior_T,
                advantages=tree.advantages_T,
                lengths=tree.lengths_S,
                staleness=weight_version - tree.versions_T,
                entropy=entropy_T,
                reference=frozen[index].reference,
            )
            share = self.objective.evaluate(tokens, size)
            share.loss.backward()  # type: ignore[no-untyped-call]
            loss += float(share.loss.detach())
            stats.append(
                TokenStats(
                    logprobs=logprobs_T.detach(),
                    behavior=tree.behavior_T,
                    entropy=entropy_T,
                    versions=tree.versions_T,
                    clipped=share.clipped,
                    masked=share.masked,
                    reference_kl=share.reference_kl,
                )
            )
        return loss, stats

    def _freeze(self, tree: TreeBatch, logprobs_T: Tensor) -> _Frozen:
        """Taken in the first pass, before any update: recomputing costs no forward of its own."""
        recomputed = self.config.objective.old_logprobs == "recomputed"
        reference_T = None
        if self._reference is not None:
            with torch.no_grad():
                reference_T, _ = self._reference.logprobs(tree)
        return _Frozen(old=logprobs_T if recomputed else tree.behavior_T, reference=reference_T)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that the next step depends on."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "torch_rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; load the weights first."""
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        torch.set_rng_state(state["torch_rng"])

    def _update(self, loss: float) -> tuple[float, str]:
        """Gradient norm, and why there was no update."""
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.config.grad_clip))
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return grad_norm, f"loss {loss}, gradient norm {grad_norm}"
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.rate(self.steps)
        self._optimizer.step()
        self.steps += 1
        return grad_norm, ""
