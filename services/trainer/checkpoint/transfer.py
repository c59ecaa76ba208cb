"""A checkpoint between hosts: read in pieces here, assembled and verified there.

Owns the bytes of both ends, without calls. The sender's pruning spares a
checkpoint that is being sent. The receiver assembles under a
name that is no checkpoint's, across restarts too, and renames the complete and verified directory.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from forge.core.errors import DataLoss, NotFound, ResourceExhausted
from forge.runtime.files.sync import sync
from forge.v1 import trainer_pb2 as pb
from services.trainer.checkpoint.files import STATE_FILE
from services.trainer.checkpoint.retention import CheckpointRetention
from services.trainer.checkpoint.store import (
    checkpoints_in,
    path_of,
    prune,
    put_in_place,
    read_checkpoint,
)

PIECE_BYTES = 1 << 20
_STAGING = "fetched-"


def pieces(
    directory: Path, request: pb.FetchCheckpointRequest
) -> Generator[pb.FetchCheckpointResponse, None, None]:
    """The answer to a request. Raises `NotFound` and `DataLoss`; `NotFound` in the middle, too, if
    the checkpoint is set aside. One file is open at a time: many ranks write many files."""
    path = path_of(directory, request.step)
    try:
        checkpoint = read_checkpoint(path)
        state = (path / STATE_FILE).read_bytes()
    except FileNotFoundError:
        raise _gone(request.step) from None
    except DataLoss:
        if path.exists():
            raise
        raise _gone(request.step) from None
    sizes: dict[str, int] = dict(json.loads(state)["files"])
    files = [*sorted(sizes.items()), (STATE_FILE, len(state))]
    begin = pb.FetchCheckpointResponse.Begin(lineage=checkpoint.lineage)
    for name, size in files:
        begin.files.add(path=name, size_bytes=size)
    yield pb.FetchCheckpointResponse(begin=begin)
    for name, size in files:
        try:
            file = (path / name).open("rb")
        except FileNotFoundError:
            raise _gone(request.step) from None
        with file:
            for piece in _pieces_of(name, file, size, have=request.have.get(name, 0)):
                yield pb.FetchCheckpointResponse(piece=piece)


def _gone(step: int) -> NotFound:
    return NotFound(f"there is no checkpoint of step {step} here")


def _pieces_of(
    name: str, file: BinaryIO, size: int, *, have: int
) -> Iterator[pb.FetchCheckpointResponse.Piece]:
    digest = hashlib.sha256()
    offset = 0
    while offset < min(have, size):
        offset += _hashed(file, digest, min(have, size) - offset)[0]
    while True:
        count, data = _hashed(file, digest, size - offset)
        last = offset + count >= size
        yield pb.FetchCheckpointResponse.Piece(
            path=name,
            offset=offset,
            data=data,
            crc32=zlib.crc32(data),
            sha256=digest.digest() if last else b"",
        )
        offset += count
        if last:
            return


def _hashed(file: BinaryIO, digest: hashlib._Hash, left: int) -> tuple[int, bytes]:
    data = file.read(min(PIECE_BYTES, left))
    if not data and left:
        raise DataLoss(f"{file.name} became shorter")
    digest.update(data)
    return len(data), data


class Staging:
    """A checkpoint that arrives."""

    def __init__(
        self,
        directory: Path,
        *,
        step: int,
        fingerprint: str,
        retention: CheckpointRetention = CheckpointRetention(),  # noqa: B008
    ) -> None:
        """`fingerprint`: of the complete checkpoint; "" from an earlier release."""
        self._directory = directory
        self._retention = retention
        self._step = step
        self._fingerprint = fingerprint
        # With the fingerprint: the same step may have another checkpoint after a rewind.
        self._path = directory / f"{_STAGING}{step:08d}-{fingerprint[:16]}"
        self._sizes: dict[str, int] = {}
        self._left: set[str] = set()

    def begin(self) -> Mapping[str, int]:
        """Bytes of each file that earlier attempts have stored; removes other arrivals."""
        for other in self._directory.glob(f"{_STAGING}*"):
            if other != self._path:
                shutil.rmtree(other, ignore_errors=True)
        self._path.mkdir(parents=True, exist_ok=True)
        return {
            str(file.relative_to(self._path)): file.stat().st_size
            for file in self._path.rglob("*")
            if file.is_file()
        }

    def add(self, response: pb.FetchCheckpointResponse) -> None:
        """Store a response. Raises `DataLoss`: then fetch again, from what `begin` returns."""
        if response.HasField("begin"):
            self._sizes = {file.path: file.size_bytes for file in response.begin.files}
            self._left = set(self._sizes)
            for name in self._sizes:
                self._file(name)
            return
        try:
            self._write(response.piece)
        except OSError as error:
            raise ResourceExhausted(f"{self._path}: {error.strerror or error}") from error

    def _write(self, piece: pb.FetchCheckpointResponse.Piece) -> None:
        if piece.path not in self._sizes:
            raise DataLoss(f"{piece.path!r} is not among the files of the checkpoint")
        if zlib.crc32(piece.data) != piece.crc32:
            raise DataLoss(f"{piece.path}: a piece at {piece.offset} arrived damaged")
        path = self._file(piece.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if (expected := file.tell()) != piece.offset:
                file.truncate(0)
                raise DataLoss(f"{piece.path}: expected offset {expected}, got {piece.offset}")
            file.write(piece.data)
        if piece.sha256:
            self._verify(piece.path, path, piece.sha256)

    def _verify(self, name: str, path: Path, sha256: bytes) -> None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").digest()
        if found != sha256 or path.stat().st_size != self._sizes[name]:
            path.unlink()
            raise DataLoss(f"{name} arrived with another digest")
        sync(path)
        self._left.discard(name)

    def _file(self, name: str) -> Path:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise DataLoss(f"{name!r} is not a path in a checkpoint")
        return self._path / parts

    def complete(self) -> Path:
        """Rename it to the checkpoint. Raises `DataLoss` if it is not the whole one."""
        if self._left or not self._sizes:
            raise DataLoss(f"{len(self._left)} files of the checkpoint did not arrive")
        found = read_checkpoint(self._path)
        if found.step != self._step or self._fingerprint not in ("", found.fingerprint):
            shutil.rmtree(self._path)
            raise DataLoss(
                f"the copy is not the checkpoint of step {self._step} in etcd: its step or "
                "fingerprint differs"
            )
        path = path_of(self._directory, self._step)
        put_in_place(self._path, path)
        prune(self._directory, self._retention)
        return path


def is_current(directory: Path, *, step: int, lineage: str, fingerprint: str) -> bool:
    """Whether the newest checkpoint here is this one or a later one; also if it is of another
    lineage: an operator removes that. After a rewind a step may have another checkpoint."""
    found = checkpoints_in(directory)
    if not found:
        return False
    try:
        newest = read_checkpoint(found[-1])
    except DataLoss:
        return found[-1] == path_of(directory, step)
    if newest.step == step and newest.lineage == lineage:
        return fingerprint in ("", newest.fingerprint)
    return newest.step >= step or newest.lineage != lineage
