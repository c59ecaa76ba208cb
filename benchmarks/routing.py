"""Placement of multi-turn group traffic over four workers: the router against four simpler rules.

    python -m benchmarks.routing [--quick] [--json FILE] [--seeds N] [--only TRAFFIC...]
    python -m benchmarks.routing --measure SHAPE

Virtual time: the workers have the role both, a real prefix cache, and passes and steps at the
measured costs of the embedded engine (`--measure` renews them); the router is the real one, with
its reports and rates. Rivals: round robin, fewest requests, hash of the group, hash of the session.
Each seed draws other traffic, and all placements get the same: figures are medians of the ratios
over the seeds, with the least and the greatest.

    recorded       the groups of a `forge run` of the tiny model, all lengths times 16
    agents         eight rollouts of about six turns per group
    recorded_tiny  `recorded` at the costs of the tiny model; the others have those of a small one
    long_prompts   `agents` with prompts of 3,000 tokens per group
    uneven         `agents` with groups of 2 to 16, and far more unlike lengths
    slow_worker    `agents`, one worker half as fast
    lost_worker    `agents`, one worker is lost on the way

The first three also with publications, which empty all prefix caches. `clairvoyant` knows all
further turns of a session; `one_cache` has workers that share caches and computed tokens at no
cost, so that nothing but load decides; `oracle` has both, the best of them; `least_work` is a time
that no placement beats.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from benchmarks.support.inference.engine_costs import SHAPES, measure
from benchmarks.support.report import arguments, keep
from benchmarks.support.routing.bounds import WEIGHTS, Clairvoyant, least_work_s
from benchmarks.support.routing.rivals import (
    FewestRequests,
    HashOfGroup,
    HashOfSession,
    RoundRobin,
    Router,
)
from benchmarks.support.routing.simulation import Outcome, Placement, Simulation
from benchmarks.support.routing.traffic import NAMES, Traffic, traffics

RIVALS: dict[str, Callable[[int], Placement]] = {
    "round_robin": RoundRobin,
    "least_loaded": FewestRequests,
    "hash": HashOfGroup,
    "hash_session": HashOfSession,
}
PUBLISHED = ("recorded", "agents", "recorded_tiny")
"""Traffic that runs with publications, too."""
BOUNDED = ("recorded", "agents", "recorded_tiny", "long_prompts", "uneven")
"""Traffic whose bounds are computed: those of workers that are alike and stay."""


def run(traffic: Traffic, make: Callable[[int], Placement], *, publishes: bool) -> Outcome:
    """Run a traffic to its end."""
    return Simulation(traffic, make(len(traffic.speeds)), publishes=publishes).run()


def clairvoyant(traffic: Traffic, *, publishes: bool) -> Outcome:
    """Return the best run with foresight."""
    runs = [
        run(
            traffic,
            lambda workers, w=weight, m=move: Clairvoyant(  # type: ignore[misc]
                workers, traffic.costs, weight=w, move_weight=m
            ),
            publishes=publishes,
        )
        for weight, move in WEIGHTS
    ]
    return min(runs, key=lambda outcome: outcome.completion_s)


def oracle(traffic: Traffic, *, publishes: bool) -> Outcome:
    """Return the best run with foresight on workers that share caches and computed tokens."""
    workers = len(traffic.speeds)
    rules = [FewestRequests(workers)] + [
        Clairvoyant(workers, traffic.costs, weight=0.0, move_weight=move) for move in (None, 0.0)
    ]
    runs = [Simulation(traffic, rule, publishes=publishes, one_cache=True).run() for rule in rules]
    return min(runs, key=lambda outcome: outcome.completion_s)


def outcomes(name: str, traffic: Traffic, *, publishes: bool) -> Iterator[tuple[str, Outcome]]:
    """Yield each placement of one case with its outcome, the router first."""
    yield "router", run(traffic, Router, publishes=publishes)
    for rival, make in RIVALS.items():
        yield rival, run(traffic, make, publishes=publishes)
    if name in BOUNDED:
        yield "clairvoyant", clairvoyant(traffic, publishes=publishes)
        idlest = FewestRequests(len(traffic.speeds))
        yield "one_cache", Simulation(traffic, idlest, publishes=publishes, one_cache=True).run()
        yield "oracle", oracle(traffic, publishes=publishes)


def cases(names: list[str]) -> list[tuple[str, str, bool]]:
    """Return case, traffic, and whether weights are published."""
    return [
        (f"{name}_published" if publishes else name, name, publishes)
        for name in names
        for publishes in (False, True)
        if not publishes or name in PUBLISHED
    ]


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "", quick="half of the groups, one seed")
    parser.add_argument("--measure", choices=sorted(SHAPES), help="measure the costs of a shape")
    parser.add_argument("--seeds", type=int, default=5, help="draws of traffic")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=[*NAMES])
    options = parser.parse_args()
    if options.measure:
        print(options.measure, measure(options.measure, quick=options.quick))
        return
    found: dict[str, list[float]] = defaultdict(list)
    for seed in range(1 if options.quick else options.seeds):
        drawn = traffics(quick=options.quick, seed=seed)
        for case, name, publishes in cases(options.only):
            traffic, router_s = drawn[name], 0.0
            for placement, outcome in outcomes(name, traffic, publishes=publishes):
                router_s = router_s or outcome.completion_s
                found[f"{case}.over_{placement}"].append(outcome.completion_s / router_s)
                found[f"{case}.{placement}.completion_s"].append(outcome.completion_s)
                found[f"{case}.{placement}.hit_rate"].append(outcome.hit_rate)
                found[f"{case}.{placement}.computed_over_new"].append(outcome.computed_over_new)
                found[f"{case}.{placement}.turn_s"].append(statistics.mean(outcome.turn_s))
            if name in BOUNDED and not publishes:
                found[f"{name}.least_work_s"].append(least_work_s(traffic))
    numbers = {key: statistics.median(values) for key, values in found.items()}
    for key, values in found.items():
        if ".over_" in key:
            numbers[f"{key}.least"], numbers[f"{key}.most"] = min(values), max(values)
    for rival in RIVALS:
        over = [numbers.get(f"{case}.over_{rival}") for case, _, _ in cases([*NAMES[:3]])]
        numbers[f"over_{rival}"] = min(one for one in over if one is not None) if any(over) else 0.0
    Console(width=120).print(table(found))
    keep(numbers, options.json)


def table(found: dict[str, list[float]]) -> Table:
    """Return the figures for people."""
    shown = Table(
        "traffic", "placement", "completion s", "over the router", "hit rate", "computed / new"
    )
    for key, values in found.items():
        case, _, placement = key.partition(".over_")
        if not placement:
            continue
        mean = {
            name: statistics.median(found[f"{case}.{placement}.{name}"])
            for name in ("completion_s", "hit_rate", "computed_over_new")
        }
        shown.add_row(
            case, placement, f"{mean['completion_s']:.1f}",
            f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})",
            f"{mean['hit_rate']:.3f}", f"{mean['computed_over_new']:.2f}",
        )  # fmt: skip
    return shown


if __name__ == "__main__":
    main()
