"""Groups that receive weights by gloo: a trainer and workers as processes, which fail in the
middle of a broadcast."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.support.weights.stream import Started
from tests.support.inference.weight_group_processes import follow, publish
from tests.support.runtime.etcd import EtcdServer

pytestmark = pytest.mark.faults

ELEMENTS = [16_384] * 40 + [3]
"""Of tensors of 32 KiB: 20 buckets."""
PATIENT_S = 600.0


class Fleet:
    """A trainer and workers."""

    def __init__(self, etcd: EtcdServer, folder: Path) -> None:
        self._gate = folder / "gate"
        """There while the trainer stops in the middle of a broadcast."""
        self._etcd = etcd
        self._folder = folder
        self._started: list[Started] = []
        self.trainer: Started
        self.workers: list[Started] = []

    def start(self, workers: int, *, silence_s: float = PATIENT_S) -> list[Started]:
        """Start a trainer and workers, and form a first group; returns the workers."""
        gate = {"FORGE_TEST_GATE": str(self._gate)}
        with ThreadPoolExecutor() as threads:
            trainer = threads.submit(self._process, publish, "trainer", silence_s, gate)
            added = threads.map(lambda number: self.join(number, silence_s), range(workers))
            self.workers += added
            self.trainer = trainer.result()
        self.deliver()
        self.deliver_by_group()
        return list(self.workers)

    def restart_trainer(self) -> None:
        """Start a trainer in the place of one that has ended."""
        self.trainer = self._process(publish, "trainer", PATIENT_S, {})

    def join(self, number: int, silence_s: float = PATIENT_S, **environment: str) -> Started:
        """Start a worker."""
        return self._process(follow, f"w{number}", silence_s, environment)

    def _process(
        self, body: Callable[..., None], name: str, silence_s: float, environment: dict[str, str]
    ) -> Started:
        folder = str(self._folder / name)
        process = Started(body, self._etcd.endpoint, folder, silence_s, environment)
        self._started.append(process)
        return process

    def publish(self) -> int:
        """Publish other weights; returns their version."""
        self.trainer.order("make", ELEMENTS)
        return int(self.trainer.order("publish"))

    def deliver(self) -> None:
        """Publish, and compare what the workers serve."""
        version = self.publish()
        for worker in self.workers:
            worker.begin("until", version)
        self.compare(self.workers)

    def compare(self, workers: Sequence[Started]) -> None:
        """Wait for versions that workers are to serve, and compare them with the trainer's."""
        for worker in workers:
            worker.answer()
        expected = self.trainer.order("digest")
        assert [worker.order("digest") for worker in workers] == [expected] * len(workers)

    def deliver_by_group(self, workers: Sequence[Started] = ()) -> None:
        """Publish to a group that has these workers, all by default, as members."""
        workers = workers or self.workers
        self.until_ready()
        before = [versions(worker) for worker in workers]
        self.deliver()
        assert [versions(worker) for worker in workers] == [count + 1 for count in before]

    def until_ready(self) -> None:
        """Wait until the trainer and the workers, and no others, can form a group."""
        while not all(one.order("ready") for one in (self.trainer, *self.workers)):
            time.sleep(0.05)
        while self.trainer.order("members") != len(self.workers):
            time.sleep(0.05)

    def stop_in_the_middle(self) -> None:
        """Publish, and return once all workers have received the first buckets in a group: the
        trainer waits before the next one. Workers owe the answer that they serve it."""
        self.until_ready()
        self._gate.touch()
        version = self.publish()
        for worker in self.workers:
            worker.begin("until", version)
        while not self._gate.with_suffix(".reached").exists():
            time.sleep(0.05)

    def go_on(self) -> None:
        """Let the trainer send the rest."""
        self._gate.unlink()

    def end(self) -> None:
        """Kill all processes."""
        for process in self._started:
            process.end()


def versions(worker: Started) -> float:
    """The versions that a worker has received in a group."""
    return float(
        worker.order("metric", "forge_inference_weight_versions_total", {"way": "group"}) or 0
    )


def fallbacks(worker: Started, reason: str) -> float:
    labels = {"reason": reason}
    name = "forge_inference_weight_group_fallbacks_total"
    return float(worker.order("metric", name, labels) or 0)


@pytest.fixture
def fleet(own_etcd: EtcdServer, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(own_etcd, tmp_path)
    yield made
    made.end()


def test_group_receives_versions_in_a_row(fleet: Fleet) -> None:
    """Three workers have the trainer's bytes; one that starts later fetches them, and then joins
    the next group. In another one bytes are damaged: it fetches that tensor and those after it, and
    the others lose nothing."""
    others = fleet.start(3)
    fleet.deliver_by_group()
    late = fleet.join(3, FORGE_TEST_DAMAGE="5")
    late.begin("until", 1)
    fleet.compare([late])
    fleet.workers.append(late)
    for number in (1, 2):
        fleet.deliver_by_group(others)
        assert fallbacks(late, "damaged") == number and not versions(late)
    assert fleet.trainer.order("metric", "forge_trainer_weight_group_members", {}) == 4


def test_killed_worker_ends_the_group_alone(fleet: Fleet) -> None:
    """Killed in the middle of a broadcast; the others fetch the missing tensors, and then form a
    group of two."""
    *others, killed = fleet.start(3)
    fleet.stop_in_the_middle()
    killed.end()
    fleet.go_on()
    fleet.compare(others)
    assert all(fallbacks(worker, "failed") == 1 for worker in others)
    fleet.workers.remove(killed)
    fleet.deliver_by_group()


@pytest.mark.parametrize("whole", [False, True], ids=["its part in the group", "worker"])
def test_frozen_worker_delays_the_others_by_the_silence(fleet: Fleet, whole: bool) -> None:
    """Frozen in the middle of a broadcast; it serves the version once it continues."""
    *others, frozen = fleet.start(3, silence_s=3.0)
    fleet.stop_in_the_middle()
    pids = frozen.pids if whole else frozen.pids[1:]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    fleet.go_on()
    fleet.compare(others)
    assert whole or frozen.answer() is None
    if whole:
        assert not frozen.answered
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        assert frozen.answer() is None
    assert frozen.order("digest") == fleet.trainer.order("digest")


def test_trainer_killed_in_the_middle_of_a_broadcast(fleet: Fleet) -> None:
    """The next trainer's version ends the wait for the rest, and forms a group again."""
    fleet.start(2)
    fleet.stop_in_the_middle()
    fleet.trainer.end()
    fleet.go_on()
    fleet.restart_trainer()
    fleet.publish()
    fleet.compare(fleet.workers)
    fleet.deliver_by_group()
