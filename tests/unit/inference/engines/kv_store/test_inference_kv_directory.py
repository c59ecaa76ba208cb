"""The bound of the KV store's directory, with many writers, a busy lock and killed writers."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.inference.engines.kv_store import block_file, directory
from services.inference.engines.kv_store.directory import BlockDirectory
from services.inference.engines.kv_store.metrics import BLOCKS, RECREATIONS

MODEL = b"m" * 16
BLOCK = 1000
"""Bytes of the file of a block: 64 are its header."""
CONTENT = bytes(BLOCK - 64)
MOST = 50 * BLOCK

WRITER = """
import sys
from tests.unit.inference.engines.kv_store.test_inference_kv_directory import *
write(BlockDirectory(Path(sys.argv[1]), max_bytes=MOST), range(int(sys.argv[2]), int(sys.argv[3])))
"""


def write(into: BlockDirectory, numbers: range) -> None:
    for number in numbers:
        into.write(MODEL, number.to_bytes(16, "big"), CONTENT)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    with (root / ".evicting").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def size_of(root: Path) -> int:
    """Bytes of all blocks, finished or not."""
    return sum(
        Path(folder, name).stat().st_size
        for folder, _, names in os.walk(root)
        for name in names
        if name != ".evicting"
    )


@pytest.mark.parametrize("writers", [1, 4, 40])
def test_bound_holds_for_any_number_of_writers(tmp_path: Path, writers: int) -> None:
    """After each block, however many processes write; the newest blocks are kept."""
    open_ones = [BlockDirectory(tmp_path, max_bytes=MOST) for _ in range(writers)]
    for number in range(200):
        write(open_ones[number % writers], range(number, number + 1))
        assert size_of(tmp_path) <= MOST
    assert all(open_ones[0].has(MODEL, n.to_bytes(16, "big")) for n in range(170, 200))
    for one in open_ones:
        one.close()


def test_bound_holds_at_every_moment_while_processes_write(tmp_path: Path) -> None:
    """Four processes write the same and other blocks at once; under the directory's lock, where no
    file comes or goes, the size is within the bound each time."""
    BlockDirectory(tmp_path, max_bytes=MOST).close()
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(n * 150), str(600)])
        for n in range(4)
    ]
    most = 0
    while any(one.poll() is None for one in writers):
        with locked(tmp_path):
            most = max(most, size_of(tmp_path))
    assert [one.returncode for one in writers] == [0] * 4
    assert 0.8 * MOST < most <= MOST
    assert not list(tmp_path.glob(".*.tmp"))


def test_busy_lock_drops_blocks_and_keeps_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen process has it: the others write nothing until it is free, and count what they
    drop."""
    monkeypatch.setattr(directory, "LOCK_S", 0.01)
    store = BlockDirectory(tmp_path, max_bytes=MOST)
    write(store, range(45))
    before = BLOCKS.labels("dropped")._value.get()
    with locked(tmp_path):
        write(store, range(100, 110))
        assert size_of(tmp_path) == 45 * BLOCK
    assert BLOCKS.labels("dropped")._value.get() == before + 10
    write(store, range(100, 110))
    assert size_of(tmp_path) <= MOST
    store.close()


def test_unfinished_block_of_a_killed_writer_counts_until_it_is_abandoned(tmp_path: Path) -> None:
    """It is within the bound like a block; later it is removed, and its room is used again."""
    store = BlockDirectory(tmp_path, max_bytes=MOST)
    killed = tmp_path / ".0.tmp"
    killed.write_bytes(bytes(20 * BLOCK))
    write(store, range(100))
    assert killed.exists()
    assert size_of(tmp_path) <= MOST
    os.utime(killed, (0, 0))
    write(store, range(100, 200))
    assert not killed.exists()
    assert 40 * BLOCK <= size_of(tmp_path) <= MOST
    store.close()


def test_directory_of_an_earlier_release_is_measured_first(tmp_path: Path) -> None:
    """Its lock file is empty, and it may have grown above the bound."""
    store = BlockDirectory(tmp_path, max_bytes=10 * MOST)
    write(store, range(120))
    store.close()
    (tmp_path / ".evicting").write_bytes(b"")
    store = BlockDirectory(tmp_path, max_bytes=MOST)
    write(store, range(120, 121))
    assert size_of(tmp_path) <= MOST
    assert store.read(MODEL, (120).to_bytes(16, "big")) is not None
    store.close()


