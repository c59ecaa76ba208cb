"""A weight version as files that all ranks read.

Owns the buckets and their place. The update itself is the engine's.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from forge.core.errors import ResourceExhausted
from forge.core.named_tensor import NamedTensor

_ALIGNMENT = 256
"""Tensors begin at multiples of this, so that a rank may view them in any type."""
_SLACK = 1 << 24


@contextmanager
def staged(
    tensors: Mapping[str, NamedTensor], *, directory: str, bucket_bytes: int
) -> Iterator[list[dict[str, Any]]]:
    """Write the buckets; yield their part of a `Plan`; remove them at the end.

    Raises `ResourceExhausted` if `directory` has too little room.
    """
    total = sum(memoryview(tensor.data).nbytes for tensor in tensors.values())
    free = shutil.disk_usage(directory).free
    if free < total + _SLACK:
        raise ResourceExhausted(
            f"tensorrt_llm.update_dir = {directory!r} has {free >> 20} MiB free, an update needs "
            f"{(total + _SLACK) >> 20} MiB"
        )
    folder = Path(directory) / f"forge-weights-{os.getpid()}-{secrets.token_hex(4)}"
    folder.mkdir(mode=0o700)
    try:
        yield [
            _write(folder / f"bucket-{number:04d}", bucket)
            for number, bucket in enumerate(_buckets(tensors.values(), bucket_bytes))
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _buckets(
    tensors: Sequence[NamedTensor] | Any, bucket_bytes: int
) -> Iterator[list[NamedTensor]]:
    bucket: list[NamedTensor] = []
    size = 0
    for tensor in tensors:
        length = memoryview(tensor.data).nbytes
        if bucket and size + length > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += length
    if bucket:
        yield bucket


def _write(path: Path, bucket: Sequence[NamedTensor]) -> dict[str, Any]:
    data = bytearray()
    layout = []
    for tensor in bucket:
        data += bytes(-len(data) % _ALIGNMENT)
        size = memoryview(tensor.data).nbytes
        layout.append([tensor.name, tensor.dtype, list(tensor.shape), len(data), size])
        data += tensor.data
    # An empty file cannot be mapped.
    path.write_bytes(data or b"\0")
    return {
        "path": str(path),
        "digest": xxh3_64_hexdigest(bytes(data or b"\0")),
        "tensors": layout,
    }
