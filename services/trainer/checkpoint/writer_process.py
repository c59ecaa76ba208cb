"""The trainer's end of the process that writes the tensors of checkpoints.

Owns the start of `services.trainer.checkpoint.writer`, its end and the exchange with it. Each
process of a trainer that writes a part of a checkpoint has one writer process.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from services.trainer.checkpoint import writer
from services.trainer.checkpoint.shared_memory import SharedMemory
from services.trainer.checkpoint.writer import FileAnswer, FileOrder, TensorFile, WrittenFile

_END_S = 5.0


class WriterProcess:
    """A process that starts with the first order, and again after a crash. It ends with this
    object, and with this process, even after SIGKILL."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: _Started | None = None

    @property
    def pid(self) -> int:
        """Id of the process; 0 before its start."""
        return self._started.process.pid if self._started is not None else 0

    def write(
        self, directory: Path, files: Sequence[TensorFile], memory: SharedMemory
    ) -> list[WrittenFile]:
        """Write files durably; their tensors are in `memory`. Orders of several threads wait for
        each other.

        Raises `OSError` when a file cannot be written, and when the process ends meanwhile.
        """
        order = FileOrder(directory=str(directory.absolute()), files=list(files))
        with self._lock:
            if self._started is None or self._started.process.poll() is not None:
                self._started = _Started()
            answer = self._started.ask(order, memory)
        if answer.error:
            raise OSError(answer.error_number, answer.error)
        return answer.files


class _Started:
    """One writer process."""

    def __init__(self) -> None:
        """Raises `OSError`."""
        self._connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", writer.__name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                # Ctrl-C reaches the trainer alone, whose last checkpoint follows. No session of its
                # own: Linux may give one as much CPU time as all of the trainer's.
                process_group=0,
            )
        weakref.finalize(self, _end, self._connection, self.process)

    def ask(self, order: FileOrder, memory: SharedMemory) -> FileAnswer:
        """Raises `OSError` when the process ends before its answer."""
        received = None
        with suppress(ConnectionError):
            writer.send(self._connection, msgspec.json.encode(order), [memory.descriptor])
            received = writer.receive(self._connection)
        if received is None:
            raise OSError(0, f"the process that writes checkpoints {_cause(self.process)}")
        return msgspec.json.decode(received[0], type=FileAnswer)


def _cause(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return "does not answer"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:  # the disk does not answer
        process.kill()
