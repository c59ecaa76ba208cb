"""A batch that rank 0 reads, and one that data groups read: `python -m benchmarks.reading`.

    [--quick] [--json FILE] [--groups 64]

Computes what each rank does with a batch between the pool and the step, one rank after the other in
one process, without network and fetch: CPU seconds of credit and planning, and bytes of the orders
that rank 0 sends, pickled as torch.distributed sends them.

    rank_0     rank 0 credits and plans the batch, and sends each data group its trees
    ranks      rank 0 sends ids, then credit; each data group credits and plans its groups
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar

from benchmarks.support.report import arguments, keep, show
from forge.core.credit.rewards import RewardWeights
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.rl.config import MeshShape
from forge.rl.learner.batch_plan import BatchPlan, plan_batch, plan_updates
from forge.rl.learner.group_plans import group_plans
from forge.rl.parallel.world import World
from forge.v1 import common_pb2 as pb
from services.trainer.batches.divided_reading import assigned
from services.trainer.batches.read_orders import (
    CreditedGroup,
    LeasedGroup,
    PlanGroups,
    PlanSettings,
    ReadAnswer,
    ReadGroups,
)
from services.trainer.samples.credit_rules import CreditRules
from services.trainer.samples.group_facts import GroupCredit, ReadGroup, group_samples, read_group
from services.trainer.samples.samples import build_samples, merged

BUDGET, CHANNELS = 16384, 4096
ROLLOUTS, TURNS = 8, 8
RULES = CreditRules(weights=RewardWeights())
SETTINGS = PlanSettings(token_budget=BUDGET, channels=CHANNELS, relay=True, route_shape=None)
T = TypeVar("T")


def trajectory(task: str, place: int, rng: Random) -> pb.Trajectory:
    """Turns of an agent: a prompt that its group shares, then results of tools and answers."""
    name, shared, length, turns = f"{task}:{place}:0", Random(task), 0, []
    for index in range(1 + rng.randrange(TURNS)):
        source = rng if index else shared
        prompt = [source.randrange(50_000) for _ in range(150 if index else 1000)]
        sampled = [rng.randrange(50_000) for _ in range(100 + rng.randrange(150))]
        turns.append(
            pb.Turn(
                trajectory_id=name,
                turn_index=index,
                parent_turn=index - 1,
                prefix_tokens=length,
                prompt_ids=int32_bytes(prompt),
                sampled=pb.SampledTokens(
                    ids=int32_bytes(sampled),
                    logprobs=float32_bytes([-0.5] * len(sampled)),
                    weight_versions=int32_bytes([1] * len(sampled)),
                ),
                finish_reason=pb.FINISH_REASON_STOP,
                temperature=1.0,
            )
        )
        length += len(prompt) + len(sampled)
    reward = pb.RewardEvent(
        event_id="outcome",
        name="right",
        kind=pb.REWARD_KIND_OUTCOME,
        value=float(rng.random() < 0.5),
        turn_index=-1,
    )
    return pb.Trajectory(
        trajectory_id=name, task_id=task, domain="code", turns=turns, rewards=[reward]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of one way to read."""

    rank_0_s: float
    """CPU seconds of rank 0."""
    other_s: float
    """Most CPU seconds of another rank."""
    sent_bytes: int
    """By rank 0."""
    received_bytes: int
    """By rank 0, before the step."""


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """The result, and CPU seconds."""
    began_s = time.process_time()
    found = call()
    return found, time.process_time() - began_s


def sizes(objects: Sequence[Any]) -> int:
    """Bytes of the orders of ranks above 0."""
    return sum(len(pickle.dumps(one)) for one in objects[1:])


def by_rank_0(batch: Sequence[Sequence[pb.Trajectory]], count: int) -> tuple[Costs, BatchPlan]:
    """All on rank 0."""
    policy: Any = SimpleNamespace(
        arranged=lambda tree: tree,
        passes=lambda tree: len(tree.parts),
        channels=CHANNELS,
        world=World(shape=MeshShape(dp_shard=count)),
    )

    def plan() -> tuple[BatchPlan, Sequence[Any]]:
        samples = build_samples(batch, RULES).samples
        planned = plan_batch(samples, token_budget=BUDGET, channels=CHANNELS, data_groups=count)
        return planned, group_plans(planned, policy)

    (planned, parts), rank_0_s = timed(plan)
    return Costs(rank_0_s=rank_0_s, other_s=0.0, sent_bytes=sizes(parts), received_bytes=0), planned


def _read(batch: Sequence[Sequence[pb.Trajectory]], own: Sequence[int]) -> dict[int, ReadGroup]:
    return {at: read_group(batch[at], RULES, {}) for at in own}


