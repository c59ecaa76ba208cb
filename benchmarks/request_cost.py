"""CPU time of router and worker for each request, beside an engine that answers at once.

    python -m benchmarks.request_cost [--against DIRECTORY] [--rounds N] [--quick] [--json FILE]

Router and worker of the role both are real processes; the CPU time of both is all that they take,
since the engine computes nothing. `together` has the requests of the workload `agent` of
`benchmarks.inference`, 64 at a time; `alone` has 16 sessions of it one after the other, one request
at a time. `--against` measures the services of another checkout, too, in turn with those of this
one in each round. Medians over rounds.

    <load>.<version>.router_ms, .worker_ms      CPU milliseconds for each request
    <load>.own_over_other.router, .worker, .all     ratios within a round
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.support.inference.checkouts import add_options, checkouts_of, pairs_of, started
from benchmarks.support.inference.instant_engine import NAME, install_engine
from benchmarks.support.inference.service import Service
from benchmarks.support.inference.workloads import WORKLOADS, Workload
from benchmarks.support.report import arguments, keep, show

AGENT = WORKLOADS["agent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of one round."""

    work: Workload
    times: int = 1
    """Runs of the workload, one after the other."""


LOADS = {
    "together": Load(work=AGENT),
    "alone": Load(work=replace(AGENT, groups=1, members=1), times=16),
}


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU milliseconds for each request."""

    router: float
    worker: float

    @property
    def all(self) -> float:
        """Of both."""
        return self.router + self.worker


Rounds = Mapping[str, list[Spent]]
"""By version."""


async def measure(
    checkouts: Mapping[str, Path], *, rounds: int, folder: Path
) -> Mapping[str, Rounds]:
    """The rounds of each load after the first, which fills caches."""
    model, engine = AGENT.save(folder / "model"), install_engine(folder / "site")
    found: dict[str, dict[str, list[Spent]]] = {
        load: {version: [] for version in checkouts} for load in LOADS
    }

    def service_of(checkout: Path) -> Service:
        path = os.pathsep.join([str(checkout), engine])
        return Service(
            model, AGENT.dtype, roles=("both",), cache_mib=1, engine=NAME,
            # No module comes from the working directory.
            environment={"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip

    async with started(checkouts, service_of) as services:
        for number in range(rounds + 1):
            for name, load in LOADS.items():
                # Each version is the first one in every other round.
                for version in sorted(services, reverse=bool(number % 2)):
                    spent = await _spent(services[version], load, seed=number)
                    if number:
                        found[name][version].append(spent)
    return found


async def _spent(service: Service, load: Load, *, seed: int) -> Spent:
    loop = asyncio.get_running_loop()

    def ask(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return asyncio.run_coroutine_threadsafe(service.run(prompts, tokens), loop).result()

    before = service.cpu_s_of("router"), service.cpu_s_of("both")
    for number in range(load.times):
        await asyncio.to_thread(load.work.run, ask, seed=seed * load.times + number)
    after = service.cpu_s_of("router"), service.cpu_s_of("both")
    requests = load.work.requests * load.times
    router, worker = (
        (end - start) * 1000 / requests for start, end in zip(before, after, strict=True)
    )
    return Spent(router, worker)


def figures(load: str, rounds: Rounds) -> dict[str, float]:
    """Medians, and medians of the ratios within a round."""
    numbers: dict[str, float] = {}
    for version, spent in rounds.items():
        numbers[f"{load}.{version}.router_ms"] = median(one.router for one in spent)
        numbers[f"{load}.{version}.worker_ms"] = median(one.worker for one in spent)
    if pairs := pairs_of(rounds):
        for part in ("router", "worker", "all"):
            ratios = [getattr(own, part) / getattr(other, part) for own, other in pairs]
            numbers[f"{load}.own_over_other.{part}"] = median(ratios)
    return numbers


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "", quick="3 rounds")
    add_options(parser, unit="rounds")
    options = parser.parse_args()
    checkouts = checkouts_of(options)
    rounds = 3 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(checkouts, rounds=rounds, folder=Path(folder)))
    numbers = {key: value for load in LOADS for key, value in figures(load, found[load]).items()}
    show(f"CPU time of a request, {rounds} rounds", numbers)
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
