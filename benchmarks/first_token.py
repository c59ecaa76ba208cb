"""Time to the first token of a cached turn through the service, and the CPU time that it takes.

    python -m benchmarks.first_token [--against DIRECTORY] [--rounds N] [--quick] [--json FILE]

Router and workers are real processes with the tiny model of `benchmarks.inference`; `both` has one
worker of the role both, `apart` a prefill and a decode worker. A round is one session, one request
at a time: a prompt of 1,024 tokens, then 11 turns of 32 more. `--against` measures the services of
another checkout, too, turn by turn. Medians over all turns but the first of a session.

    <shape>.<version>.ms        milliseconds from the request to the first token
    <shape>.<version>.cpu_ms    CPU milliseconds of router and workers
    <shape>.own_over_other.ms, .cpu     ratios within a turn
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.support.inference.checkouts import add_options, checkouts_of, pairs_of, started
from benchmarks.support.inference.service import Service
from benchmarks.support.inference.workloads import WORKLOADS
from benchmarks.support.report import arguments, keep, show
from forge.v1.common_pb2 import SamplingParams

SHAPES = {"both": ("both",), "apart": ("prefill", "decode")}
_WORK = WORKLOADS["tiny"]
_FIRST_TOKENS, _ADDED_TOKENS, _TURNS = 1024, 32, 12
_PAUSE_S = 0.03
"""Time for the work behind a first token, such as the reports of caches."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One first token, in milliseconds."""

    passed: float
    cpu: float


Turns = Mapping[str, list[Turn]]
"""By version."""


async def measure(
    checkouts: Mapping[str, Path], roles: tuple[str, ...], *, model: Path, rounds: int
) -> Turns:
    """All turns but those of the first session, which fills caches, and the first ones."""
    found: dict[str, list[Turn]] = {version: [] for version in checkouts}

    def service_of(checkout: Path) -> Service:
        return Service(
            model, _WORK.dtype, roles=roles, cache_mib=512,
            # No module comes from the working directory.
            environment={"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1",
                         "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    async with started(checkouts, service_of) as services:
        for number in range(rounds + 1):
            rng = Random(number)
            history = _fresh(rng, _FIRST_TOKENS)
            for turn in range(_TURNS):
                # Each version is the first one in every other turn.
                for version in sorted(services, reverse=bool((number + turn) % 2)):
                    spent = await _first_token(services[version], history, session=str(number))
                    if number and turn:
                        found[version].append(spent)
                history = history + _fresh(rng, _ADDED_TOKENS)
    return found


def _fresh(rng: Random, tokens: int) -> list[int]:
    return [rng.randrange(_WORK.config.vocab_size) for _ in range(tokens)]


async def _first_token(service: Service, ids: list[int], *, session: str) -> Turn:
    sampling = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=1)
    before_s, began_s = service.cpu_s(), time.perf_counter()
    await service.sample(ids, sampling, session_id=session)
    passed_s = time.perf_counter() - began_s
    await asyncio.sleep(_PAUSE_S)
    return Turn(passed_s * 1000, (service.cpu_s() - before_s) * 1000)


def figures(shape: str, turns: Turns) -> dict[str, float]:
    """Medians, and medians of the ratios within a turn."""
    numbers: dict[str, float] = {}
    for version, spent in turns.items():
        numbers[f"{shape}.{version}.ms"] = median(one.passed for one in spent)
        numbers[f"{shape}.{version}.cpu_ms"] = median(one.cpu for one in spent)
    if pairs := pairs_of(turns):
        numbers[f"{shape}.own_over_other.ms"] = median(a.passed / b.passed for a, b in pairs)
        numbers[f"{shape}.own_over_other.cpu"] = median(a.cpu / b.cpu for a, b in pairs)
    return numbers


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "", quick="2 rounds")
    add_options(parser, unit="sessions")
    options = parser.parse_args()
    checkouts = checkouts_of(options)
    rounds = 2 if options.quick else options.rounds
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = _WORK.save(Path(folder) / "model")
        for shape, roles in SHAPES.items():
            turns = asyncio.run(measure(checkouts, roles, model=model, rounds=rounds))
            numbers |= figures(shape, turns)
    show(f"first token of a cached turn, {rounds} sessions", numbers)
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
