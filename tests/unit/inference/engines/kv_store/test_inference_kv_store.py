"""The directory of a KV store: its bound, its rates, and many processes with planted damage."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from threading import Event, current_thread

import pytest

from forge.core.errors import ConfigError
from forge.core.token_columns import TOKEN_BYTES, int32_bytes
from services.inference.engines.kv_store.metrics import BLOCKS
from services.inference.engines.kv_store.store import KvStore
from services.inference.engines.provider import KvStoreOptions

TOKENS = 4
"""Tokens of a block."""
TOKEN = 256
"""Bytes of keys and values of a token."""
MODEL = b"m" * 16
PROCESSES = 4

WORKER = """
import random, sys
from tests.unit.inference.engines.kv_store.test_inference_kv_store import *
seed, directory = int(sys.argv[1]), sys.argv[2]
rng = random.Random(seed)
store = open_store(directory, max_bytes=60 * TOKENS * TOKEN)
read = rounds = 0
# A starved process writes late, and first reads what has been evicted or damaged.
while rounds < 150 or (not read and rounds < 20_000):
    rounds += 1
    ids = prompt(rng.randrange(12))
    found = blocks_of(store, ids)
    read += len(found)
    for start, content in found.items():
        assert content == content_of(ids, start, start + TOKENS), (seed, start)
    fill(store, ids)
store.close()
print(read)
"""


def open_store(directory: Path | str, **options: int) -> KvStore:
    chosen = {"max_bytes": 1 << 20, "block_tokens": TOKENS} | options
    store = KvStore(KvStoreOptions(directory=str(directory), **chosen), token_bytes=TOKEN)
    store.serve(MODEL)
    return store


def prompt(number: int, *, tokens: int = 40) -> bytes:
    """Every third prompt begins like the others of its kind."""
    return int32_bytes([number % 3] * (tokens // 2) + [number] * (tokens // 2))


def content_of(ids: bytes, start: int, end: int) -> bytes:
    """Bytes that all tokens up to `end` determine, as keys and values are."""
    rng = random.Random(ids[: end * TOKEN_BYTES])
    return rng.randbytes((end - start) * TOKEN)


def blocks_of(store: KvStore, ids: bytes, *, from_token: int = 0) -> dict[int, bytes]:
    """The stored blocks, by their first token."""
    found: dict[int, bytes] = {}

    def place(start: int, content: memoryview) -> bool:
        found[start] = bytes(content)
        return True

    tokens = len(ids) // TOKEN_BYTES
    places = {"from_token": from_token, "limit_tokens": tokens}
    present = store.read(ids, **places, place=place, identity=store.identity)
    assert present == max([from_token, *(start + TOKENS for start in found)])
    return found


def fill(store: KvStore, ids: bytes) -> None:
    store.write(ids, after_token=0, encode=lambda start, end: content_of(ids, start, end))


def files(directory: Path) -> list[Path]:
    # Folders may vanish meanwhile.
    return [
        Path(folder, name)
        for folder, _, names in os.walk(directory)
        for name in names
        if not name.startswith(".")
    ]


def test_blocks_are_shared_by_prefix_and_read_without_a_gap(tmp_path: Path) -> None:
    """Two prompts share the files of their common part; behind a missing block nothing is read."""
    store = open_store(tmp_path)
    fill(store, prompt(0))
    fill(store, prompt(3))
    store.close()
    assert len(files(tmp_path)) == 15
    store = open_store(tmp_path)
    assert list(blocks_of(store, prompt(3))) == list(range(0, 40, TOKENS))
    assert list(blocks_of(store, prompt(6))) == list(range(0, 20, TOKENS))
    # From the middle of a block: that block is placed again.
    assert list(blocks_of(store, prompt(0), from_token=30)) == [28, 32, 36]
    # By its name: two blocks may have one time.
    *_, fourth = store._chains(MODEL, prompt(0), 4 * TOKENS)
    store._directory._path(MODEL, fourth).unlink()
    assert list(blocks_of(store, prompt(0))) == [0, 4, 8]
    store.close()


def test_blocks_are_encoded_in_order_beside_the_caller(tmp_path: Path) -> None:
    """The caller waits for no copy; a block that cannot be encoded is missing, those behind it are
    written."""
    store, ids = open_store(tmp_path), prompt(0)
    may_encode = Event()
    encoded: list[int] = []

    def encode(start: int, end: int) -> bytes:
        assert current_thread().name == "kv-store"
        may_encode.wait()
        encoded.append(start)
        if start == 8:
            raise MemoryError
        return content_of(ids, start, end)

    failed = BLOCKS.labels("failed")._value.get()
    store.write(ids, after_token=0, encode=encode)
    assert not encoded
    may_encode.set()
    store.close()
    assert encoded == list(range(0, 40, TOKENS))
    assert BLOCKS.labels("failed")._value.get() == failed + 1
    store = open_store(tmp_path)
    assert list(blocks_of(store, ids)) == [0, 4]
    assert list(blocks_of(store, ids, from_token=12)) == list(range(12, 40, TOKENS))
    store.close()


def test_directory_stays_within_its_bound(tmp_path: Path) -> None:
    """The blocks that were used least recently go; an abandoned file of a dead writer goes, too."""
    most = 20 * TOKENS * TOKEN
    store = open_store(tmp_path, max_bytes=most)
    abandoned = tmp_path / ".0.tmp"
    abandoned.write_bytes(b"half")
    os.utime(abandoned, (0, 0))
    for number in range(30):
        fill(store, prompt(number))
    store.close()
    found = files(tmp_path)
    assert sum(path.stat().st_size for path in found) <= most
    assert not abandoned.exists()
    store = open_store(tmp_path, max_bytes=most)
    assert len(blocks_of(store, prompt(29))) == 10
    assert blocks_of(store, prompt(0)) == {}
    store.close()


def test_host_memory_serves_what_the_directory_has_lost(tmp_path: Path) -> None:
    """Its bound holds: only the newest blocks are left."""
    store = open_store(tmp_path, host_bytes=10 * TOKENS * TOKEN)
    fill(store, prompt(0))
    fill(store, prompt(1))
    store.close()
    for path in files(tmp_path):
        path.unlink()
    assert blocks_of(store, prompt(0)) == {}
    assert len(blocks_of(store, prompt(1))) == 10


def test_slow_reads_rest_but_for_trials(tmp_path: Path) -> None:
    """While computing is faster, one prompt in sixteen is read, so that a change is noticed."""
    store = open_store(tmp_path)
    fill(store, prompt(0))
    store.close()
    store = open_store(tmp_path)
    assert blocks_of(store, prompt(0))
    store.observe_compute(seconds=1e-12, tokens=10_000)
    assert sum(bool(blocks_of(store, prompt(0))) for _ in range(64)) == 4
    store.observe_compute(seconds=100, tokens=10_000)
    assert all(blocks_of(store, prompt(0)) for _ in range(4))
    store.close()


def test_full_queue_of_writes_drops_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow file system costs no memory and stops no worker."""
    monkeypatch.setattr("services.inference.engines.kv_store.store._PENDING_BYTES", 0)
    store = open_store(tmp_path)
    before = BLOCKS.labels("dropped")._value.get()
    fill(store, prompt(0))
    store.close()
    assert BLOCKS.labels("dropped")._value.get() == before + 1
    assert files(tmp_path) == []


