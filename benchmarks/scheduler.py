"""Cost of a decision of the scheduler's core, at any length of the queue.

    python -m benchmarks.scheduler [--quick] [--adaptive S] [--json FILE]
    python -m benchmarks.scheduler --takeover [GROUPS] [--trained] [--json FILE]
    python -m benchmarks.scheduler --settled [GROUPS ...] [--json FILE]

The real core (`forge.core.queue.generation_queue`) in one process on one core, in steady state:
runners lease and complete in random order, a trainer takes batches of 512 from a window of 0.3 N
and commits them, with N = 8192 and a million groups queued behind, and before that with a tenth of
them (`--quick`: a tenth alone, and fewer batches). Each operation is timed by itself, in CPU time.
With `--adaptive`, the mode is `adaptive` with a bound of S steps on staleness: up to S batches are
started and not trained on. `--takeover` measures something else: real processes, SIGKILL of the
leader, and how long its clients wait for the next one, which stood by, with so many groups to
rebuild: queued ones, or, with `--trained`, such as were trained on. `--settled` measures what a
term keeps of groups that are over, and the time it takes to read them.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from rich.table import Table

from benchmarks.support.cpu import rss_bytes
from benchmarks.support.report import arguments, keep
from benchmarks.support.report import show as show_numbers
from benchmarks.support.scheduler.settled import measure_settled
from benchmarks.support.scheduler.takeover import MIN_GROUPS, measure_takeover
from forge.core.queue.admission import Mode, QueueSettings
from forge.core.queue.generation_queue import GenerationQueue
from forge.core.queue.groups import Group, GroupSpec
from forge.core.trajectory import TaskId

CONCURRENCY = 8192
BATCH_GROUPS = 512
LEASE_ROLLOUTS = 8
DOMAINS = ("code", "qa", "general", "reasoning")
COMPLETE_ROLLOUTS = 32
"""Between two looks for a batch."""
OPERATIONS = ("lease", "complete", "look", "take", "commit")
SETTLED = (1_000, 100_000, 1_000_000)
"""The first are next to none: what a process costs by itself."""
LATE_S = 1e6
"""Long after the last group was added."""
TARGET_MS = 1.0
TAKEOVER = {
    "status": "GetSchedulerStatus answers",
    "renew": "claims are renewed",
    "commit": "the open batch is committed",
    "lease": "a new rollout is handed out",
}
"""Events that a client waits for, and their descriptions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Amount of measurement."""

    queued: int
    batches: int


QUICK = Size(queued=100_000, batches=20)
SMALL = Size(queued=100_000, batches=100)
FULL = Size(queued=1_000_000, batches=200)


class Load:
    """One queue under a full load, with the time of each of its operations."""

    def __init__(self, size: Size, staleness: float | None) -> None:
        """`staleness`: the bound of the mode `adaptive`; None is the mode `windowed`."""
        settings = QueueSettings(
            concurrency=CONCURRENCY,
            mode=Mode.WINDOWED if staleness is None else Mode.ADAPTIVE,
            batch_groups=BATCH_GROUPS,
            max_staleness_p99=staleness or 1.0,
            batch_lease_s=1e9,
            rollout_lease_s=1e9,
            domain_shares=dict.fromkeys(DOMAINS, 1.0),
        )
        self.queue = GenerationQueue(settings)
        self.times_s: defaultdict[str, list[float]] = defaultdict(list)
        self._random = Random(0)
        self._running: list[str] = []
        for index in range(size.queued):
            self.queue.add_group(_group(index), now_s=0.0)

    def run(self, batches: int) -> None:
        """So many steps: sample until there is a batch, take it, commit it."""
        for step in range(1, batches + 1):
            while (batch_id := self._look()) is None:
                self._sample()
            started_s = time.thread_time()
            self.queue.batches.prepare_commit(batch_id, step=step, task_ids=(), now_s=LATE_S)
            self.queue.batches.commit(batch_id, step=step)
            self._note("commit", started_s)

    def _look(self) -> str | None:
        started_s = time.thread_time()
        batch = self.queue.take_batch(trainer_id="t", max_groups=BATCH_GROUPS, now_s=LATE_S)
        # When all that is left in the window is complete, a batch goes out short.
        full = batch is not None and len(batch.task_ids) == BATCH_GROUPS
        self._note("take" if full else "look", started_s)
        return batch.batch_id if batch else None

    def _sample(self) -> None:
        """Fill the places that are free, then complete some of what runs."""
        rollouts = self.queue.rollouts
        while True:
            started_s = time.thread_time()
            claims = rollouts.lease(runner_id="r", max_rollouts=LEASE_ROLLOUTS, now_s=LATE_S)
            if not claims:
                break
            self._note("lease", started_s)
            self._running += [claim.trajectory_id for claim in claims]
        for _ in range(min(COMPLETE_ROLLOUTS, len(self._running))):
            at = self._random.randrange(len(self._running))
            self._running[at], self._running[-1] = self._running[-1], self._running[at]
            done = self._running.pop()
            started_s = time.thread_time()
            assert rollouts.complete(done)
            self._note("complete", started_s)

    def _note(self, operation: str, started_s: float) -> None:
        self.times_s[operation].append(time.thread_time() - started_s)


def measure(size: Size, staleness: float | None) -> dict[str, float]:
    numbers: dict[str, float] = {"queued": size.queued}
    # As the service does: what lives as long as the term, the collector need not walk each time.
    before_bytes = rss_bytes(os.getpid())
    load = Load(size, staleness)
    numbers["bytes_per_queued_group"] = (rss_bytes(os.getpid()) - before_bytes) / size.queued
    gc.collect()
    gc.freeze()
    load.run(size.batches)
    for operation, times_s in load.times_s.items():
        cuts = statistics.quantiles(times_s, n=100)
        numbers[f"{operation}_p50_ms"] = 1000 * cuts[49]
        numbers[f"{operation}_p99_ms"] = 1000 * cuts[98]
    gc.unfreeze()
    return numbers


def _group(index: int) -> Group:
    spec = GroupSpec(
        task_id=TaskId(f"task-{index}"),
        index=index,
        domain=DOMAINS[index % len(DOMAINS)],
        shard="s0",
        size=1,
    )
    return Group(spec)


def show(numbers: dict[str, float]) -> None:
    table = Table(title=f"Scheduler core, {numbers['queued']:,.0f} groups queued")
    for name in ("operation", "p50 ms", "p99 ms", f"target {TARGET_MS} ms"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    for operation in OPERATIONS:
        p50, p99 = (numbers[f"{operation}_p{share}_ms"] for share in (50, 99))
        table.add_row(operation, f"{p50:.3f}", f"{p99:.3f}", "met" if p99 < TARGET_MS else "missed")
    console = Console()
    console.print(table)
    console.print(f"{numbers['bytes_per_queued_group']:,.0f} bytes per queued group")


def show_takeover(numbers: dict[str, float]) -> None:
    limit_s = 2 * numbers["ttl_s"]
    table = Table(title=f"SIGKILL of the leader of {numbers['groups']:,.0f} groups")
    for name in ("until", "mean s", "worst s", f"target {limit_s:g} s"):
        table.add_column(name, justify="left" if name == "until" else "right")
    for name, about in TAKEOVER.items():
        mean_s, worst_s = numbers[f"{name}_mean_s"], numbers[f"{name}_worst_s"]
        met = "met" if worst_s < limit_s else "missed"
        table.add_row(about, f"{mean_s:.2f}", f"{worst_s:.2f}", met)
    console = Console()
    console.print(table)
    rebuild_s, worst_s = numbers["rebuild_mean_s"], numbers["rebuild_worst_s"]
    console.print(f"of it, to rebuild the queue: {rebuild_s:.2f} s, at worst {worst_s:.2f} s")
    console.print(f"to scan the shard while it stands by: {numbers['scan_mean_s']:.2f} s")
    console.print(f"to rebuild when it did not stand by: {numbers['cold_mean_s']:.2f} s")


def main() -> None:
    parser = arguments(__doc__, quick="a tenth of it")
    parser.add_argument("--adaptive", type=float, metavar="S", help="the mode, and its bound")
    parser.add_argument(
        "--takeover",
        type=int,
        nargs="?",
        const=1000,
        metavar="GROUPS",
        help=f"kill leaders of so many groups (default 1000, at least {MIN_GROUPS})",
    )
    parser.add_argument(
        "--trained", action="store_true", help="with --takeover: groups that were trained on"
    )
    parser.add_argument(
        "--settled",
        type=int,
        nargs="*",
        metavar="GROUPS",
        help=f"cold rebuilds with so many groups that are over (default {SETTLED})",
    )
    options = parser.parse_args()
    if options.settled is not None:
        over: dict[str, float] = {}
        for groups in options.settled or SETTLED:
            with tempfile.TemporaryDirectory() as folder:
                numbers = asyncio.run(measure_settled(Path(folder), groups))
            show_numbers(f"{groups:,} groups that are over", numbers)
            over |= {f"{groups}.{name}": value for name, value in numbers.items()}
        keep(over, options.json)
        return
    if options.takeover is not None:
        with tempfile.TemporaryDirectory() as folder:
            groups = max(options.takeover, MIN_GROUPS)
            numbers = asyncio.run(measure_takeover(Path(folder), groups, trained=options.trained))
        show_takeover(numbers)
        keep(numbers, options.json)
        return
    found: dict[str, float] = {}
    for size in (QUICK,) if options.quick else (SMALL, FULL):
        numbers = measure(size, options.adaptive)
        show(numbers)
        found |= {f"{size.queued}.{name}": value for name, value in numbers.items()}
    keep(found, options.json)


if __name__ == "__main__":
    main()
