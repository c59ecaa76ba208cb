"""Errors of trees computed by several ranks: `python -m tests.support.rl.ranks [--all]`.

Prints one JSON object: {"<ranks> <family> <type> <kind>, rank <rank>": the largest relative error
of loss and gradients}. All ranks compute a case, and one of them compares it. The ranks are forks
of one process that has imported what is slow to import and has not yet used autograd, which does
not survive a fork. A collective costs more than the model, so each shape, each family and each way
to run short of memory is computed once, and their products only with `--all`. Two further forks
shard the parameters (`tests.support.rl.worlds`), and two divide layers
(`tests.support.rl.part_worlds`).
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import pkgutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

import forge.rl
from forge.core.prefix_tree import Sample
from forge.rl.config import LearnerConfig, MtpConfig, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.model.recomputation import recompute_activations
from forge.rl.parallel.world import World
from tests.support.rl.forests import KINDS, forest, random_forest
from tests.support.rl.models import (
    CAP,
    Gradient,
    gradients,
    make_sample,
    reference_gradient,
    relative_errors,
    tiny_model,
    wide_norms,
)
from tests.support.rl.part_worlds import PARTS, run_part
from tests.support.rl.short_memory import memory_for
from tests.support.rl.worlds import SHARDS, run_shard

RANKS = 4
BALANCE = 0.1
ALL = "--all" in sys.argv
FAMILIES = (
    *("qwen3", "gemma3", "qwen3_moe", "gemma2", "gpt_oss", "deepseek_v3"),
    *(("llama", "mistral", "mixtral") if ALL else ()),
)
RECURRENT = ("qwen3_next", "falcon_h1")
"""Ranks hand states to each other."""
DIFFERENT = ("qwen3", "gemma3", "qwen3_moe")
"""Full attention, windows, balanced experts: the families that ranks compute differently."""
CUT = ("think_stripped", "compacted", "roots")
RANDOM = 4 if ALL else 2
"""Random forests, for each of the families that differ."""
SHORTAGES = ((0, False), (3, True), (1, True), (2, False)) if ALL else ((0, False), (3, True))
"""Rank that runs out of memory, and whether it does so in the backward pass."""


def kinds_of(family: str, *, ranks: int) -> tuple[str, ...]:
    """The shapes of trees that a family is compared on."""
    if ALL:
        return KINDS if family in (*DIFFERENT, *RECURRENT) else CUT
    if family in RECURRENT:
        return ("compacted",)
    if ranks == RANKS and family == "qwen3":
        return KINDS
    one = ranks == RANKS and family in DIFFERENT
    return ("compacted", "single_token") if one else ("compacted",)


def samples_of(kind: str) -> list[Sample]:
    """A shape by name, or a random forest by number."""
    return random_forest(Random(int(kind.split()[1]))) if "random" in kind else forest(kind)


@cache
def reference(family: str, kind: str, dtype: torch.dtype) -> Gradient:
    """The same for any number of ranks."""
    model = tiny_model(family, dtype)
    return reference_gradient(model, samples_of(kind), balance_coef=balance_of(family))


def balance_of(family: str) -> float:
    return BALANCE if family in ("qwen3_moe", "mixtral") else 0.0


def error_of(
    family: str,
    kind: str,
    dtype: torch.dtype,
    group: dist.ProcessGroup | None,
    *,
    compared: bool,
    checkpointing: bool = False,
) -> float:
    """On this rank; 0 where the case is not compared with its reference."""
    model = tiny_model(family, dtype)
    if checkpointing:
        recompute_activations(model)
    policy = shared_policy(model, group, balance_coef=balance_of(family))
    # A small budget makes several trees; each is computed by all ranks.
    budget = 24 if kind == "compacted" else 12 if kind.startswith("split") else 1 << 30
    config = LearnerConfig(token_budget=budget, objective=ObjectiveConfig(ratio_cap=CAP))
    learner = Learner(policy, config)
    loss, _ = learner.accumulate(learner.plan(samples_of(kind)))
    if policy.balance is not None:
        loss += policy.balance.value
    if not compared:
        return 0.0
    actual = Gradient(loss=loss, of=gradients(model))
    return max(relative_errors(actual, reference(family, kind, dtype)))


def shared_policy(
    model: Any, group: dist.ProcessGroup | None, *, balance_coef: float = 0.0
) -> TreePolicy:
    """A policy whose trees the ranks of `group` compute together."""
    policy = TreePolicy(model, balance_coef=balance_coef)
    policy.spread(World(everyone=group, tree=group))
    return policy


def heads_error(kind: str, group: dist.ProcessGroup | None, *, update_tokens: int = 0) -> float:
    """Of the draft heads' gradients and weights, against a process by itself; with `update_tokens`
    after an update with each tree."""
    found: list[dict[str, torch.Tensor]] = []
    for ranks in (None, group):
        policy = shared_policy(tiny_model("qwen3", torch.float64), ranks)
        torch.manual_seed(0)
        mtp = MtpConfig(heads=2, update_tokens=update_tokens)
        learner = Learner(policy, LearnerConfig(mtp=mtp))
        assert learner.mtp is not None
        learner.mtp.heads.double()
        learner.accumulate(learner.plan(forest(kind)))
        found.append(gradients(learner.mtp.heads) | learner.mtp.heads.named_tensors())
    alone, shared = found
    scale = max(float(one.norm()) for one in alone.values())
    return max(float((shared[name] - alone[name]).norm()) for name in alone) / scale


def shortage_error(
    group: dist.ProcessGroup, *, short: int, backward: bool, family: str = "qwen3"
) -> float:
    """Of a step that one rank had no memory for, against that of the budget it was then cut to."""

    def learner(budget: int) -> Learner:
        policy = shared_policy(tiny_model(family, torch.float32), group)
        torch.manual_seed(0)
        floor, heads = min(budget, 4), MtpConfig(heads=1)
        return Learner(
            policy, LearnerConfig(token_budget=budget, token_budget_floor=floor, mtp=heads)
        )

    rng = Random(3)
    samples = [make_sample([1, n, n + 1, 5, 6, 7], (2, 6), rng=rng) for n in range(2, 10)]
    one = learner(1 << 30)
    memory = 3 if dist.get_rank(group) == short else 1 << 30
    # The others then wait in an exchange of the next layer, or of this one.
    layer = 0 if family in RECURRENT else -1
    with memory_for(one, memory, backward=backward, layer=layer):
        result = one.step(one.plan(samples), weight_version=1)
    assert result.memory_retries > 0 and not result.skipped, (result.skipped, result.shortage)
    assert (f"rank {short}" in result.shortage) == (dist.get_rank(group) != short)
    other = learner(one.budget.tokens)
    expected = other.step(other.plan(samples), weight_version=1)
    assert expected.memory_retries == 0 and len(expected.plan.trees) > 1
    pairs = zip(one.policy.model.parameters(), other.policy.model.parameters(), strict=True)
    weights = max(float((mine - its).detach().abs().max()) for mine, its in pairs)
    return max(weights, abs(result.loss - expected.loss))


def long_chain_error(group: dist.ProcessGroup) -> float:
    """Of a step on one sample that no budget cuts into trees, and whose ranges of equal work are
    too much for the first rank: against a process by itself."""
    ids = [Random(5).randrange(13) for _ in range(200)]
    samples = [make_sample(ids, (100, 200), rng=Random(5))]
    results, weights = [], []
    for ranks in (group, None):
        policy = shared_policy(tiny_model("qwen3", torch.float64), ranks)
        one = Learner(policy, LearnerConfig(token_budget=400, token_budget_floor=10))
        with memory_for(one, 56 if ranks else 400) as tried:
            results.append(one.step(one.plan(samples), weight_version=1))
        weights.append([each.detach() for each in policy.model.parameters()])
        assert not results[-1].skipped, results[-1].skipped
        assert ranks is None or tried[-1] <= 56, tried
    assert results[0].memory_retries == 1
    return max(float((mine - its).abs().max()) for mine, its in zip(*weights, strict=True))


class Comparisons:
    """The errors that this rank finds; which rank compares a case with its reference goes round."""

    def __init__(self, rank: int) -> None:
        self.found: dict[str, float] = {}
        self._rank = rank
        self._count = 0

    def add(
        self,
        family: str,
        kind: str,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        *,
        checkpointing: bool = False,
    ) -> None:
        """Every rank of the group adds the same cases in the same order."""
        ranks = dist.get_world_size(group)
        mine = self._count % ranks == self._rank
        self._count += 1
        error = error_of(family, kind, dtype, group, compared=mine, checkpointing=checkpointing)
        if mine:
            type_ = "fp64" if dtype == torch.float64 else "fp32"
            recomputed = " checkpointed" if checkpointing else ""
            self.found[f"{ranks} {family} {type_}{recomputed} {kind}"] = error


def run_rank(rank: int, meeting: str, results: str) -> None:
    """All cases; every rank takes part in each."""
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    world, pair = dist.group.WORLD, dist.new_group([0, 1])
    assert world is not None
    comparisons = Comparisons(rank)
    found = comparisons.found
    with wide_norms():
        for family in (*FAMILIES, *RECURRENT):
            for kind in kinds_of(family, ranks=RANKS):
                comparisons.add(family, kind, torch.float64, world)
        for kind in ("compacted", "single_token"):
            found[f"4 qwen3 fp64 heads {kind}"] = heads_error(kind, world)
            updated = heads_error(kind, world, update_tokens=1 << 20)
            found[f"4 qwen3 fp64 updated heads {kind}"] = updated
        for short, backward in SHORTAGES:
            found[f"4 fp64 short of memory: rank {short}, backward {backward}"] = shortage_error(
                world, short=short, backward=backward
            )
        for short, backward in SHORTAGES if ALL else SHORTAGES[:1]:
            found[f"4 fp64 recurrent, short of memory: rank {short}"] = shortage_error(
                world, short=short, backward=backward, family="falcon_h1"
            )
        found["4 qwen3 fp64 long chain, short of memory"] = long_chain_error(world)
        for family in DIFFERENT:
            for number in range(RANDOM):
                kind = f"{'split' if number % 2 else 'whole'} {number} random"
                comparisons.add(family, kind, torch.float64, world)
    for family in FAMILIES if ALL else DIFFERENT:
        comparisons.add(family, "forked", torch.float32, world)
    for family in ("qwen3", "falcon_h1"):
        comparisons.add(family, "forked", torch.float32, world, checkpointing=True)
    if rank < 2:
        with wide_norms():
            for family in (*DIFFERENT, *(RECURRENT if ALL else ())):
                for kind in kinds_of(family, ranks=2):
                    comparisons.add(family, kind, torch.float64, pair)
    dist.barrier()
    Path(f"{results}-{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def import_all() -> None:
    """Every module of `forge.rl`."""
    for module in pkgutil.walk_packages(forge.rl.__path__, "forge.rl."):
        importlib.import_module(module.name)


def main() -> None:
    import_all()
    with tempfile.TemporaryDirectory() as folder:
        results, sharded = Path(folder, "results"), Path(folder, "sharded")
        divided = Path(folder, "divided")
        fork = multiprocessing.get_context("fork")
        ranks = [
            *(
                fork.Process(target=run_rank, args=(rank, f"{folder}/meeting", str(results)))
                for rank in range(RANKS)
            ),
            *(
                fork.Process(target=run_shard, args=(rank, f"{folder}/shards", str(sharded)))
                for rank in range(SHARDS)
            ),
            *(
                fork.Process(target=run_part, args=(rank, f"{folder}/parts", str(divided)))
                for rank in range(PARTS)
            ),
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        assert not any(each.exitcode for each in ranks), [each.exitcode for each in ranks]
        found = {
            f"{case}, rank {rank}": error
            for rank in range(RANKS)
            for case, error in json.loads(Path(f"{results}-{rank}").read_text()).items()
        }
        further = [json.loads(one.read_text()) for one in (sharded, divided)]
        print(json.dumps(found | further[0] | further[1]))


if __name__ == "__main__":
    main()