def test_foreign_file_of_any_size_takes_no_memory(tmp_path: Path) -> None:
    """It is refused by its first bytes, and removed."""
    store = open_store(tmp_path)
    fill(store, prompt(0))
    store.close()
    path = next(one for one in tmp_path.rglob("*/*/*") if one.is_file())
    path.write_bytes(b"another file")
    os.truncate(path, 1 << 42)
    before = BLOCKS.labels("foreign")._value.get()
    store = open_store(tmp_path)
    found = blocks_of(store, prompt(0))
    store.close()
    assert len(found) < 10
    assert BLOCKS.labels("foreign")._value.get() == before + 1
    assert not path.exists()


def test_store_that_closes_keeps_the_lock_file_of_a_writer_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file may get its number, and the writer would write the size to that."""
    monkeypatch.setattr("services.inference.engines.kv_store.store._CLOSE_S", 0.01)
    store, go_on = open_store(tmp_path), Event()
    lock = store._directory._lock

    def encode(start: int, end: int) -> bytes:
        go_on.wait()
        return content_of(prompt(0), start, end)

    store.write(prompt(0), after_token=0, encode=encode)
    store.close()
    os.fstat(lock)
    go_on.set()
    store._writer.join()
    os.close(lock)


def test_directory_that_cannot_be_made_is_an_error_of_the_settings(tmp_path: Path) -> None:
    """It names the setting and the path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv\.store_dir = '.*file/kv': Not a directory"):
        open_store(tmp_path / "file" / "kv")


def test_processes_share_a_directory_in_which_files_are_damaged(tmp_path: Path) -> None:
    """Four write, read and evict at once while files are cut, flipped and swapped: what is read is
    right, each process ends well, and some blocks are shared."""
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(seed), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for seed in range(PROCESSES)
    ]
    rng = random.Random(1)
    damaged = 0
    while any(worker.poll() is None for worker in workers):
        for path in rng.sample(found, 2) if len(found := files(tmp_path)) > 2 else ():
            try:
                data = bytearray(path.read_bytes())
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
                damaged += 1
            except (FileNotFoundError, ValueError):
                continue  # Evicted, or cut to nothing before.
    ends = [worker.communicate() for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * PROCESSES, ends
    assert damaged
    # The last line, after warnings about refused blocks.
    assert all(int(stdout.split()[-1]) for stdout, _ in ends)
