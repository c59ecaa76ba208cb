"""Throughput of the pool: durable appends and reads, beside Redis streams and TransferQueue.

    python -m benchmarks.pool [--quick] [--opening] [--json FILE]

Turns of 16 KB, four columns of numbers, go over loopback into one process and are read back, in
interleaved rounds; each round gives the ratios, and their medians count. Forge and Redis have four
producers with 64 or 256 records unanswered each, TransferQueue one with 16, 64 or 256 a batch, and
the best of its medians stands for each. `benchmarks/support/pool/targets.py` says what an answer of
each means. Seconds include the load, which is Python everywhere.

The time to open a shard is measured at growing numbers of small turns, up to ten million (a few
minutes and 4 GB of disk to write them); `--opening` measures that alone.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.support.pool.targets import Target, start_targets
from benchmarks.support.report import arguments, keep, show
from services.pool.data.commands import AppendTurns
from services.pool.store import PoolStore
from services.pool.validation import new_turn
from tests.support.pool.records import make_turn

IN_FLIGHT = 64
BATCHES = {
    "forge": (IN_FLIGHT, 256),
    "redis": (IN_FLIGHT, 256),
    "transferqueue": (16, IN_FLIGHT, 256),
}
PEERS = ("redis", "transferqueue")
COMMIT_TURNS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Duration of the measurement."""

    rounds: int
    records: int
    """Records of one round and target."""
    open_turns: tuple[int, ...]


QUICK = Size(rounds=3, records=512, open_turns=(2_000, 10_000))
FULL = Size(rounds=7, records=4096, open_turns=(100_000, 1_000_000, 10_000_000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Result of one target in one round, with one batch size."""

    appends_per_s: float
    reads_per_s: float
    cpu_ms_per_append: float
    """CPU time of the server alone; 0 if it is not known."""


async def measure(size: Size, peers: tuple[str, ...]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as folder:
        async with start_targets(Path(folder), peers) as targets:
            rounds = await compare(targets, size)
    return numbers_of(rounds) | opening(size)


async def compare(targets: dict[str, Target], size: Size) -> dict[tuple[str, int], list[Round]]:
    """Rounds by target and batch size."""
    runs = [(name, batch) for name in targets for batch in BATCHES[name]]
    rounds: dict[tuple[str, int], list[Round]] = {run: [] for run in runs}
    for round_ in range(-1, size.rounds):
        at = round_ % len(runs)
        # Each round begins with another, so that a trend of the machine favors none.
        for run in runs[at:] + runs[:at]:
            found = await one_round(targets[run[0]], size.records, run[1])
            if round_ >= 0:  # the first is to warm up
                rounds[run].append(found)
    return rounds


async def one_round(target: Target, records: int, batch: int) -> Round:
    before_s = target.cpu_s()
    append_s = await target.append(records, batch)
    spent_s = target.cpu_s() - before_s
    read_s = await target.read(records, batch)
    await target.clear()
    return Round(
        appends_per_s=records / append_s,
        reads_per_s=records / read_s,
        cpu_ms_per_append=1000 * spent_s / records,
    )


def numbers_of(rounds: dict[tuple[str, int], list[Round]]) -> dict[str, float]:
    """Medians of each, and of the ratios within a round."""
    best = {
        name: max(
            (found for (other, _), found in rounds.items() if other == name),
            key=lambda found: statistics.median(one.appends_per_s for one in found),
        )
        for name, _ in rounds
    }
    forge = best["forge"]
    numbers = {"appends_per_s": statistics.median(one.appends_per_s for one in forge)}
    numbers["reads_per_s"] = statistics.median(one.reads_per_s for one in forge)
    for name, key in (("redis", "redis_always"), ("transferqueue", "transferqueue")):
        if name not in best:
            continue
        pairs = list(zip(forge, best[name], strict=True))
        numbers[f"over_{key}"] = statistics.median(
            ours.appends_per_s / theirs.appends_per_s for ours, theirs in pairs
        )
        numbers[f"reads_over_{name}"] = statistics.median(
            ours.reads_per_s / theirs.reads_per_s for ours, theirs in pairs
        )
        numbers[f"{name}.appends_per_s"] = statistics.median(
            theirs.appends_per_s for _, theirs in pairs
        )
        numbers[f"{name}.reads_per_s"] = statistics.median(
            theirs.reads_per_s for _, theirs in pairs
        )
    for name in ("forge", "redis"):
        if name in best:
            numbers[f"{name}.cpu_ms_per_append"] = statistics.median(
                one.cpu_ms_per_append for one in best[name]
            )
    return numbers


def opening(size: Size) -> dict[str, float]:
    """Milliseconds to open a shard of so many turns, each of a trajectory of its own."""
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as folder:
        written = 0
        for turns in size.open_turns:
            fill(Path(folder) / "shard", written, turns)
            written = turns
            times = [open_ms(Path(folder) / "shard") for _ in range(5)]
            numbers[f"open_ms_at_{turns}"] = statistics.median(times)
    return numbers


def fill(directory: Path, begin: int, end: int) -> None:
    """Adds one-turn trajectories until there are `end` turns."""
    store = PoolStore(directory, shard="s0", map_bytes=1 << 32)
    for first in range(begin, end, COMMIT_TURNS):
        turns = tuple(
            new_turn(make_turn(f"t{number}:0:0").SerializeToString())
            for number in range(first, min(first + COMMIT_TURNS, end))
        )
        store.commit([AppendTurns(turns=turns)])
    store.close()


def open_ms(directory: Path) -> float:
    started_s = time.perf_counter()
    store = PoolStore(directory, map_bytes=1 << 32)
    elapsed_s = time.perf_counter() - started_s
    store.close()
    return 1000 * elapsed_s


def main() -> None:
    parser = arguments(__doc__, quick="fewer rounds and records")
    parser.add_argument(
        "--peers", default=",".join(PEERS), help="those to compare with, separated by commas"
    )
    parser.add_argument("--opening", action="store_true", help="only the time to open a shard")
    options = parser.parse_args()
    peers = tuple(name for name in options.peers.split(",") if name)
    size = QUICK if options.quick else FULL
    if options.opening:
        numbers = opening(size)
        show("Pool", numbers)
        keep(numbers, options.json)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        numbers = runner.run(measure(size, peers))
    show("Pool", numbers)
    missing = [name for name in PEERS if f"{name}.appends_per_s" not in numbers]
    if missing:
        sys.stdout.write(f"not measured: {', '.join(missing)} (make bench-peers; redis-server)\n")
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
