"""Lets no process of a test outlive the test run. Linux only; elsewhere it does nothing.

Owns a watcher beside each test process: pytest itself, and each worker of pytest-xdist. The test
process marks its environment, which every process that a test starts inherits, and their children
do. When the test process has ended, in whatever way, the kernel signals the watcher, and the
watcher kills all processes with the mark. So no test can forget it, SIGKILL and the end of
pytest-timeout are covered, and a worker ends with the process that started it.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys

MARK = "TEST_PROCESS"
"""Environment variable; a process that is given another environment needs it too."""

# A Python of its own: what is forked from a test process has its threads' locks.
_WATCHER = """
import ctypes, os, signal, sys, time
PR_SET_PDEATHSIG = 1
parent, mark = int(sys.argv[1]), sys.argv[2].encode()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
if os.getppid() == parent:  # else it has ended before the request was made
    signal.sigwait({signal.SIGUSR1})

def marked(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\\0")
    except OSError:
        return False

def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass

# Again and again: one that is about to die may still start another.
while left := [int(name) for name in os.listdir("/proc") if name.isdigit() and marked(name)]:
    for pid in left:
        kill(pid)
    time.sleep(0.05)
"""


def start_guard() -> None:
    """Mark this process's environment and start the watcher. From the main thread: the kernel
    reports the end of the thread that starts it."""
    if sys.platform != "linux":
        return
    os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(8)}"
    subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _WATCHER, str(os.getpid()), "=".join(mark().popitem())],
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Out of reach of the terminal's interrupt.
        start_new_session=True,
    )


def mark() -> dict[str, str]:
    """What belongs into the environment of a process that does not inherit it."""
    return {MARK: os.environ[MARK]} if MARK in os.environ else {}
