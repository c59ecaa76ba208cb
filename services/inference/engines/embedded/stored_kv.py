"""Keys and values of the embedded engine in a KV store: tensors to blocks and back.

Behind the keys and values of a block are the experts of its tokens, if they are recorded.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import torch

from forge.core.token_columns import TOKEN_BYTES
from services.inference.engines.embedded.kv.prefix_cache import Layers
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.kv_store.store import KvStore
from services.inference.engines.tensor_bytes import DTYPES, NAMES, from_bytes, raw_bytes

_LAYOUT = "embedded 2"
"""Changes with the meaning of a block's bytes."""


def architecture(model_path: str, shape: KvShape) -> bytes:
    """Name what determines keys and values besides the weights."""
    config = (Path(model_path) / "config.json").read_bytes()
    layout = f"{_LAYOUT} {NAMES[shape.dtype]} {shape.layers} {shape.heads} {shape.head_size} "
    if shape.states is not None:
        layout += f"{shape.states} "
    if shape.routes is not None:
        layout += f"{shape.routes} "
    return layout.encode() + hashlib.sha256(config).digest()


class StoredPrefix:
    """Blocks of one prompt, while a thread adds them and after the engine has taken them."""

    def __init__(self, shape: KvShape, tokens: int) -> None:
        """`tokens`: of the prompt."""
        self._shape = shape
        self._tokens = tokens
        self._lock = threading.Lock()
        self._is_taken = False
        self.identity = b""
        """Of model and weights, as of `KvStore.serve`."""
        self.start = self.end = 0
        """The tokens that were added."""
        self.kv: torch.Tensor | None = None
        """[layers, 2, heads, tokens, head_size] of the whole prompt; None without a block."""
        self.routes: torch.Tensor | None = None
        """[tokens, route_bytes]; None without a block."""
        self.seconds = 0.0
        """Time that the prompt has waited."""

    def begin(self, identity: bytes, start: int) -> None:
        """The first block starts at the token `start`."""
        self.identity = identity
        self.start = self.end = start

    def add(self, block: torch.Tensor, routes: torch.Tensor) -> bool:
        """Copy the next block; False if it comes too late."""
        with self._lock:
            if self._is_taken:
                return False
            if self.kv is None or self.routes is None:
                self.kv = self._shape.empty(self._tokens)
                self.routes = self._shape.unknown_routes(self._tokens)
            tokens = slice(self.end, self.end + len(routes))
            self.kv[:, :, :, tokens] = block.to(self.kv.device)
            self.routes[tokens] = routes
            self.end = tokens.stop
            return True

    def take(self) -> None:
        """Accept no more blocks."""
        with self._lock:
            self._is_taken = True


class StoredKv:
    """The store, for sequences of one model: [layers, 2, heads, tokens, head_size]."""

    def __init__(self, store: KvStore, shape: KvShape) -> None:
        self.store = store
        self._dtype = NAMES[shape.dtype]
        self._block_shape = (
            *(shape.layers, 2, shape.heads),
            *(store.block_tokens, shape.head_size),
        )
        self._kv_bytes = store.block_tokens * shape.token_bytes
        self._routes_shape = (store.block_tokens, shape.route_bytes)

    @staticmethod
    def token_bytes(shape: KvShape) -> int:
        """Bytes of one token in a block."""
        return shape.token_bytes + shape.route_bytes

    def block_start(self, token: int) -> int:
        """Return the first token of the block with a token."""
        return token // self.store.block_tokens * self.store.block_tokens

    def read(self, ids: bytes, found: StoredPrefix, *, from_token: int, limit_tokens: int) -> None:
        """Add the stored blocks from the one with `from_token` on. On a thread of its own: a file
        system may hang."""
        size = self.store.block_tokens
        identity = self.store.identity
        found.begin(identity, from_token // size * size)

        def place(start: int, content: memoryview) -> bool:
            block = from_bytes(
                content[: self._kv_bytes], dtype=self._dtype, shape=self._block_shape
            )
            routes = from_bytes(content[self._kv_bytes :], dtype="uint8", shape=self._routes_shape)
            return found.add(block, routes)

        self.store.read(
            ids,
            from_token=from_token,
            limit_tokens=limit_tokens,
            place=place,
            identity=identity,
        )

    def write(
        self,
        ids: bytes,
        kv: Layers,
        routes: torch.Tensor,
        *,
        after_token: int,
        from_token: int = 0,
        reused: bool = False,
    ) -> None:
        """Store the whole blocks that end after `after_token`; `kv` and `routes` begin at
        `from_token`, and the blocks before it are left out. A thread of the store encodes them.
        `reused`: other values take the place of `kv` afterwards."""
        size = self.store.block_tokens
        after_token = max(after_token, -(-from_token // size) * size)
        first = after_token // size * size
        end = len(ids) // TOKEN_BYTES // size * size
        if first >= end:
            return
        if reused or 2 * (end - first) < kv[0].shape[2]:
            # Also where the waiting blocks would keep more than twice their own memory.
            new = slice(first - from_token, end - from_token)
            kv = torch.stack([layer[:, :, new] for layer in kv])
            routes, from_token = routes[new].clone(), first

        def encode(start: int, end: int) -> memoryview:
            return self._encoded(kv, routes, slice(start - from_token, end - from_token))

        self.store.write(ids, after_token=after_token, encode=encode)

    @torch.inference_mode()
    def _encoded(self, kv: Layers, routes: torch.Tensor, tokens: slice) -> memoryview:
        """The bytes of a block: its keys and values, then its experts."""
        content = torch.empty(self._kv_bytes + routes[tokens].nbytes, dtype=torch.uint8)
        stored = content[: self._kv_bytes].view(DTYPES[self._dtype]).view(self._block_shape)
        for place, layer in zip(stored, kv, strict=True):
            place.copy_(layer[:, :, tokens])
        content[self._kv_bytes :] = routes[tokens].flatten()
        return raw_bytes(content)