def test_damaged_blocks_leave_room_again(tmp_path: Path) -> None:
    """A reader removes them; the size that counts them is corrected before good blocks go."""
    store = BlockDirectory(tmp_path, max_bytes=MOST)
    write(store, range(50))
    rng = random.Random(0)
    for number in rng.sample(range(50), 20):
        path = store._path(MODEL, number.to_bytes(16, "big"))
        path.write_bytes(bytes(BLOCK))
        assert store.read(MODEL, number.to_bytes(16, "big")) is None
    evicted = BLOCKS.labels("evicted")._value.get()
    write(store, range(100, 120))
    assert BLOCKS.labels("evicted")._value.get() == evicted
    assert size_of(tmp_path) == MOST
    store.close()


def test_block_above_the_bound_evicts_nothing(tmp_path: Path) -> None:
    """It is counted as failed, and the others stay."""
    store = BlockDirectory(tmp_path, max_bytes=MOST)
    write(store, range(50))
    failed = BLOCKS.labels("failed")._value.get()
    store.write(MODEL, bytes(16), bytes(MOST))
    assert BLOCKS.labels("failed")._value.get() == failed + 1
    assert size_of(tmp_path) == MOST
    store.close()


def test_block_that_cannot_be_marked_as_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is of another user, or the file system takes no writes any more."""
    store = BlockDirectory(tmp_path, max_bytes=MOST)
    write(store, range(1))
    os.utime(store._path(MODEL, bytes(16)), (0, 0))

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert bytes(store.read(MODEL, bytes(16)) or b"") == CONTENT
    monkeypatch.undo()
    store.close()


def test_file_that_cannot_be_removed_stops_no_eviction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts, and newer blocks go in its place."""
    store = BlockDirectory(tmp_path, max_bytes=MOST)
    write(store, range(50))
    kept = store._path(MODEL, bytes(16))
    os.utime(kept, (0, 0))
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == kept:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    write(store, range(100, 120))
    assert store.read(MODEL, (119).to_bytes(16, "big")) is not None
    assert kept.exists()
    assert size_of(tmp_path) <= MOST
    store.close()


def test_full_disk_keeps_the_newest_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk smaller than the bound: blocks of earlier weights would fill it for ever."""
    store = BlockDirectory(tmp_path, max_bytes=MOST)
    whole = block_file.write_block

    def write_block(path: Path, content: bytes, **names: bytes) -> None:
        if size_of(tmp_path) > 20 * BLOCK:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(path, content, **names)

    monkeypatch.setattr(directory, "write_block", write_block)
    for number in range(100):
        write(store, range(number, number + 1))
        if (path := store._path(MODEL, number.to_bytes(16, "big"))).exists():
            os.utime(path, (number, number))
    found = [n for n in range(100) if store.read(MODEL, n.to_bytes(16, "big")) is not None]
    assert len(found) >= 15
    assert min(found) >= 70
    assert size_of(tmp_path) <= 20 * BLOCK
    store.close()


def test_clock_of_a_host_abandons_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be hours ahead of the file server's, and of the writer's."""
    store = BlockDirectory(tmp_path, max_bytes=MOST)
    unfinished = tmp_path / ".0.tmp"
    unfinished.write_bytes(bytes(BLOCK))
    ahead_s = time.time() + 10 * directory._ABANDONED_S
    monkeypatch.setattr(time, "time", lambda: ahead_s)
    write(store, range(100))
    assert unfinished.exists()
    store.close()


def test_deleted_directory_is_made_again(tmp_path: Path) -> None:
    """Each open directory writes again, with one count each, and all of them share one bound."""
    root = tmp_path / "store"
    first, second = (BlockDirectory(root, max_bytes=MOST) for _ in range(2))
    write(first, range(10))
    before = RECREATIONS._value.get()
    shutil.rmtree(root)
    for number in range(60):
        write((first, second)[number % 2], range(number, number + 1))
    assert RECREATIONS._value.get() == before + 2
    newest = first.read(MODEL, (59).to_bytes(16, "big"))
    assert newest is not None and bytes(newest) == CONTENT
    assert 0 < size_of(root) <= MOST
    assert second._read_size() == size_of(root)
