"""A weight version as files that all ranks read, a few at a time.

Owns the files and their place. The update itself is `weight_update`'s.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from xxhash import xxh3_64

from forge.core.errors import ResourceExhausted
from forge.core.named_tensor import NamedTensor
from forge.runtime.files.write_at import write_at
from forge.runtime.rpc.chunks import chunked
from services.inference.engines.tensorrt_llm.metrics import STAGED_BYTES

MIB = 1 << 20
AT_ONCE = 2
"""Buckets that exist at the same time: ranks load one while the next one is written."""
_ALIGNMENT = 256
"""Tensors begin at multiples of this, so that a rank may view them in any type."""
_PIECE_BYTES = 1 << 20
_SLACK_BYTES = 1 << 24

Bucket = Mapping[str, Any]
"""path, bytes, digest, and tensors: each as name, dtype, shape, offset and bytes."""


class Buckets:
    """The folder of one update."""

    def __init__(self, folder: Path, *, bucket_bytes: int) -> None:
        self._folder = folder
        self._bucket_bytes = bucket_bytes
        self._sizes: dict[str, int] = {}
        """Bytes of each file."""

    def write(self, tensors: Iterable[NamedTensor]) -> Iterator[Bucket]:
        """Write a bucket at each step. A tensor above the size of a bucket has its own. Raises
        `ResourceExhausted` for a full directory."""
        buckets = chunked(tensors, size_of=_size, max_bytes=self._bucket_bytes)
        for number, bucket in enumerate(buckets):
            yield self._written(number, bucket)

    def remove(self, bucket: Bucket) -> None:
        """Remove the file of a bucket."""
        Path(bucket["path"]).unlink(missing_ok=True)
        STAGED_BYTES.dec(self._sizes.pop(bucket["path"]))

    def close(self) -> None:
        """Remove all files."""
        shutil.rmtree(self._folder, ignore_errors=True)
        STAGED_BYTES.dec(sum(self._sizes.values()))
        self._sizes.clear()

    def _written(self, number: int, bucket: list[NamedTensor]) -> Bucket:
        path = self._folder / f"bucket-{number:04d}"
        starts: list[int] = []
        end = 0
        for tensor in bucket:
            starts.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = starts[-1] + _size(tensor)
        # An empty file cannot be mapped.
        size = max(1, end)
        try:
            digest = _fill(path, size, zip(starts, bucket, strict=True))
        except OSError as error:
            with suppress(FileNotFoundError):
                path.unlink()
            raise ResourceExhausted(f"tensorrt_llm.update_dir: {error}") from error
        self._sizes[str(path)] = size
        STAGED_BYTES.inc(size)
        layout = [
            [tensor.name, tensor.dtype, list(tensor.shape), start, _size(tensor)]
            for start, tensor in zip(starts, bucket, strict=True)
        ]
        return {"path": str(path), "bytes": size, "digest": digest, "tensors": layout}


@contextmanager
def opened(directory: str, *, bucket_bytes: int, needed_bytes: int) -> Iterator[Buckets]:
    """Make a folder for an update; remove it at the end. Raises `ResourceExhausted` if `directory`
    has no room for `needed_bytes`."""
    free = shutil.disk_usage(directory).free
    if free < needed_bytes + _SLACK_BYTES:
        raise ResourceExhausted(
            f"tensorrt_llm.update_dir = {directory!r} has {free // MIB} MiB free, an update needs "
            f"{(needed_bytes + _SLACK_BYTES) // MIB} MiB"
        )
    folder = Path(directory) / f"forge-weights-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    buckets = Buckets(folder, bucket_bytes=bucket_bytes)
    try:
        yield buckets
    finally:
        buckets.close()


def needed_bytes(tensor_bytes: Iterable[int], *, bucket_bytes: int) -> int:
    """Return the room that the buckets of an update take at most."""
    sizes = [size + _ALIGNMENT for size in tensor_bytes]
    largest = max([*sizes, bucket_bytes])
    return min(sum(sizes), AT_ONCE * largest)


def _fill(path: Path, size: int, placed: Iterable[tuple[int, NamedTensor]]) -> str:
    """Write a file; return its digest."""
    digest, end = xxh3_64(), 0
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Reserves the room: a full directory is an error here, and no fault in a rank.
        os.posix_fallocate(opened, 0, size)
        for start, tensor in placed:
            digest.update(bytes(start - end))
            view = memoryview(tensor.data).cast("B")
            for at in range(0, len(view), _PIECE_BYTES):
                piece = view[at : at + _PIECE_BYTES]
                digest.update(piece)
                write_at(opened, piece, start + at)
            end = start + len(view)
        digest.update(bytes(size - end))
    finally:
        os.close(opened)
    return digest.hexdigest()


def _size(tensor: NamedTensor) -> int:
    return memoryview(tensor.data).nbytes
