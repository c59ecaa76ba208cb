"""Keys and values of cached prefixes: the storage of a `PrefixCache`.

Bounded in bytes, emptied when the weights change. Owned by one engine actor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forge.core.placement.prefix_cache import Listener, Match, PrefixCache
from forge.core.token_columns import TOKEN_BYTES
from services.inference.engines.embedded.kv.shape import KvShape

Layers = Sequence[torch.Tensor] | torch.Tensor
"""Keys and values of a sequence, [2, heads, tokens, head_size] of each layer."""


class KvCache(PrefixCache):
    """Blocks of keys and values in one tensor, indexed by their tokens."""

    def __init__(
        self,
        shape: KvShape,
        *,
        block_tokens: int,
        capacity_bytes: int,
        listener: Listener | None = None,
    ) -> None:
        blocks = capacity_bytes // (block_tokens * shape.token_bytes)
        super().__init__(
            block_tokens=block_tokens, capacity_tokens=blocks * block_tokens, listener=listener
        )
        # [layers, 2, heads, slots, block_tokens, head_size]: slots have a sequence's layout.
        # The system allocates pages as slots fill.
        self._blocks = torch.empty(
            (shape.layers, 2, shape.heads, blocks, block_tokens, shape.head_size),
            dtype=shape.dtype,
            device=shape.device,
        )
        self._routes = torch.empty((blocks, block_tokens, shape.route_bytes), dtype=torch.uint8)
        """Experts of the tokens of each block, on the host; no bytes if they are not recorded."""

    def read_routes(self, match: Match, out: torch.Tensor) -> None:
        """Copy the experts of a match, [tokens, route_bytes], to the front of `out`."""
        if match.slots and self._routes.shape[2]:
            found = self._routes[list(match.slots)].flatten(0, 1)
            out[: len(found)] = found

    def read(self, match: Match, out: Layers, *, start: int = 0, end: int | None = None) -> None:
        """Copy the tokens `start` to `end` of a match, whole blocks, to the front of `out`."""
        size = self.block_tokens
        slots = match.slots[start // size : None if end is None else end // size]
        if slots:
            blocks = self._blocks.index_select(3, torch.tensor(slots, device=self._blocks.device))
            for layer, found in zip(out, blocks.flatten(3, 4), strict=True):
                layer[:, :, : len(slots) * size] = found

    def store(self, ids: bytes, kv: Layers, *, from_token: int = 0, routes: torch.Tensor) -> None:
        """Cache the whole blocks of `ids`; their keys and values are at the front of `kv`, their
        experts at the front of `routes`; None: not known.

        Both may begin at `from_token` if all tokens before it are cached and pinned.
        """
        placed = self.insert(ids)
        if placed:
            size = self.block_tokens
            start = placed[0].start_token - from_token
            end = placed[-1].start_token + size - from_token
            assert start >= 0
            slots = torch.tensor([block.slot for block in placed], device=self._blocks.device)
            # New blocks are consecutive: they are the uncached part of the prefix.
            for layer, blocks in zip(kv, self._blocks, strict=True):
                new = layer[:, :, start:end].unflatten(2, (len(placed), size))
                blocks.index_copy_(2, slots, new)
            if self._routes.shape[2]:
                shape = (len(placed), size, -1)
                self._routes[slots.cpu()] = (
                    routes[start:end].reshape(shape)
                    if routes is not None
                    else torch.tensor(255, dtype=torch.uint8)
                )


def prefix(ids: bytes, tokens: int) -> bytes:
    """Return the first `tokens` ids."""
    return ids[: tokens * TOKEN_BYTES]
