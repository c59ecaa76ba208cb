"""Drives the real `forge run` as a process: start, wait for a moment, kill a part, read the end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.support.runtime.waiting import StillNotSo, until_blocking

FORGE = str(Path(sys.executable).parent / "forge")
LIMIT_S = 900.0
"""Of one wait. The first step took more than 420 s at a load of 50 on two cores."""
_started: list[subprocess.Popen[bytes]] = []


class ForgeRun:
    """One `forge run` under a directory of its own; its output goes to a file."""

    def __init__(self, directory: Path, *, root: Path, steps: int, extra: tuple[str, ...] = ()):
        self.directory = directory
        self.output_path = directory.with_suffix(".out")
        self.steps = steps
        self._argv = [
            *(FORGE, "run", "--model", "tiny", "--seed", "0", "--root", str(root)),
            *("--run-dir", str(directory), "--eval-tasks", "2"),
            *extra,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.output_path.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._argv, "--steps", str(self.steps)],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        _started.append(self._process)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "start first"
        return self._process

    def output(self) -> str:
        return self.output_path.read_text() if self.output_path.exists() else ""

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a moment of the run; an early end of the run is a failure that shows why."""

        def come() -> bool:
            assert self.process.poll() is None, f"ended before {what}:\n{self.explain()}"
            return condition()

        try:
            until_blocking(come, limit_s=LIMIT_S)
        except StillNotSo as error:
            raise AssertionError(f"no {what}: {error}\n{self.explain()}") from None

    def wait_for_step(self, step: int) -> None:
        """Wait for a step; the limit is one for each step up to it."""
        for each in range(self.last_step() + 1, step + 1):
            self.wait_until(partial(self._has_taken, each), f"step {each}")

    def _has_taken(self, step: int) -> bool:
        return self.last_step() >= step

    def last_step(self) -> int:
        return max((int(n) for n in re.findall(r"step +(\d+)/", self.output())), default=0)

    def pid_of(self, name: str) -> int:
        """Process id of a member of the stack, by its instance id."""
        for child in psutil.Process(self.process.pid).children():
            try:
                argv = child.cmdline()
            except psutil.Error:
                continue
            if f"--instance-id={name}" in argv or (name == "etcd" and "etcd" in argv[:1][0]):
                return child.pid
        raise AssertionError(f"no process {name}:\n{self.explain()}")

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.pid_of(name)
        os.kill(pid, number)
        return pid

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.finish()

    def finish(self) -> int:
        try:
            return self.process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end:\n{self.explain()}") from None

    def stack_pids(self) -> list[int]:
        """Every process below the run, itself excluded."""
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    def state(self) -> dict[str, object]:
        return dict(json.loads((self.directory / "run.json").read_text()))

    def metrics(self) -> list[dict[str, float]]:
        """One entry per optimizer step, in the order they were taken."""
        return [line for line in self._recorded() if "step" in line]

    def evaluations(self) -> list[dict[str, Any]]:
        """One entry per evaluation while training went on, in the order they ended."""
        return [line["evaluation"] for line in self._recorded() if "evaluation" in line]

    def _recorded(self) -> list[dict[str, Any]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def explain(self) -> str:
        """The run's own words and the end of each log, for a failing test."""
        parts = [self.output()]
        for log in sorted((self.directory / "logs").glob("*.log")):
            tail = log.read_text(errors="replace").splitlines()[-15:]
            parts.append(f"--- {log.name}\n" + "\n".join(tail))
        return "\n".join(parts)


def end_runs() -> None:
    """Kills the runs that this process started, each with its services."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
            process.wait()


def still_alive(pids: list[int]) -> list[int]:
    """Those of `pids` that run; a zombie does not."""
    alive = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
        except psutil.NoSuchProcess:
            continue
    return alive


def wait_for_death(pids: list[int]) -> None:
    """Wait until none of `pids` runs any more."""
    until_blocking(lambda: not still_alive(pids))
