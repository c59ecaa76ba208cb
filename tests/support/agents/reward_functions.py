"""Reward functions that behave and that do not, for the processes that run them."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from forge.agents.environments.base import Reward, Transcript
from forge.agents.rewards import RewardTask

Components = Any
"""What is returned here is wrong on purpose, now and then."""
NUMBER = 7
_spoiled = False


def right(trajectory: Transcript, task: RewardTask) -> bool:
    """Whether the answer is the payload's `expected`."""
    return bool(trajectory.answer == task.payload["expected"])


def detailed(trajectory: Transcript, task: RewardTask) -> Components:
    """An outcome of a domain's own, and a process reward."""
    return [
        Reward(name="own", kind="outcome", value=task.payload["sum"] / 8),
        Reward(name="style", kind="process", value=0.25, turn_index=0),
    ]


async def waiting(trajectory: Transcript, task: RewardTask) -> float:
    """An `async def`, as one that asks a judge would be."""
    await asyncio.sleep(0)
    return 0.5


def arguments(trajectory: Transcript, task: RewardTask) -> Components:
    """Fails with all that it was given."""
    raise ValueError(f"{task!r} {trajectory.messages!r} {trajectory.failed_calls!r}")


def evaluated(trajectory: Transcript, task: RewardTask) -> Components:
    """Returns whatever expression the payload holds."""
    names = {"Reward": Reward, "nan": float("nan"), "inf": float("inf")}
    return eval(task.payload["returns"], names)


def fails(trajectory: Transcript, task: RewardTask) -> Components:
    raise KeyError("expected")


def leaves(trajectory: Transcript, task: RewardTask) -> Components:
    sys.exit("enough")


def talks(trajectory: Transcript, task: RewardTask) -> float:
    """Prints, also past Python, and reads."""
    print("x" * 100_000)
    os.system("echo from a shell")
    return float(len(sys.stdin.read()))


def own_pid(trajectory: Transcript, task: RewardTask) -> float:
    return float(os.getpid())


def hangs(trajectory: Transcript, task: RewardTask) -> Components:
    """Never returns; a thread and a signal handler do not help it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


def hangs_with_company(trajectory: Transcript, task: RewardTask) -> Components:
    """Tells its pid and that of a child of its own, then never returns."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with Path(task.payload["fifo"]).open("w") as fifo:
        fifo.write(f"{os.getpid()} {child.pid}")
    threading.Event().wait()


def crashes(trajectory: Transcript, task: RewardTask) -> Components:
    """Dies as a bug in a C extension would make it die."""
    print("about to fall", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def killed(trajectory: Transcript, task: RewardTask) -> Components:
    """Dies as the kernel makes a process die where the host's memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def spoils(trajectory: Transcript, task: RewardTask) -> float:
    """Leaves something behind that kills `fragile`."""
    global _spoiled
    _spoiled = True
    return 1.0


def fragile(trajectory: Transcript, task: RewardTask) -> float:
    if _spoiled:
        os._exit(3)
    return 0.75


def greedy(trajectory: Transcript, task: RewardTask) -> float:
    return float(len(bytearray(task.payload["bytes"])))


def process_limit(trajectory: Transcript, task: RewardTask) -> float:
    return float(resource.getrlimit(resource.RLIMIT_NPROC)[0])


def meddles(trajectory: Transcript, task: RewardTask) -> float:
    """Writes into whatever is open."""
    for number in range(3, 32):
        try:
            os.write(number, b"\0\0\0\2{}")
        except OSError:
            continue
    return 1.0
