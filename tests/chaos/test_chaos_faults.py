"""Faults of the infrastructure in the middle of a run: they cost time, and no group."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.support.suite.forge_run import ForgeRun

pytestmark = pytest.mark.timeout(1800)

RESTARTS = 5
"""More than a rollout has attempts."""
BUSY_PROCESSES = 32
STOPPED_S, RUNNING_S = 1.9, 0.1
"""A service that gets 5 % of the processor."""
LOST_TO_THE_DISK = 3
ROOM_BYTES = 4 << 30
"""Free for the pool, above its reserve, until the disk is full; other programs write there too."""
LACKING_BYTES = 1 << 28
"""Below the reserve while the disk is full."""
MORE = 4
"""Steps that are taken afterwards."""


@pytest.fixture
def run(tmp_path: Path, forge_root: Path) -> ForgeRun:
    """A run that takes more steps than any test waits for."""
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=1000)
    run.start()
    return run


def logged(run: ForgeRun, event: str) -> list[dict[str, object]]:
    """What the scheduler has logged under that name."""
    log = run.directory / "logs" / "scheduler.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    records = [json.loads(line) for line in lines if f'"{event}"' in line]
    return [record for record in records if record.get("event") == event]


def faults(run: ForgeRun) -> int:
    """Attempts that the infrastructure ended, as the scheduler counts them."""
    return sum(each.get("kind") == "infrastructure" for each in logged(run, "rollout_failed"))


def lose_a_claim(run: ForgeRun) -> None:
    """Kill the runner until the scheduler has ended a claim: a runner that starts, or waits for
    tasks, has none to lose."""
    lost = faults(run)
    while faults(run) == lost:
        step = run.last_step()
        run.kill("runner")
        run.wait_until(
            lambda step=step: faults(run) > lost or run.last_step() >= step + MORE,  # type: ignore[misc]
            "a claim that ended",
        )


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that never wait."""
    argv = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(argv) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def test_repeatedly_killed_runner_tombstones_nothing(run: ForgeRun) -> None:
    """Each SIGKILL of the runner loses its running rollouts, also of half-sealed groups."""
    run.wait_for_step(1)
    for _ in range(RESTARTS):
        step = run.last_step()
        lose_a_claim(run)
        run.wait_for_step(step + 1)
    run.wait_for_step(run.last_step() + MORE)
    assert logged(run, "group_tombstoned") == []
    assert run.interrupt() == 130, run.explain()


def test_overloaded_host_trains_and_tombstones_nothing(run: ForgeRun) -> None:
    """Beside 32 busy processes a run is slow, and continues."""
    run.wait_for_step(1)
    with busy_processes(BUSY_PROCESSES):
        run.wait_for_step(run.last_step() + MORE)
    assert logged(run, "group_tombstoned") == []
    assert run.interrupt() == 130, run.explain()


@contextmanager
def starved(run: ForgeRun, name: str) -> Iterator[None]:
    """A service that hardly ever runs, by SIGSTOP and SIGCONT in turn; in between it answers
    nobody."""
    ended = threading.Event()

    def stop_and_continue() -> None:
        while not ended.is_set():
            pid = run.pid_of(name)
            os.kill(pid, signal.SIGSTOP)
            ended.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            ended.wait(RUNNING_S)

    starving = threading.Thread(target=stop_and_continue)
    starving.start()
    try:
        yield
    finally:
        ended.set()
        starving.join()


@pytest.mark.parametrize(
    "name", ["runner", "gateway", "router", "prefill", "decode", "trainer", "scheduler", "pool"]
)
def test_starved_service_tombstones_nothing(run: ForgeRun, name: str) -> None:
    """One service gets almost no CPU time, and the others all they need."""
    run.wait_for_step(1)
    with starved(run, name):
        run.wait_for_step(run.last_step() + MORE)
    assert logged(run, "group_tombstoned") == []
    assert run.interrupt() == 130, run.explain()


def take_room(ballast: BinaryIO, reserve_bytes: int) -> None:
    """Lengthen a file until its disk has less than the reserve; other programs may free room."""
    missing_bytes = shutil.disk_usage(ballast.name).free - reserve_bytes + LACKING_BYTES
    if missing_bytes > 0:
        os.posix_fallocate(ballast.fileno(), os.fstat(ballast.fileno()).st_size, missing_bytes)


def test_full_pool_disk_tombstones_nothing(tmp_path: Path, forge_root: Path) -> None:
    """While the pool's disk is full, rollouts are lost; with room again, training continues."""
    # The pool refuses turns below its reserve.
    reserve_bytes = shutil.disk_usage(tmp_path).free - ROOM_BYTES
    assert reserve_bytes > LACKING_BYTES, "needs 5 GB of free disk"
    setting = ("--set", f"pool.store.disk_reserve_bytes={reserve_bytes}")
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=1000, extra=setting)
    run.start()
    run.wait_for_step(1)
    with (tmp_path / "ballast").open("wb") as ballast:

        def has_lost() -> bool:
            take_room(ballast, reserve_bytes)
            return faults(run) >= LOST_TO_THE_DISK

        run.wait_until(has_lost, "rollouts lost to the full disk")
        step = run.last_step()
        os.ftruncate(ballast.fileno(), 0)
    run.wait_for_step(step + MORE)
    assert logged(run, "group_tombstoned") == []
    assert run.interrupt() == 130, run.explain()
