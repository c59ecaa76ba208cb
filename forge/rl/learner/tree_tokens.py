"""The trained tokens of a tree under the present weights, with what stays fixed over a batch.

Owns the columns of a pass that need the policy, the reference or the critic: log-probs, old
log-probs, values, and the ratios of trajectories that are in several trees. The learner sums the
losses.

Shapes: T trained tokens, S samples, J trajectories of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.rl.collectives import all_reduce
from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.critic import Critic
from forge.rl.learner.share import Frozen
from forge.rl.losses.objective import Objective
from forge.rl.losses.tokens import TrainedTokens
from forge.rl.model.policy import TreePolicy
from forge.rl.tree.batch import TreeBatch


class Reference(Protocol):
    """A frozen policy: the reference of a KL penalty, or a teacher."""

    def logprobs(self, batch: TreeBatch, *, passes: int = 0) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [T], as `TreePolicy.logprobs` returns them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTokens:
    """Computes the tokens of a batch's trees."""

    policy: TreePolicy
    objective: Objective
    critic: Critic | None = None
    reference: Reference | None = None
    teacher: Reference | None = None

    def __post_init__(self) -> None:
        """Raises `InvalidArgument` for an objective whose reference or teacher is missing."""
        config = self.objective.config
        for name, coef, policy in (
            ("kl_coef", config.kl_coef, self.reference),
            ("teacher_coef", config.teacher_coef, self.teacher),
        ):
            if coef and policy is None:
                missing = "reference policy" if name == "kl_coef" else "teacher"
                raise InvalidArgument(
                    f"objective.{name} = {coef} is not allowed: there is no {missing}"
                )

    def compute(
        self,
        tree: TreeBatch,
        passes: int,
        frozen: list[Frozen],
        index: int,
        *,
        weight_version: int,
        gaps_J: Tensor | None = None,
    ) -> tuple[TrainedTokens, Tensor | None]:
        """The tokens of a tree, and their values if there is a critic. `frozen[index]` is added
        before the first update; `gaps_J` are those of `trajectory_gaps`."""
        logprobs_T, values_T, entropy_T = self._evaluate(tree, passes, self.policy)
        if index == len(frozen):
            frozen.append(self._freeze(tree, passes, logprobs_T.detach(), values_T))
        fixed = frozen[index]
        tokens = TrainedTokens(
            logprobs=logprobs_T,
            old=fixed.old,
            behavior=tree.behavior_T,
            advantages=tree.advantages_T if fixed.credit is None else fixed.credit.advantages,
            lengths=tree.lengths_S,
            versions=tree.versions_T,
            weight_version=weight_version,
            entropy=entropy_T,
            reference=fixed.reference,
            teacher=fixed.teacher,
            shares=tree.shares_T,
            trajectories=tree.trajectories_S,
            trajectory_tokens=tree.trajectory_tokens_S,
            trajectory_gaps=None if gaps_J is None else gaps_J[tree.trajectories_S],
        )
        return tokens, values_T

    @property
    def fixed_by_weights(self) -> bool:
        """Whether columns that stay fixed over a batch depend on the weights before it."""
        return self.objective.config.old_logprobs == "recomputed" or self.critic is not None

    @torch.no_grad()
    def frozen(self, trees: Sequence[tuple[TreeBatch, int]]) -> list[Frozen]:
        """Values that stay fixed over a batch, by one forward of each of this rank's trees."""
        policy = self.policy.plain()
        policy.value_head = self.policy.value_head
        found = []
        for tree, passes in trees:
            tree = tree.to(policy.device)
            logprobs_T, values_T, _ = self._evaluate(tree, passes, policy)
            found.append(self._freeze(tree, passes, logprobs_T, values_T))
        return found

    def trajectory_gaps(
        self, plan: BatchPlan, trees: Sequence[tuple[TreeBatch, int]], frozen: list[Frozen]
    ) -> Tensor | None:
        """[J] sum of log pi - log pi_old over each trajectory; None if the objective does not need
        it, or each trajectory is in one tree.

        A ratio must be known before the first backward: one more forward of each of this rank's
        trees, without gradient.
        """
        if not (self.objective.over_trajectories and plan.divides_trajectories):
            return None
        policy = self.policy.plain()
        wide = torch.promote_types(policy.head_type, torch.float32)
        gaps_J = torch.zeros(plan.size.trajectories, dtype=wide, device=policy.device)
        for index, (tree, passes) in enumerate(trees):
            tree = tree.to(policy.device)
            with torch.no_grad():
                logprobs_T, _ = policy.logprobs(tree, passes=passes)
            if index == len(frozen):
                frozen.append(self._freeze(tree, passes, logprobs_T, None))
            owners_T = tree.trajectories_S.repeat_interleave(tree.lengths_S)
            gaps_J.index_add_(0, owners_T, (logprobs_T - frozen[index].old).to(wide))
        if policy.world.data is not None:
            all_reduce(gaps_J, policy.world.data)
        return gaps_J

    @torch.no_grad()
    def compare_replay(self, tree: TreeBatch, passes: int, logprobs_T: Tensor) -> None:
        """Count the log-probs of a tree with replay, which are given, and without."""
        if self.policy.replay is not None:
            free_T, _ = self.policy.without_replay().logprobs(tree, passes=passes)
            self.policy.replay.compare(logprobs_T, free_T, tree.behavior_T)

    def _evaluate(
        self, tree: TreeBatch, passes: int, policy: TreePolicy
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probs, values if there is a critic, entropies."""
        if self.critic is None:
            logprobs_T, entropy_T = policy.logprobs(tree, passes=passes)
            return logprobs_T, None, entropy_T
        return policy.logprobs_and_values(tree, passes=passes)

    def _freeze(
        self, tree: TreeBatch, passes: int, logprobs_T: Tensor, values_T: Tensor | None
    ) -> Frozen:
        """Log-probs of the first update pass, before any update: `recomputed` needs no extra
        forward."""
        recomputed = self.objective.config.old_logprobs == "recomputed"
        reference_T = self._of(self.reference, tree, passes)
        teacher_T = self._of(self.teacher, tree, passes)
        credit = None
        if self.critic is not None and values_T is not None and tree.trained_tokens:
            credit = self.critic.credit(values_T, tree.returns_T, tree.advantages_T, tree.lengths_S)
        return Frozen(
            old=logprobs_T if recomputed else tree.behavior_T,
            reference=reference_T,
            teacher=teacher_T,
            credit=credit,
        )

    @torch.no_grad()
    def _of(self, other: Reference | None, tree: TreeBatch, passes: int) -> Tensor | None:
        return None if other is None else other.logprobs(tree, passes=passes)[0]
