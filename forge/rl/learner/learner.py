"""One optimizer step on a batch of samples, and the state that a checkpoint needs to repeat it.

Owns gradient accumulation, several update passes over a batch, the guard against a step that is not
finite, retries after a shortage of memory, and the optimizer. Settings are in `forge.rl.config`,
objectives in `forge.rl.losses`; batches and published weights belong to the trainer service.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import fmean
from typing import Any

from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.core.prefix_tree import Sample
from forge.rl.config import LearnerConfig
from forge.rl.learner.batch_plan import BatchPlan, whole_plan
from forge.rl.learner.critic import Critic, critic_stats
from forge.rl.learner.share import Frozen, Share, of_all, share_of, token_stats
from forge.rl.learner.token_budget import TokenBudget
from forge.rl.learner.tree_tokens import Reference, TreeTokens
from forge.rl.learner.types import StepResult, Update
from forge.rl.losses.objective import BatchSize, Objective
from forge.rl.losses.stats import TokenStats, domain_stats, engine_stats, policy_stats
from forge.rl.losses.token_values import token_values
from forge.rl.losses.tokens import TrainedTokens
from forge.rl.model.policy import TreePolicy
from forge.rl.model.replay import ReplayStats, summed_stats
from forge.rl.model.served_weights import ServedValues
from forge.rl.mtp.training import MtpStats, MtpTraining, mean_stats
from forge.rl.optimizers import Optimizers
from forge.rl.parallel.sharding import clip_gradients
from forge.rl.parallel.state_memory import placed
from forge.rl.random_state import random_state, set_random_state


class Learner:
    """A policy with its optimizer. Not thread-safe."""

    def __init__(
        self,
        policy: TreePolicy,
        config: LearnerConfig,
        *,
        reference: Reference | None = None,
        teacher: Reference | None = None,
        served: ServedValues | None = None,
    ) -> None:
        """`reference` is needed for a KL penalty alone, `teacher` for distillation; with `served`
        the loss is that of the published weights.

        Raises `InvalidArgument` for an invalid objective.
        """
        self.policy = policy
        self.config = config
        self.objective = Objective(config.objective, config.correction)
        self._served = served
        self.steps = 0
        """Optimizer steps taken so far."""
        self._position = 0
        """Place in the learning-rate schedule. A batch counts as all of its updates, also one with
        fewer groups than mini-batches: the schedule ends with the last batch."""
        self._share = Share(trees=())
        self._compares_replay = False
        """The next gradient compares log-probs with and without replay."""
        self.budget = TokenBudget(policy, config.token_budget, floor=config.token_budget_floor)
        """Plans updates within the memory of this process."""
        self._critic: Critic | None = None
        if self.objective.critic:
            size = policy.model.config.get_text_config(decoder=True).hidden_size
            self._critic = Critic(
                size, config.critic, device=policy.device, dtype=policy.model.dtype
            )
            policy.value_head = self._critic.head
        policy.entropy_gradient = config.objective.entropy_coef > 0
        self._trees = TreeTokens(
            policy=policy,
            objective=self.objective,
            critic=self._critic,
            reference=reference,
            teacher=teacher,
        )
        self.mtp = MtpTraining(policy, config.mtp, config.optimizer) if config.mtp.heads else None
        """Training of the draft heads; None without heads."""
        self._optimizer = Optimizers(
            policy.model,
            config.optimizer,
            extra=list(self._critic.head.parameters()) if self._critic else (),
            extra_rate_scale=config.critic.value_rate_scale,
        )

    def plan(self, samples: Sequence[Sample], *, token_budget: int = 0) -> BatchPlan:
        """`plan_batch` for this policy; 0 is the current budget."""
        return self.budget.plan(
            samples, mini_batches=self.config.mini_batches, token_budget=token_budget
        )

    def step(
        self, plan: BatchPlan, *, weight_version: int, keep: Collection[int] = ()
    ) -> StepResult:
        """Update on a batch, unless the loss or gradient of its first update is not finite.

        If all advantages are zero, an update is by momentum alone; a batch without a trained token
        is skipped. `weight_version` is that of the weights before the step; `keep` has the numbers
        of the samples whose token values are returned.
        """
        began, before = time.perf_counter(), self.steps
        parts, skipped, cut_short = self._updates(plan, weight_version)
        self._optimizer.zero_grad()
        frozen = [one for part in parts for one in part.frozen]
        credits = [one.credit for one in frozen if one.credit is not None]
        stats = [one for part in parts for one in part.stats]
        return StepResult(
            loss=fmean([part.loss for part in parts]),
            grad_norm=fmean([part.grad_norm for part in parts]),
            skipped=skipped,
            stats=policy_stats(stats, weight_version=weight_version),
            domains=domain_stats(stats, weight_version=weight_version),
            engines=engine_stats(stats, weight_version=weight_version),
            token_values=token_values(stats, keep),
            critic=critic_stats(of_all(credits, self.policy.world)),
            balance_loss=fmean([part.balance_loss for part in parts]),
            mtp=mean_stats([part.mtp for part in parts]),
            replay=summed_stats([part.replay for part in parts]),
            compute_s=time.perf_counter() - began,
            plan=whole_plan(plan, [part.plan for part in parts]),
            updates=self.steps - before,
            cut_short=cut_short,
            memory_retries=sum(part.retries for part in parts),
            empty_passes=sum(part.share.empty_passes for part in parts),
            imbalance=fmean([part.share.imbalance for part in parts]),
            shortage=next((part.shortage for part in reversed(parts) if part.shortage), ""),
        )

    def _updates(self, plan: BatchPlan, weight_version: int) -> tuple[list[Update], str, str]:
        """Take the updates of a batch. Returns those of its first pass, why the first one was
        skipped, and why later ones were left out."""
        due = self._position + self.config.updates_per_batch
        first, *rest = plan.updates
        self._compares_replay = self._due_to_compare()
        parts = [self._gradient(first, weight_version)]
        self._compares_replay = False
        skipped = parts[0].failed or ("" if plan.trees else "no trained tokens")
        if skipped:
            return parts, skipped, ""
        # Columns that belong to the weights before the first update.
        fixed, cut_short = self._freeze(rest)
        parts[0].grad_norm, skipped = self._update(parts[0].loss)
        if cut_short:  # lower the budget for the next batch
            self._smaller(max(rest, key=lambda one: one.largest_tree))
        if skipped:
            return parts, skipped, cut_short
        cut_short = cut_short or self._later_updates(parts, fixed, weight_version)
        self._position = due
        return parts, "", cut_short

    def _gradient(
        self, plan: BatchPlan, weight_version: int, fixed: Sequence[Frozen] = ()
    ) -> Update:
        """The gradient of one update, with smaller trees after each shortage of memory.

        Each attempt begins with zero gradients and the same random state, as if the batch had been
        planned with its budget. With `fixed` columns, which belong to the trees of the plan, there
        is one attempt.
        """
        plan = plan if fixed else self.budget.fitted(plan)
        before, rng = self.budget.tokens, random_state(self.policy.device)
        tried = Update(plan=plan)
        while True:
            tried.frozen = list(fixed)
            found, shortage = self.budget.attempt(
                partial(
                    self.accumulate,
                    tried.plan,
                    weight_version=weight_version,
                    frozen=tried.frozen,
                )
            )
            tried.share = self._share
            if found is not None:
                tried.loss, tried.stats = found
                balance = self.policy.balance
                tried.balance_loss = balance.value if balance is not None else 0.0
                tried.mtp = self.mtp.stats() if self.mtp else MtpStats()
                tried.replay = self._replay_stats()
                return tried
            tried.shortage = shortage
            smaller = self._smaller(tried.plan)
            if fixed:
                tried.failed = f"out of memory: {shortage}"
                return tried
            if smaller is None:
                tried.failed = (
                    f"out of memory in a tree of {tried.plan.largest_tree} tokens, which no "
                    f"token_budget down to {self.budget.floor} cuts: {shortage}"
                )
                # One sample that never fits must not lower the budget of the other batches.
                self.budget.tokens = before
                return tried
            tried.plan = smaller
            tried.retries += 1
            set_random_state(rng, self.policy.device)

    def _replay_stats(self) -> ReplayStats:
        replay, policy = self.policy.replay, self.policy
        return ReplayStats() if replay is None else replay.stats(policy.world, policy.device)

    def _due_to_compare(self) -> bool:
        """Whether this batch has the first update of an interval, which is in batches."""
        each = self.config.updates_per_batch
        every = self.config.compare_replay_every * each
        return self.policy.replay is not None and every > 0 and -self._position % every < each

    def _smaller(self, plan: BatchPlan) -> BatchPlan | None:
        """`TokenBudget.lower`, with the memory of the gradients."""
        self._optimizer.zero_grad()
        return self.budget.lower(plan)

    def _freeze(
        self, plans: Sequence[BatchPlan]
    ) -> tuple[list[tuple[BatchPlan, list[Frozen]]], str]:
        """The later mini-batches, each with its columns under the weights of now, if there are any
        such columns; and an error of the allocator, or ""."""
        fitted: list[tuple[BatchPlan, list[Frozen]]] = [
            (self.budget.fitted(one), []) for one in plans
        ]
        if not self._trees.fixed_by_weights:
            return fitted, ""
        for plan, fixed in fitted:
            found, shortage = self.budget.attempt(partial(self._frozen, plan))
            if found is None:
                return fitted, f"out of memory: {shortage}"
            fixed.extend(found)
        return fitted, ""

    def _frozen(self, plan: BatchPlan) -> list[Frozen]:
        trees = self._shared(plan).trees
        with self._served.in_place() if self._served else nullcontext():
            return self._trees.frozen(trees)

    def _later_updates(
        self,
        parts: list[Update],
        rest: Sequence[tuple[BatchPlan, list[Frozen]]],
        weight_version: int,
    ) -> str:
        """The updates after the first; why they were cut short, or "". Adds to `parts` the later
        mini-batches of the first pass."""
        for plan, fixed in rest:
            part = self._gradient(plan, weight_version, fixed)
            if not part.failed:
                part.grad_norm, part.failed = self._update(part.loss)
            if part.failed:
                return part.failed
            parts.append(part)
        for _ in range(1, self.config.passes_per_batch):
            for part in parts:
                again = partial(self.accumulate, part.plan, frozen=part.frozen)
                found, shortage = self.budget.attempt(partial(again, weight_version=weight_version))
                if found is None:
                    # Lower the budget for the next batch; this one has had its first updates.
                    self._smaller(part.plan)
                    return f"out of memory: {shortage}"
                _, cut_short = self._update(found[0])
                if cut_short:
                    return cut_short
        return ""

    def accumulate(
        self, plan: BatchPlan, *, weight_version: int = 0, frozen: list[Frozen] | None = None
    ) -> tuple[float, list[TokenStats]]:
        """The loss over the whole batch; its gradient is on the parameters.

        `frozen` is filled in the first update pass and used in the later ones.
        """
        self._optimizer.zero_grad()
        with self._served.in_place() if self._served else nullcontext():
            return self._accumulate(plan, weight_version, [] if frozen is None else frozen)

    def _shared(self, plan: BatchPlan) -> Share:
        if (outline := plan.outline) is not None:
            totals = outline.totals
            return Share(
                trees=tuple(zip(plan.trees, outline.passes, strict=True)),
                empty_passes=totals.empty_passes if totals else 0,
                imbalance=totals.imbalance if totals else 0.0,
            )
        return share_of([self.policy.arranged(tree) for tree in plan.trees], self.policy)

    def _accumulate(
        self, plan: BatchPlan, weight_version: int, frozen: list[Frozen]
    ) -> tuple[float, list[TokenStats]]:
        size, policy = plan.size, self.policy
        loss = 0.0
        stats = []
        if self.mtp is not None:
            self.mtp.begin(self.config.rate_share(self._position))
        self._share = self._shared(plan)
        gaps_J = self._trees.trajectory_gaps(plan, self._share.trees, frozen)
        policy.begin(self._share.trees)
        if policy.replay is not None:
            policy.replay.begin()
        for index, (tree, passes) in enumerate(self._share.trees):
            tree = tree.to(policy.device)
            tokens, values_T = self._trees.compute(
                tree, passes, frozen, index, weight_version=weight_version, gaps_J=gaps_J
            )
            if tree.trained_tokens:
                share = self.objective.evaluate(tokens, size)
                total = share.loss + self._value_loss(values_T, frozen[index], tokens, size)
                tokens.logprobs.retain_grad()
            else:  # an idle rank, which takes part in the sums of gradients
                total = tokens.logprobs.sum()
            total.backward()  # type: ignore[no-untyped-call]
            if self.mtp is not None:
                with policy.gathered():
                    self.mtp.accumulate(tree, tokens=size.tokens)
            if not index and self._compares_replay:
                self._trees.compare_replay(tree, passes, tokens.logprobs)
            if tree.trained_tokens:
                loss += float(total.detach())
                stats.append(token_stats(tree, tokens, share))
        policy.reduce_gradients()
        if self.mtp is not None:
            self.mtp.reduce_gradients()
        return policy.world.summed(loss, policy.device), of_all(stats, policy.world)

    def _value_loss(
        self, values_T: Tensor | None, frozen: Frozen, tokens: TrainedTokens, size: BatchSize
    ) -> Tensor | float:
        """The critic's part of the loss; 0 without a critic."""
        if self._critic is None or values_T is None or frozen.credit is None:
            return 0.0
        value_loss_T = self._critic.loss(values_T, frozen.credit)
        return self.config.critic.value_coef * self.objective.normalized(value_loss_T, tokens, size)

    def state_dict(self) -> dict[str, Any]:
        """All state that the next step depends on, except the policy's weights."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "steps": self.steps,
            "position": self._position,
            **random_state(self.policy.device),
            "critic": self._critic.head.state_dict() if self._critic else {},
            "mtp": self.mtp.state_dict() if self.mtp else {},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises `InvalidArgument` for the `state_dict()` of a different learner."""
        critic = state.get("critic", {})
        if bool(critic) != (self._critic is not None):
            raise InvalidArgument(
                f"objective.algorithm = {self.config.objective.algorithm!r} cannot continue from a "
                f"checkpoint {'with' if critic else 'without'} a critic"
            )
        self._optimizer.check_state(state["optimizer"])
        if self.mtp is not None and state.get("mtp"):
            self.mtp.heads.check(state["mtp"]["heads"])

    def placed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` with empty tensors for those of the meta device: to be filled, then loaded."""
        return dict(placed({**state, "optimizer": self._optimizer.placed(state["optimizer"])}))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; load the weights first. Raises like `check_state`."""
        self.check_state(state)
        if self._critic is not None:
            self._critic.head.load_state_dict(state["critic"])
        # A run may begin or end the training of heads at any checkpoint.
        if self.mtp is not None and state.get("mtp"):
            self.mtp.load_state_dict(state["mtp"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        # A checkpoint of an earlier release counts updates alone.
        self._position = state.get("position", self.steps)
        set_random_state(state, self.policy.device)

    def _update(self, loss: float) -> tuple[float, str]:
        """Update the weights; returns the gradient norm, and why there was no update, or ""."""
        parameters, largest = self._optimizer.parameters, self.config.optimizer.grad_clip
        grad_norm = clip_gradients(parameters, largest)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return grad_norm, f"loss {loss}, gradient norm {grad_norm}"
        self._optimizer.step(self.config.rate(self._position))
        if self.mtp is not None:
            self.mtp.step()
        self.steps += 1
        self._position += 1
        return grad_norm, ""
