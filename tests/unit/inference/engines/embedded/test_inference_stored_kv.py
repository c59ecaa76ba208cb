"""The engine writes keys and values to the KV store, and computes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest
import torch

from forge.core.token_columns import int32_bytes
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.stored_kv import StoredKv, StoredPrefix
from services.inference.engines.kv_store.store import KvStore
from services.inference.engines.provider import KvStoreOptions

BLOCK = 4
SHAPE = KvShape(
    layers=2, windowed=False, heads=2, head_size=4, dtype=torch.float32, device=torch.device("cpu")
)


def _after(event: Event) -> bytes:
    event.wait()
    return b""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KvStore]:
    options = KvStoreOptions(directory=str(tmp_path), max_bytes=1 << 20, block_tokens=BLOCK)
    found = KvStore(options, token_bytes=StoredKv.token_bytes(SHAPE))
    found.serve(b"m" * 16)
    yield found
    found.close()


@pytest.mark.parametrize("after_token", [0, 22])
@pytest.mark.parametrize("from_token", [0, 6])
def test_store_has_the_values_of_the_write(
    store: KvStore, after_token: int, from_token: int
) -> None:
    """A row that another sequence takes before its blocks are encoded: all of it, and its end."""
    kept, tokens = StoredKv(store, SHAPE), 30
    ids = int32_bytes(list(range(tokens)))
    whole = torch.randn(2, 2, 2, tokens, 4)
    row = whole[:, :, :, from_token:].clone()
    encodes = Event()
    first = int32_bytes([9] * BLOCK)
    store.write(first, after_token=0, encode=lambda *_: _after(encodes))
    routes = SHAPE.unknown_routes(tokens - from_token)
    kept.write(ids, row, routes, after_token=after_token, from_token=from_token, reused=True)
    row.fill_(7.0)
    encodes.set()
    while store._pending_bytes:
        pass
    start = max(after_token, -(-from_token // BLOCK) * BLOCK) // BLOCK * BLOCK
    found = StoredPrefix(SHAPE, tokens)
    kept.read(ids, found, from_token=start, limit_tokens=tokens)
    assert (found.start, found.end) == (start, 28)
    assert found.kv is not None
    assert found.kv[:, :, :, start:28].equal(whole[:, :, :, start:28])


def test_waiting_blocks_keep_little_memory_of_a_long_prompt(
    store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new turn behind a long history: its own blocks are copied, the history is not kept."""
    kept = StoredKv(store, SHAPE)
    seen: list[torch.Tensor] = []

    def watch(ids: bytes, *, after_token: int, encode: object) -> None:
        seen.extend(
            cell.cell_contents
            for cell in encode.__closure__ or ()  # type: ignore[attr-defined]
            if isinstance(cell.cell_contents, torch.Tensor) and cell.cell_contents.dim() == 5
        )

    monkeypatch.setattr(store, "write", watch)
    kv = torch.randn(2, 2, 2, 400, 4)
    ids = int32_bytes(list(range(400)))
    kept.write(ids, kv, SHAPE.unknown_routes(400), after_token=380)
    kept.write(ids, kv, SHAPE.unknown_routes(400), after_token=0)
    assert [one.shape[3] for one in seen] == [20, 400]
    assert seen[1] is kv
