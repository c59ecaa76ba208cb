"""Tests: blocks of keys and values as bytes, written and loaded as in vLLM's processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forge.core.errors import DataLoss
from services.inference.engines.vllm.exchange.kv_format import (
    block_bytes,
    checked,
    fingerprint_of,
    layout_of,
    load_blocks,
    write_blocks,
)
from services.inference.engines.vllm.exchange.shared_memory import Address, SharedMemory


def caches(*, heads: int = 2) -> dict[str, torch.Tensor]:
    """Blocks of two layers, of two types."""
    drawn = torch.Generator().manual_seed(0)
    return {
        "first": torch.rand(6, heads, 4, 8, generator=drawn),
        "second": torch.rand(6, heads, 4, 8, generator=drawn).to(torch.bfloat16),
    }


def address(file: Path) -> Address:
    """As if the file were memory of the worker."""
    return str(file), file.stat().st_ino


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Three blocks."""
    found = tmp_path / "kv"
    found.touch()
    write_blocks(address(found), caches(), [4, 0, 2])
    return found


def test_blocks_are_loaded_bit_for_bit_where_they_are_wanted(file: Path) -> None:
    """All but those that the prefix cache has; others stay as they are."""
    source, target = caches(), {name: torch.zeros_like(one) for name, one in caches().items()}
    load_blocks(address(file), target, [5, 1], skipped=1)
    for name, one in source.items():
        assert torch.equal(target[name][5], one[0])
        assert torch.equal(target[name][1], one[2])
        assert not target[name][[0, 2, 3, 4]].any()


@pytest.mark.parametrize("place", [0, 30, -1])
def test_each_changed_byte_is_found(file: Path, place: int) -> None:
    """In the length, the header and the blocks."""
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    with pytest.raises(DataLoss):
        checked(memoryview(data))


def test_missing_bytes_and_other_layouts_are_refused(file: Path) -> None:
    """Nothing of them is loaded."""
    whole = file.read_bytes()
    for data in (b"", b"no header", whole[:-1], whole + b"\0"):
        with pytest.raises(DataLoss):
            checked(memoryview(data))
    with pytest.raises(DataLoss):
        load_blocks(address(file), caches(heads=4), [0], skipped=0)
    with pytest.raises(DataLoss):
        load_blocks(address(file), caches(), [0, 1, 2, 3], skipped=0)


def test_fingerprint_tells_models_and_layouts_apart() -> None:
    """Equal for equal ones."""
    layout = layout_of(caches())
    assert block_bytes(layout) == 2 * 4 * 8 * (4 + 2)
    names = {fingerprint_of(layout, model=model) for model in ("one", "other")}
    names.add(fingerprint_of(layout_of(caches(heads=4)), model="one"))
    assert len(names) == 3
    assert fingerprint_of(layout_of(caches()), model="one") in names


@pytest.fixture
def reused() -> Iterator[tuple[Address, SharedMemory]]:
    """The address of an aborted request, whose path is that of the next request's memory."""
    aborted = SharedMemory("aborted")
    left = aborted.address
    aborted.close()
    following = SharedMemory("next")
    assert following.address[0] == left[0]
    yield left, following
    following.close()


def test_blocks_of_another_request_are_not_loaded(reused: tuple[Address, SharedMemory]) -> None:
    """vLLM loads for a request that the worker has ended; its descriptor is another request's."""
    left, following = reused
    write_blocks(following.address, caches(), [1, 2])
    target = {name: torch.zeros_like(one) for name, one in caches().items()}
    with pytest.raises(OSError, match="other memory"):
        load_blocks(left, target, [0, 1], skipped=0)
    assert not any(one.any() for one in target.values())


def test_blocks_are_not_written_into_the_memory_of_another_request(
    reused: tuple[Address, SharedMemory],
) -> None:
    """vLLM saves for a request that the worker has ended."""
    left, following = reused
    write_blocks(following.address, caches(), [1, 2])
    before = following.read(following.size)
    with pytest.raises(OSError, match="other memory"):
        write_blocks(left, caches(), [3, 4])
    assert following.read(following.size) == before
