"""Processes of services, forked from one that has imported what they run.

Owns what tests need of such a process. It runs the same module as `python -m`, as `__main__` and
with the same arguments, but its imports were made before, in the fork server of this test process:
they take most of the time of a start. `forge run` in `tests/e2e` and the benchmarks start the same
modules by their command lines.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

REQUEST_S = 240.0
"""For a fork, and for the imports before the first one."""
_ADDRESS = "FORGE_TEST_FORK_SERVER"
_SHARED = os.environ.pop(_ADDRESS, "")
"""In a worker; test runs that it starts have their own."""


class ForkedProcess:
    """One `python -m <module>`; its methods are those of `subprocess.Popen`."""

    def __init__(
        self,
        module: str,
        argv: Sequence[str],
        *,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        environ: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.args = [module, *argv]
        self._output, self._errors = _kept(stdout), _kept(stderr)
        self._status, status = os.pipe()
        self._lock = threading.Lock()
        self.returncode: int | None = None
        files = (status, _number(self._output or stdout or 1), _number(self._errors or stderr or 2))
        try:
            self.pid = _fork_server().fork(module, argv, files, environ, directory)
        finally:
            os.close(status)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it wrote to stdout and stderr, if they are pipes."""
        self.wait(timeout)
        return _read(self._output), _read(self._errors)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        """The exit code, once there is one; threads may wait for it at once."""
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            with self._lock:
                if self.returncode is None:
                    # Nothing where the fork server was killed, with all that it forked.
                    self.returncode = int(os.read(self._status, 16) or -signal.SIGKILL)
        return self.returncode

    def __del__(self) -> None:
        os.close(self._status)


def _kept(stream: int | IO[bytes] | None) -> IO[bytes] | None:
    return tempfile.TemporaryFile() if stream == subprocess.PIPE else None


def _number(stream: int | IO[bytes]) -> int:
    return stream if isinstance(stream, int) else stream.fileno()


def _read(stream: IO[bytes] | None) -> str:
    if stream is None:
        return ""
    stream.seek(0)
    return stream.read().decode()


ServiceProcess = ForkedProcess | subprocess.Popen[str]


def start_service(module: str, *argv: str, stderr: int | IO[bytes] | None = None) -> ServiceProcess:
    """Start `python -m <module>` with these arguments."""
    if not can_fork(os.environ):
        return subprocess.Popen([sys.executable, "-m", module, *argv], stderr=stderr, text=True)
    return ForkedProcess(module, argv, stderr=stderr)


def can_fork(environ: Mapping[str, str]) -> bool:
    """Whether a fork is like a process with these variables: in tests, and with the variables of
    the fork server that set up an interpreter."""
    in_tests = "PYTEST_VERSION" in os.environ
    return in_tests and _interpreter(environ) == _fork_server().interpreter


def _interpreter(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read before the first line of a module."""
    return {name: value for name, value in environ.items() if name.startswith(("PYTHON", "LD_"))}


_AT_IMPORT = _interpreter(os.environ)


class _ForkServer:
    """A connection to the fork server: the one that the workers of a run share, or a new one.
    `tests.support.suite.process_guard` ends what it leaves."""

    def __init__(self) -> None:
        # The shared one was started before any test changed the variables of this process.
        self.interpreter = _AT_IMPORT if _SHARED else _interpreter(os.environ)
        self.address = _SHARED or _start()
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(REQUEST_S)
        self._channel.connect(f"\0{self.address}")
        self._lock = threading.Lock()

    def fork(
        self,
        module: str,
        argv: Sequence[str],
        files: Sequence[int],
        environ: Mapping[str, str] | None,
        directory: Path | None,
    ) -> int:
        """The process id. `files`: for the exit code, stdout and stderr."""
        request = {
            "module": module,
            "argv": list(argv),
            "environ": dict(os.environ if environ is None else environ),
            "directory": str(directory or Path.cwd()),
        }
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(request).encode()], files)
            pid = self._channel.recv(16)
        assert pid, "the fork server has ended"
        return int(pid)


def _start() -> str:
    """The address of a fork server, which waits for its first client."""
    # A name without a file: the path of a test's directory can be too long for a socket.
    address = f"forge-tests-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        argv = [sys.executable, "-m", "tests.support.runtime.fork_server", str(listener.fileno())]
        subprocess.Popen(argv, pass_fds=[listener.fileno()])
    return address


_first = threading.Lock()


def _fork_server() -> _ForkServer:
    # Two threads that ask first would start two.
    with _first:
        return _made()


@functools.cache
def _made() -> _ForkServer:
    return _ForkServer()


def share_fork_server() -> None:
    """Start one for the workers of pytest-xdist, which inherit the environment of this process.
    What services run is imported once then, not by each worker."""
    os.environ[_ADDRESS] = _fork_server().address
