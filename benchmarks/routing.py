"""Placement of multi-turn group traffic over four workers: the router against four simpler rules.

    python -m benchmarks.routing [--quick] [--json FILE]
    python -m benchmarks.routing --measure SHAPE

Virtual time: the workers have the role both, a real prefix cache, and passes and steps at the
measured costs of the embedded engine (`--measure` renews them); the router is the real one, with
its reports and rates. Rivals: round robin, fewest requests, hash of the group, hash of the session.
Traffic: `recorded`, the groups of a `forge run` of the tiny model with all lengths times 16, and
`agents`, eight rollouts of about six turns per group, both at the costs of a small model;
`recorded_tiny` is the first at those of the tiny model. Each with and without publications, which
empty all prefix caches. `clairvoyant` knows all further turns of a session, `least_work` is a time
that no placement beats. `--seed` draws other groups, and another order of the recorded ones.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from benchmarks.support.engine_costs import SHAPES, measure
from benchmarks.support.report import arguments, keep
from benchmarks.support.routing_bounds import WEIGHTS, Clairvoyant, least_work_s
from benchmarks.support.routing_rivals import (
    FewestRequests,
    HashOfGroup,
    HashOfSession,
    RoundRobin,
    Router,
)
from benchmarks.support.routing_simulation import (
    EngineCosts,
    Outcome,
    Placement,
    Rollout,
    Simulation,
    Turn,
)

WORKERS = 4
SCALE = 16
RECORDED = Path(__file__).parent / "support" / "recorded_groups.json"
# `--measure`, two cores of an AMD EPYC, torch 2.13, CPU seconds of one thread.
TINY = EngineCosts(
    pass_s=5.8e-3, token_s=3.6e-5, context_s=6.4e-8, step_s=4.8e-3, row_s=3.4e-5, kv_s=2.0e-7
)
SMALL = EngineCosts(
    pass_s=2.8e-2, token_s=8.1e-4, context_s=7.6e-7, step_s=1.8e-2, row_s=2.5e-3, kv_s=1.5e-6
)
RIVALS: dict[str, Callable[[int], Placement]] = {
    "round_robin": RoundRobin,
    "least_loaded": FewestRequests,
    "hash": HashOfGroup,
    "hash_session": HashOfSession,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Groups, and the engine that serves them."""

    groups: Sequence[Sequence[Rollout]]
    costs: EngineCosts
    concurrency: int
    publish_every_s: float
    """Of the runs with publications."""


def recorded(*, groups: int, seed: int = 0) -> list[list[Rollout]]:
    """Return the first recorded groups, with all lengths times SCALE; in another order for each
    seed but 0."""
    found = []
    for number, group in enumerate(json.loads(RECORDED.read_text())[:groups]):
        rollouts = []
        for index, turns in enumerate(group["rollouts"]):
            scaled = tuple(
                Turn(new_tokens=new * SCALE, answer_tokens=answer * SCALE, pause_s=pause)
                for new, answer, pause in turns
            )
            rollouts.append(
                Rollout(
                    group=f"g{number}",
                    session=f"g{number}:{index}:0",
                    common_tokens=0,
                    group_tokens=group["shared"] * SCALE,
                    turns=scaled,
                )
            )
        found.append(rollouts)
    if seed:
        Random(seed).shuffle(found)
    return found


def agents(*, groups: int, seed: int = 0) -> list[list[Rollout]]:
    """Return groups of eight rollouts, about six turns of 120 new and 60 sampled tokens on a prompt
    of 500; lengths are lognormal, and a group has a difficulty of its own."""
    random = Random(seed)

    def near(mean: float, sigma: float) -> int:
        return max(1, round(mean * random.lognormvariate(0, sigma)))

    found = []
    for number in range(groups):
        prompt, hard = near(400, 0.4), random.lognormvariate(0, 0.4)
        rollouts = []
        for index in range(8):
            turns = [
                Turn(
                    new_tokens=near(120, 0.5) if turn else 1,
                    answer_tokens=near(60 * hard, 0.6),
                    pause_s=2.0 * random.lognormvariate(0, 0.8) if turn else 0.0,
                )
                for turn in range(near(6, 0.4))
            ]
            rollouts.append(
                Rollout(
                    group=f"g{number}",
                    session=f"g{number}:{index}:0",
                    common_tokens=64,
                    group_tokens=prompt,
                    turns=tuple(turns),
                )
            )
        found.append(rollouts)
    return found


