"""The process that writes the tensors of checkpoints, beside training.

    python -m services.trainer.checkpoint.writer

Owns the bytes of safetensors files, their digests and `fsync`. It does not own names, rename and
record: the trainer does these once the files are durable. An order comes through the socket that is
stdin, with a descriptor of the memory that has the tensors. The process reads this memory in pieces
and maps none of it. It ends when the trainer closes the socket or dies, also in the middle of an
order. It does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

_PIECE_BYTES = 1 << 22
_COUNT_BYTES = 8
"""Bytes of the length before each message."""
_ALIGNED_BYTES = 8
"""The data of a safetensors file begins at a multiple of it."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in shared memory: contiguous, little-endian."""

    name: str
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class TensorFile(msgspec.Struct, frozen=True, kw_only=True):
    """A safetensors file to write."""

    name: str
    """Relative to the checkpoint."""
    tensors: list[Place]
    about: dict[str, str] = {}
    """Metadata of the header."""
    digested: list[Place] | None = None
    """Tensors with the digest in the answer, in this order; None: the digest is of the file."""


class FileOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Files to write into one directory."""

    directory: str
    files: list[TensorFile]


class WrittenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is durable."""

    name: str
    """Relative to the checkpoint."""
    size_bytes: int
    sha256: str
    """Digest of the tensors that its `TensorFile` names, or of the file."""


class FileAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The files of an order, or the error that ended it."""

    files: list[WrittenFile] = []
    error_number: int = 0
    error: str = ""


def main() -> None:
    """Carry out orders until the trainer closes the socket."""
    # systemd sends these to all processes of a service; the last checkpoint must still be written.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    trainer = socket.socket(fileno=sys.stdin.fileno())
    threading.Thread(target=_end_with, args=(trainer,), daemon=True).start()
    while (received := receive(trainer)) is not None:
        message, (memory,) = received
        answer = _carried_out(msgspec.json.decode(message, type=FileOrder), memory)
        os.close(memory)
        send(trainer, msgspec.json.encode(answer))


def _end_with(trainer: socket.socket) -> None:
    """End this process once the trainer has closed its end, also in the middle of an order."""
    poll = select.poll()
    poll.register(trainer, select.POLLHUP)
    poll.poll()
    os._exit(0)


def _carried_out(order: FileOrder, memory: int) -> FileAnswer:
    directory = Path(order.directory)
    try:
        return FileAnswer(files=[write_file(one, directory, memory) for one in order.files])
    except OSError as error:
        return FileAnswer(error_number=error.errno or 0, error=error.strerror or str(error))


def write_file(file: TensorFile, directory: Path, memory: int) -> WrittenFile:
    """Write a file of tensors in the memory of a descriptor, durably. Raises `OSError`."""
    header, tensors = layout(file.tensors, file.about)
    digest = hashlib.sha256(header)
    with (directory / file.name).open("wb") as opened:
        opened.write(header)
        for piece in _pieces(tensors, memory):
            opened.write(piece)
            if file.digested is None:
                digest.update(piece)
        opened.flush()
        os.fsync(opened.fileno())
        size_bytes = opened.tell()
    if file.digested is not None:
        digest = hashlib.sha256()
        for piece in _pieces(file.digested, memory):
            digest.update(piece)
    return WrittenFile(name=file.name, size_bytes=size_bytes, sha256=digest.hexdigest())


def layout(tensors: Iterable[Place], about: dict[str, str]) -> tuple[bytes, list[Place]]:
    """The header of a safetensors file and its tensors in the order of their data, as the
    safetensors package writes them: the widest types first, then by name."""
    ordered = sorted(tensors, key=lambda one: (-_NARROWEST_FIRST.index(one.dtype), one.name))
    fields: dict[str, object] = {"__metadata__": about} if about else {}
    end = 0
    for one in ordered:
        begin, end = end, end + one.size_bytes
        fields[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    return len(text).to_bytes(8, "little") + text, ordered


_NARROWEST_FIRST = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3"),
    *("I16", "F16", "BF16"),
    *("I32", "F32"),
    *("F64", "I64"),
)


def _pieces(tensors: Sequence[Place], memory: int) -> Iterator[memoryview]:
    """The bytes of tensors; each piece is valid until the next."""
    buffer = memoryview(bytearray(_PIECE_BYTES))
    for one in tensors:
        done = 0
        while done < one.size_bytes:
            piece = buffer[: min(_PIECE_BYTES, one.size_bytes - done)]
            count = os.preadv(memory, [piece], one.offset + done)
            if not count:
                raise OSError(0, f"the shared memory ends within {one.name}")
            yield piece[:count]
            done += count


def send(connection: socket.socket, message: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message and descriptors. Raises `OSError`."""
    socket.send_fds(connection, [len(message).to_bytes(_COUNT_BYTES, "little")], descriptors)
    connection.sendall(message)


def receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """The next message and its descriptors; None once the other end is closed. Raises
    `OSError`."""
    count, descriptors, *_ = socket.recv_fds(connection, _COUNT_BYTES, 1)
    left = int.from_bytes(count, "little")
    parts: list[bytes] = []
    while left and (part := connection.recv(min(left, _PIECE_BYTES))):
        parts.append(part)
        left -= len(part)
    return None if left or not count else (b"".join(parts), descriptors)


if __name__ == "__main__":
    main()
