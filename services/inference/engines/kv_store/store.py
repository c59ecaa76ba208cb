"""The KV store of one worker: host memory over a shared directory, written behind.

A block is named by a chain hash: of the identity of model and weights, and of all token ids up to
its end. So a block is right for every prompt that begins with these tokens, and weights never meet
the blocks of others. Reads stop at the first missing block, and rest while reading is slower than
computing. Writes wait in a bounded queue for a thread of their own; a full queue drops them.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from forge.core.placement.routing import LearnedRate
from forge.core.token_columns import TOKEN_BYTES
from forge.runtime.telemetry import log
from services.inference.engines.kv_store.directory import BlockDirectory
from services.inference.engines.kv_store.metrics import BLOCKS
from services.inference.engines.provider import KvStoreOptions

IDENTITY_BYTES = 16
_PENDING_BYTES = 256 << 20
"""Most bytes of blocks that wait to be encoded and written."""
_TRIAL_EVERY = 16
"""While reading is slower than computing, one prompt of so many is read, to learn the rate."""
_RATE_TOKENS = 10_000
_CLOSE_S = 5.0
"""Time for the waiting blocks at a stop."""

Encode = Callable[[int, int], bytes | memoryview]
"""Returns a copy of the keys and values of the tokens `start` to `end`. Runs on a thread of the
store: they must not change."""
Place = Callable[[int, memoryview], bool]
"""Takes the content of the block that starts at a token. False: no more is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    identity: bytes
    chain: bytes
    encode: Callable[[], bytes | memoryview]


class KvStore:
    """Blocks of `options.block_tokens` tokens. One thread calls `serve` and `write`; any `read`."""

    def __init__(self, options: KvStoreOptions, *, token_bytes: int) -> None:
        """Raises ConfigError for a directory that cannot be used."""
        self.block_tokens = options.block_tokens
        self._block_bytes = options.block_tokens * token_bytes
        self._directory = BlockDirectory(Path(options.directory), max_bytes=options.max_bytes)
        self._host = _HostMemory(options.host_bytes)
        self.identity = b""
        """The identity of the last `serve`; empty before."""
        self._read_rate = LearnedRate(0.0, memory_units=_RATE_TOKENS)
        self._compute_rate = LearnedRate(0.0, memory_units=_RATE_TOKENS)
        self._prompts = count()
        self._pending: queue.SimpleQueue[_Write | None] = queue.SimpleQueue()
        self._pending_bytes = 0
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._writer = threading.Thread(target=self._run, name="kv-store", daemon=True)
        self._writer.start()

    def serve(self, identity: bytes) -> None:
        """Read and write blocks of this model with these weights alone; 16 bytes."""
        assert len(identity) == IDENTITY_BYTES
        self.identity = identity

    def read(
        self,
        ids: bytes,
        *,
        from_token: int,
        limit_tokens: int,
        place: Place,
        identity: bytes,
    ) -> int:
        """Place the stored blocks from the one with `from_token` on; return the tokens present.

        Only whole blocks of at most `limit_tokens`, without a gap; `from_token` if there is none.
        `identity` of model and weights.
        """
        if not identity or not self._is_worth_reading():
            return from_token
        began_s = time.monotonic()
        first = from_token // self.block_tokens
        present = first * self.block_tokens
        for index, chain in enumerate(self._chains(identity, ids, limit_tokens)):
            if index < first:
                continue
            content = self._find(identity, chain)
            if content is None:
                BLOCKS.labels("missing").inc()
                break
            if not place(present, content):
                break
            present += self.block_tokens
        read = present - first * self.block_tokens
        with self._lock:
            self._read_rate.observe(seconds=time.monotonic() - began_s, units=read)
        return max(present, from_token)

    def observe_compute(self, *, seconds: float, tokens: int) -> None:
        """Learn the cost of a token that is not in the store."""
        self._compute_rate.observe(seconds=seconds, units=tokens)

    def write(self, ids: bytes, *, after_token: int, encode: Encode) -> None:
        """Store the whole blocks of `ids` that end after a token: the newly computed ones."""
        if not self.identity:
            return
        for index, chain in enumerate(self._chains(self.identity, ids, len(ids) // TOKEN_BYTES)):
            start = index * self.block_tokens
            end = start + self.block_tokens
            if end <= after_token or chain in self._host:
                continue
            with self._lock:
                if self._pending_bytes + self._block_bytes > _PENDING_BYTES:
                    BLOCKS.labels("dropped").inc()
                    return
                self._pending_bytes += self._block_bytes
            block = partial(encode, start, end)
            self._pending.put(_Write(identity=self.identity, chain=chain, encode=block))

    def close(self) -> None:
        """Write what waits, for a few seconds at most."""
        self._pending.put(None)
        self._writer.join(_CLOSE_S)
        self._closing.set()
        self._writer.join(_CLOSE_S)
        # A writer that hangs in the file system would lock and write another file of that number.
        if not self._writer.is_alive():
            self._directory.close()

    def _is_worth_reading(self) -> bool:
        slower = self._read_rate.seconds > self._compute_rate.seconds > 0
        return not slower or next(self._prompts) % _TRIAL_EVERY == 0

    def _chains(self, identity: bytes, ids: bytes, limit_tokens: int) -> Iterator[bytes]:
        """Yield the chain hash of each whole block of at most `limit_tokens`."""
        chain = identity
        block = self.block_tokens * TOKEN_BYTES
        for start in range(0, limit_tokens * TOKEN_BYTES - block + 1, block):
            chain = hashlib.blake2b(chain + ids[start : start + block], digest_size=16).digest()
            yield chain

    def _find(self, identity: bytes, chain: bytes) -> memoryview | None:
        if (kept := self._host.get(chain)) is not None:
            BLOCKS.labels("host").inc()
            return kept
        content = self._directory.read(identity, chain)
        if content is None or len(content) != self._block_bytes:
            return None
        BLOCKS.labels("disk").inc()
        self._host.put(chain, content)
        return content

    def _run(self) -> None:
        while (write := self._pending.get()) is not None and not self._closing.is_set():
            try:
                self._write(write)
            except Exception as error:
                # The store is a cache: the worker serves without it.
                BLOCKS.labels("failed").inc()
                log.error("kv_store_failed", error=str(error), exc_info=True)
            # Its keys and values: the next block may be long in coming.
            del write
            with self._lock:
                self._pending_bytes -= self._block_bytes

    def _write(self, write: _Write) -> None:
        if write.chain in self._host or self._directory.has(write.identity, write.chain):
            return
        content = write.encode()
        self._host.put(write.chain, memoryview(content))
        self._directory.write(write.identity, write.chain, content)


class _HostMemory:
    """Blocks in this process, at most `capacity_bytes`, the least recently used evicted first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._blocks: OrderedDict[bytes, memoryview] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, chain: bytes) -> bool:
        return chain in self._blocks

    def get(self, chain: bytes) -> memoryview | None:
        with self._lock:
            found = self._blocks.get(chain)
            if found is not None:
                self._blocks.move_to_end(chain)
            return found

    def put(self, chain: bytes, content: memoryview) -> None:
        with self._lock:
            if chain in self._blocks or len(content) > self._capacity_bytes:
                return
            self._blocks[chain] = content
            self._bytes += len(content)
            while self._bytes > self._capacity_bytes:
                _, oldest = self._blocks.popitem(last=False)
                self._bytes -= len(oldest)
