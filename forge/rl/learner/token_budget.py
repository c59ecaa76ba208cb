"""The token budget of a learner: updates planned to fit into memory, and lowered after a shortage.

Owns the current budget, plans within it, and the agreement of ranks on a shortage. The retries
belong to `forge.rl.learner.learner`; `forge.rl.out_of_memory` recognizes errors of allocators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from forge.core.prefix_tree import Sample
from forge.rl.collectives import RankShortage, meet
from forge.rl.learner.batch_plan import BatchPlan, plan_batch
from forge.rl.model.policy import TreePolicy
from forge.rl.out_of_memory import memory_shortage, smaller_budgets

T = TypeVar("T")


class TokenBudget:
    """Tokens of the largest pass of one policy."""

    def __init__(self, policy: TreePolicy, tokens: int, *, floor: int) -> None:
        """`floor` is the smallest budget that a shortage leads to."""
        self._policy = policy
        self.tokens = tokens
        """Current budget: lowered when memory runs out, until the process ends."""
        self.floor = floor

    def plan(
        self, samples: Sequence[Sample], *, mini_batches: int = 1, token_budget: int = 0
    ) -> BatchPlan:
        """`plan_batch` for the policy; 0 is the current budget."""
        replay = self._policy.replay
        return plan_batch(
            samples,
            mini_batches=mini_batches,
            token_budget=token_budget or self.tokens,
            channels=self._policy.channels,
            relay=self._policy.group is None,
            data_groups=self._policy.world.shape.data_groups,
            route_shape=replay.shape if replay else None,
        )

    def fitted(self, plan: BatchPlan) -> BatchPlan:
        """The plan of one update within the current budget, which a shortage may have lowered."""
        return plan if plan.token_budget <= self.tokens else self.plan(plan.samples)

    def lower(self, plan: BatchPlan) -> BatchPlan | None:
        """The update within the largest lower budget that makes passes smaller, which is then the
        current one; None: none does."""
        torch.cuda.empty_cache()
        before = self.tokens
        largest, tokens = min(before, plan.largest_tree), self._pass_tokens(plan)
        for budget in smaller_budgets(largest, floor=self.floor):
            self.tokens = budget
            smaller = self.plan(plan.samples)
            if self._pass_tokens(smaller) < tokens:
                return smaller
        self.tokens = before
        return None

    def _pass_tokens(self, plan: BatchPlan) -> int:
        return max((self._policy.pass_tokens(tree) for tree in plan.trees), default=0)

    def attempt(self, compute: Callable[[], T]) -> tuple[T | None, str]:
        """The result, or None and the error of a rank that ran out of memory.

        A rank of a world that shards parameters raises that error: the others wait for its part of
        a layer, where no message can reach them.
        """
        world, device = self._policy.world, self._policy.device
        try:
            found = compute()
            if world.everyone is not None:
                meet(world.everyone, device)
            return found, ""
        except (RuntimeError, MemoryError) as error:
            shortage = memory_shortage(error)
            if not shortage or world.shape.sharded:
                raise
            heard = {error.group} if isinstance(error, RankShortage) else set()
        # After the except block the traceback is freed, and with it the activations.
        if world.tree is not None and not heard and world.tree is not world.everyone:
            meet(world.tree, device, shortage=True)
        if world.everyone is not None and world.everyone not in heard:
            meet(world.everyone, device, shortage=True)
        return None, shortage