def traffics(*, quick: bool, seed: int = 0) -> dict[str, Traffic]:
    """Return the traffic by name."""
    half = 2 if quick else 1
    return {
        "recorded": Traffic(
            groups=recorded(groups=88 // half, seed=seed),
            costs=SMALL,
            concurrency=8,
            publish_every_s=60.0,
        ),
        "agents": Traffic(
            groups=agents(groups=48 // half, seed=seed),
            costs=SMALL,
            concurrency=8,
            publish_every_s=60.0,
        ),
        # A step costs the same for one request as for many, and reading next to nothing.
        "recorded_tiny": Traffic(
            groups=recorded(groups=88 // half, seed=seed),
            costs=TINY,
            concurrency=8,
            publish_every_s=10.0,
        ),
    }


def run(traffic: Traffic, placement: Placement, *, publishes: bool) -> Outcome:
    """Run a traffic to its end."""
    return Simulation(
        traffic.groups,
        placement,
        traffic.costs,
        workers=WORKERS,
        concurrency=traffic.concurrency,
        publish_every_s=traffic.publish_every_s if publishes else 0.0,
    ).run()


def clairvoyant(traffic: Traffic, *, publishes: bool) -> Outcome:
    """Return the best run with foresight."""
    rules = [
        Clairvoyant(WORKERS, traffic.costs, weight=weight, move_weight=move_weight)
        for weight, move_weight in WEIGHTS
    ]
    runs = [run(traffic, rule, publishes=publishes) for rule in rules]
    return min(runs, key=lambda outcome: outcome.completion_s)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "", quick="half of the groups")
    parser.add_argument("--measure", choices=sorted(SHAPES), help="measure the costs of a shape")
    parser.add_argument("--seed", type=int, default=0, help="draws other traffic")
    options = parser.parse_args()
    if options.measure:
        print(options.measure, measure(options.measure, quick=options.quick))
        return
    numbers: dict[str, float] = {}
    table = Table(
        "traffic", "placement", "completion s", "over the router", "hit rate", "computed / new"
    )
    for name, traffic in traffics(quick=options.quick, seed=options.seed).items():
        for publishes in (False, True):
            case = f"{name}_published" if publishes else name
            ours = run(traffic, Router(WORKERS), publishes=publishes)
            rows = {"router": ours}
            for rival, make in RIVALS.items():
                rows[rival] = run(traffic, make(WORKERS), publishes=publishes)
            rows["clairvoyant"] = clairvoyant(traffic, publishes=publishes)
            for rival, outcome in rows.items():
                over = outcome.completion_s / ours.completion_s
                if rival != "router":
                    numbers[f"{case}.over_{rival}"] = over
                numbers[f"{case}.{rival}.hit_rate"] = outcome.hit_rate
                numbers[f"{case}.{rival}.computed_over_new"] = outcome.computed_over_new
                numbers[f"{case}.{rival}.turn_s"] = statistics.mean(outcome.turn_s)
                table.add_row(
                    case, rival, f"{outcome.completion_s:.1f}", f"{over:.2f}",
                    f"{outcome.hit_rate:.3f}", f"{outcome.computed_over_new:.2f}",
                )  # fmt: skip
        numbers[f"{name}.least_work_s"] = least_work_s(
            traffic.groups, traffic.costs, workers=WORKERS, concurrency=traffic.concurrency
        )
        table.add_row(name, "least work", f"{numbers[f'{name}.least_work_s']:.1f}", "", "", "")
    for rival in RIVALS:
        numbers[f"over_{rival}"] = min(
            value for key, value in numbers.items() if key.endswith(f".over_{rival}")
        )
    Console(width=120).print(table)
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
