"""Lets no process and no temporary file of a test outlive the test run. Linux only.

Owns a watcher beside each test process: pytest itself, and each worker of pytest-xdist. The test
process marks its environment, which every process that a test starts inherits, and their children
do. When the test process has ended, in whatever way, the kernel signals the watcher, and the
watcher kills all processes with the mark. So no test can forget it, SIGKILL and the end of
pytest-timeout are covered, and a worker ends with the process that started it.

A killed process cannot remove its temporary directories. So TMPDIR of a test run is a directory of
its own, for pytest's workers too, and the watcher removes it last. It does not have the `tmp_path`
of tests.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

MARK = "TEST_PROCESS"
"""Environment variable; a process that is given another environment needs it too."""
_SCRATCH = "forge-tests-"

# A Python of its own: what is forked from a test process has its threads' locks.
_WATCHER = """
import ctypes, os, shutil, signal, sys, time
PR_SET_PDEATHSIG = 1
parent, mark, scratch = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3]
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
if scratch:
    shutil.rmtree(scratch, ignore_errors=True)
"""


def start_guard() -> None:
    """Mark this process's environment and start the watcher. From the main thread: the kernel
    reports the end of the thread that starts it."""
    if sys.platform != "linux":
        return
    scratch = "" if _SCRATCH in os.environ.get("TMPDIR", "") else _make_scratch()
    os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(8)}"
    watcher = [sys.executable, "-I", "-S", "-c", _WATCHER]
    subprocess.Popen(
        [*watcher, str(os.getpid()), "=".join(mark().popitem()), scratch],
        env={},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Out of reach of the terminal's interrupt.
        start_new_session=True,
    )


def _make_scratch() -> str:
    # For failed tests pytest keeps its own directories, which tests get as `tmp_path`.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    scratch = tempfile.mkdtemp(prefix=_SCRATCH)
    # Sandboxes of another user find their files below it.
    Path(scratch).chmod(0o711)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    return scratch


def mark() -> dict[str, str]:
    """What belongs into the environment of a process that does not inherit it."""
    return {MARK: os.environ[MARK]} if MARK in os.environ else {}
