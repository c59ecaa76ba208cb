"""The start of a child process, in about a millisecond of the event loop's time.

In place of `asyncio.create_subprocess_exec`, which under uvloop copies the page tables of this
process and holds its loop meanwhile, the longer the more memory it has. `subprocess.Popen` uses
vfork. Standard streams are socket pairs, as those of uvloop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from asyncio import StreamReader, StreamReaderProtocol, StreamWriter
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import PIPE

from forge.runtime.concurrency.futures import settle


class ChildProcess:
    """A started process; has what `asyncio.subprocess.Process` has of the same names."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.pid = popen.pid
        self.stdin: StreamWriter | None = None
        self.stdout: StreamReader | None = None
        self.stderr: StreamReader | None = None
        self._popen = popen
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._observe()

    @property
    def returncode(self) -> int | None:
        """The exit code; negative: the number of the signal that ended it; None: it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Wait for the end; return the exit code."""
        return await asyncio.shield(self._ended)

    async def communicate(self) -> tuple[bytes, bytes]:
        """Read standard output and standard error to their ends, then wait; return both."""
        output, errors, _ = await asyncio.gather(
            _rest(self.stdout), _rest(self.stderr), self.wait()
        )
        return output, errors

    def kill(self) -> None:
        """Send SIGKILL, if it runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _observe(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            descriptor = os.pidfd_open(self.pid)
        except (OSError, AttributeError):
            # Linux before 5.3, and other kernels.
            threading.Thread(target=self._await_end, args=(loop,), daemon=True).start()
            return

        def end() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            settle(self._ended, self._popen.wait())

        loop.add_reader(descriptor, end)

    def _await_end(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._popen.wait()
        # The loop may have ended before.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, self._ended, code)


async def start(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    start_new_session: bool = False,
    pass_fds: Collection[int] = (),
) -> ChildProcess:
    """Start a program; the arguments are those of `subprocess.Popen`. Raises OSError."""
    own: dict[int, socket.socket] = {}
    with ExitStack() as theirs, ExitStack() as on_error:
        streams: list[int | None] = []
        for number, asked in enumerate((stdin, stdout, stderr)):
            if asked == PIPE:
                own[number], their = map(on_error.enter_context, socket.socketpair())
                streams.append(theirs.enter_context(their).fileno())
            else:
                streams.append(asked)
        child = ChildProcess(
            _started(
                words,
                streams,
                env=env,
                cwd=cwd,
                start_new_session=start_new_session,
                pass_fds=tuple(pass_fds),
            )
        )
        on_error.callback(child.kill)
        child.stdin = await _writer(own.get(0))
        child.stdout = await _reader(own.get(1))
        child.stderr = await _reader(own.get(2))
        on_error.pop_all()
    return child


def _started(
    words: tuple[str, ...],
    streams: list[int | None],
    *,
    env: Mapping[str, str] | None,
    cwd: str | Path | None,
    start_new_session: bool,
    pass_fds: tuple[int, ...],
) -> subprocess.Popen[bytes]:
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        words,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        cwd=cwd,
        start_new_session=start_new_session,
        pass_fds=pass_fds,
    )


class _Stream(StreamReaderProtocol):
    """Closes the socket when the child has closed its end."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


async def _reader(own: socket.socket | None) -> StreamReader | None:
    if own is None:
        return None
    reader = StreamReader()
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: _Stream(reader), sock=own)
    return reader


async def _writer(own: socket.socket | None) -> StreamWriter | None:
    if own is None:
        return None
    loop = asyncio.get_running_loop()
    made = await loop.create_unix_connection(lambda: _Stream(StreamReader()), sock=own)
    transport, protocol = made
    return StreamWriter(transport, protocol, None, loop)


async def _rest(reader: StreamReader | None) -> bytes:
    return b"" if reader is None else await reader.read()