def _groups_of(batch: Sequence[Sequence[pb.Trajectory]], count: int) -> list[list[int]]:
    """The numbers of the rollout groups of each data group."""
    tokens = [
        sum(len(turn.prompt_ids) + len(turn.sampled.ids) for one in group for turn in one.turns)
        for group in batch
    ]
    readers = assigned(tokens, [0] * count)
    return [[at for at, one in enumerate(readers) if one == reader] for reader in range(count)]


def _order_to_read(batch: Sequence[Sequence[pb.Trajectory]], own: Sequence[int]) -> ReadGroups:
    groups = tuple(
        LeasedGroup(
            number=at,
            pool_shard="s0",
            trajectory_ids=tuple(one.trajectory_id for one in batch[at]),
        )
        for at in own
    )
    return ReadGroups(
        batch=1,
        groups=groups,
        addresses={"s0": ("10.0.0.1:7000",)},
        rules=RULES,
        baselines_s={},
        traced=False,
        patience_s=5.0,
    )


def _order_to_plan(own: Sequence[int], credits: Sequence[GroupCredit]) -> PlanGroups:
    return PlanGroups(
        batch=1,
        groups=tuple(CreditedGroup(number=at, credit=credits[at], update=0) for at in own),
        updates=1,
        rules=RULES,
        settings=SETTINGS,
        rows=(),
    )


def _planned(
    own: Sequence[int], read: Mapping[int, ReadGroup], credits: Sequence[GroupCredit]
) -> list[BatchPlan]:
    """The batch of one data group."""
    samples = [one for at in own for one in group_samples(read[at], credits[at], RULES)]
    return plan_updates([samples], token_budget=BUDGET, channels=CHANNELS)


def by_ranks(batch: Sequence[Sequence[pb.Trajectory]], count: int) -> tuple[Costs, int]:
    """Each data group its groups; also the tree tokens."""
    mine = _groups_of(batch, count)
    reads = [_order_to_read(batch, own) for own in mine]
    read: dict[int, ReadGroup] = {}
    spent_s = [0.0] * count
    for reader, own in enumerate(mine):
        found, spent_s[reader] = timed(partial(_read, batch, own))
        read |= found
    answers = [ReadAnswer(facts={at: read[at].facts for at in own}) for own in mine]
    facts = [read[at].facts for at in range(len(batch))]
    (_, credits), merged_s = timed(lambda: merged(facts, RULES, baselines_s={}))
    plans = [_order_to_plan(own, credits) for own in mine]
    tree_tokens = 0
    for reader, own in enumerate(mine):
        (planned,), more_s = timed(partial(_planned, own, read, credits))
        spent_s[reader] += more_s
        tree_tokens += planned.tree_tokens
    costs = Costs(
        rank_0_s=spent_s[0] + merged_s,
        other_s=max(spent_s[1:]),
        sent_bytes=sizes(reads) + sizes(plans),
        received_bytes=sizes(answers),
    )
    return costs, tree_tokens


def main() -> None:
    """Prints the table."""
    parser = arguments(__doc__ or "", quick="8 groups, once")
    parser.add_argument("--groups", type=int, default=64, help="rollout groups in the batch")
    given = parser.parse_args()
    groups, runs = (8, 1) if given.quick else (given.groups, 3)
    rng = Random(0)
    batch = [
        [trajectory(f"t{number}", place, rng) for place in range(ROLLOUTS)]
        for number in range(groups)
    ]
    numbers: dict[str, float] = {}
    for count in (2, 4, 8):
        best: dict[str, list[float]] = {}
        for _ in range(runs):
            alone, plan = by_rank_0(batch, count)
            divided, tree_tokens = by_ranks(batch, count)
            for name, costs in (("rank_0", alone), ("ranks", divided)):
                best.setdefault(f"{count}.{name}.rank_0_cpu_s", []).append(costs.rank_0_s)
                best.setdefault(f"{count}.{name}.other_cpu_s", []).append(costs.other_s)
                best.setdefault(f"{count}.{name}.sent_mb", []).append(costs.sent_bytes / 1e6)
                received_mb = costs.received_bytes / 1e6
                best.setdefault(f"{count}.{name}.received_mb", []).append(received_mb)
        numbers |= {name: sorted(values)[len(values) // 2] for name, values in best.items()}
        numbers[f"{count}.rank_0.tree_tokens"] = plan.tree_tokens
        numbers[f"{count}.ranks.tree_tokens"] = tree_tokens
    numbers["sample_tokens"] = plan.sample_tokens
    show(f"a batch of {groups} groups", numbers)
    keep(numbers, given.json)


if __name__ == "__main__":
    main()
