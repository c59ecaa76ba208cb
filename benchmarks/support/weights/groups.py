"""What a group of gloo costs beside bulk connections, by number of workers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import psutil

from benchmarks.support.weights.stream import Started, cpu_of, follow_weights, publish_weights

_LOOK_S = 0.05
_FIRST_ROUNDS = 4
"""Not counted: they connect, and memory grows."""


def group_costs(
    etcd: str, folder: Path, *, elements: Sequence[int], rounds: int, most_workers: int
) -> dict[str, float]:
    """Return seconds, CPU seconds of all ends and bytes that leave the trainer, for tensors of so
    many elements, of a group and of bulk connections with one worker and more; interleaved."""
    gib = sum(elements) * 2 / (1 << 30)
    numbers: dict[str, float] = {}
    for count in (1, most_workers):
        fleets = {way: _fleet(etcd, folder, way, count) for way in ("group", "bulk")}
        found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in fleets}
        try:
            until_in_group(*fleets["group"])
            for _ in range(rounds + _FIRST_ROUNDS):
                for way, fleet in fleets.items():
                    fleet[0].order("make", elements)
                    found[way].append(_cost(fleet))
        finally:
            fleets["group"][0].order("end")
            for process in chain.from_iterable(fleets.values()):
                process.end()
        for way, costs in found.items():
            columns = zip(*costs[_FIRST_ROUNDS:], strict=True)
            took_s, cost_s, sent_bytes = map(statistics.median, columns)
            numbers |= {
                f"groups.{way}_{count}.s_per_gib": took_s / gib,
                f"groups.{way}_{count}.cpu_s_per_gib": cost_s / gib,
                f"groups.{way}_{count}.egress_over_weights": sent_bytes / (gib * (1 << 30)),
            }
    return numbers


def until_in_group(publisher: Started, *workers: Started) -> None:
    """Publish to the workers, and wait until they can receive the next version in a group."""
    publisher.order("make", [1 << 10])
    publish_to(publisher, workers)
    while not all(one.order("ready") for one in (publisher, *workers)):
        time.sleep(_LOOK_S)
    while publisher.order("members") < len(workers):
        time.sleep(_LOOK_S)


def publish_to(publisher: Started, workers: Sequence[Started]) -> None:
    """Publish, and wait until all workers serve the version."""
    version = publisher.order("publish")
    for worker in workers:
        worker.begin("until", version)
    for worker in workers:
        worker.answer()


def _fleet(etcd: str, folder: Path, way: str, count: int) -> list[Started]:
    cluster = f"{way}{count}"
    workers = [
        Started(follow_weights, etcd, cluster, f"w{number}", str(folder), way)
        for number in range(count)
    ]
    return [Started(publish_weights, etcd, cluster, way), *workers]


def _cost(fleet: Sequence[Started]) -> tuple[float, float, float]:
    publisher, *workers = fleet
    before, began_s = _sent_bytes(publisher), time.monotonic()
    cost_s = cpu_of(fleet, partial(publish_to, publisher, workers))
    return time.monotonic() - began_s, cost_s, _sent_bytes(publisher) - before


def _sent_bytes(publisher: Started) -> float:
    """Bytes that have left a publisher over gRPC, TCP and gloo."""
    of_gloo = sum(psutil.Process(pid).io_counters().write_chars for pid in publisher.pids[1:])
    return float(publisher.order("sent_bytes")) + of_gloo
