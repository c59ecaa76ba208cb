"""Tests: tensors in files, and how a rank reads them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from forge.core.errors import ResourceExhausted
from services.inference.engines.tensor_bytes import to_named
from services.inference.engines.tensorrt_llm.metrics import STAGED_BYTES
from services.inference.engines.tensorrt_llm.weights.buckets import needed_bytes, opened
from services.inference.engines.tensorrt_llm.weights.worker_extension import (
    WorkerExtension,
    _read,
    _tensors,
)

TENSORS = {
    "byte": torch.tensor([7], dtype=torch.uint8),
    "odd": torch.arange(5, dtype=torch.bfloat16),
    "none": torch.empty(0, 3),
    "scalar": torch.tensor(3.5),
    "large": torch.arange(999, dtype=torch.float32).view(3, 333),
    "last": torch.arange(4).view(2, 2),
}
NAMED = [to_named(name, one) for name, one in TENSORS.items()]


def test_rank_reads_the_bits_of_all_tensors(tmp_path: Path) -> None:
    """Of all types and sizes; one above the size of a bucket has a bucket of its own."""
    found: dict[str, torch.Tensor] = {}
    with opened(str(tmp_path), bucket_bytes=64, needed_bytes=0) as folder:
        names = []
        for bucket in folder.write(NAMED):
            names.append([row[0] for row in bucket["tensors"]])
            found |= _tensors(_read(bucket), bucket["tensors"], 0)
            folder.remove(bucket)
        assert STAGED_BYTES._value.get() == 0
    assert names == [["byte", "odd", "none", "scalar"], ["large"], ["last"]]
    assert found.keys() == TENSORS.keys()
    for name, one in found.items():
        assert (one.dtype, one.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
        assert torch.equal(one, TENSORS[name])
    assert not [*tmp_path.iterdir()]


def test_damaged_file_is_named(tmp_path: Path) -> None:
    """Other bytes, or fewer."""
    rank = WorkerExtension()
    with opened(str(tmp_path), bucket_bytes=1 << 20, needed_bytes=0) as folder:
        (bucket,) = folder.write(NAMED)
        assert rank.check_forge_bucket(bucket) == ""
        file = Path(bucket["path"])
        content = file.read_bytes()
        for damaged in (content[:-1], content[:-1] + b"\x55"):
            file.write_bytes(damaged)
            assert "bucket-0000 has" in rank.check_forge_bucket(bucket)
        file.unlink()
        assert "No such file" in rank.check_forge_bucket(bucket)


def test_directory_that_fills_up_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a bucket is written, before any byte of it: a mapping of it would kill a rank."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(str(tmp_path), bucket_bytes=64, needed_bytes=0) as folder:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ResourceExhausted, match=r"update_dir: .*No space left"):
            next(folder.write(NAMED))
        assert not [*tmp_path.rglob("bucket-*")]
        assert STAGED_BYTES._value.get() == 0


def test_room_is_that_of_two_buckets() -> None:
    """Or of all tensors, if they are fewer; the largest tensor may be above a bucket."""
    sizes = [len(one.data) for one in NAMED]
    assert needed_bytes(sizes, bucket_bytes=1 << 30) < 8192
    assert 2 * 3996 < needed_bytes(sizes * 5, bucket_bytes=64) < 2 * 3996 + 1024
