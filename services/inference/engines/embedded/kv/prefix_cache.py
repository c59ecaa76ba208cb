"""Keys and values of cached prefixes: the storage of a `PrefixCache`.

Bounded in bytes, emptied when the weights change. Owned by one engine actor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from forge.core.placement.prefix_cache import IndexListener, Match, Placed, PrefixCache
from forge.core.token_columns import TOKEN_BYTES
from services.inference.engines.embedded.kv.cached_states import CachedStates
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.kv.state_memory import state_rows

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
        listener: IndexListener | None = None,
        resumes: bool = True,
    ) -> None:
        """`resumes`: the cache has states of recurrent layers, too, for prompts that continue from
        them; they share its capacity."""
        blocks, rows = cache_sizes(
            shape, block_tokens=block_tokens, capacity_bytes=capacity_bytes, resumes=resumes
        )
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
        self._states = CachedStates(shape, rows)

    def resumable(self, ids: bytes, *, limit_tokens: int) -> Match:
        """Return the longest cached prefix of `ids` that a prompt can continue from: of a model
        with recurrent layers, one whose states are cached."""
        match = self.match(ids, limit_tokens=limit_tokens)
        if not self._states.are_needed:
            return match
        blocks = self._states.deepest(match.slots)
        return self.match(ids, limit_tokens=blocks * self.block_tokens)

    def read_states(self, match: Match, out: torch.Tensor) -> None:
        """Copy the states after a resumable match, [1, S]."""
        if match.slots:
            self._states.read(match.slots[-1], out)

    def store_states(self, ids: bytes, states: Mapping[int, torch.Tensor]) -> None:
        """Cache states, [1, S] each, by the number of tokens before them; those are a prefix of
        `ids` that is cached, or the states are left out."""
        for tokens, row in states.items():
            match = self.match(ids, limit_tokens=tokens)
            if match.tokens == tokens:
                self._states.store(match.slots[-1], row)

    def clear(self) -> None:
        """See `PrefixCache`."""
        super().clear()
        self._states.clear()

    def read_routes(self, match: Match, out: torch.Tensor) -> None:
        """Copy the experts of a match, [tokens, route_bytes], to the front of `out`."""
        if match.slots and self._routes.shape[2]:
            found = self._routes[list(match.slots)].flatten(0, 1)
            out[: len(found)] = found

    def routes(self, match: Match, *, start: int) -> torch.Tensor:
        """Return the experts of a match from a token on, [tokens, route_bytes]."""
        size = self.block_tokens
        found = self._routes[list(match.slots[start // size :])].flatten(0, 1)
        return found[start % size :] if match.slots else found

    def read(self, match: Match, out: Layers, *, start: int = 0, end: int | None = None) -> None:
        """Copy the tokens `start` to `end` of a match, whole blocks, to the front of `out`, without
        a second copy."""
        size = self.block_tokens
        found = match.slots[start // size : None if end is None else end // size]
        if not found:
            return
        slots = torch.tensor(found, device=self._blocks.device)
        for layer, blocks in zip(out, self._blocks, strict=True):
            front = layer[:, :, : len(found) * size].unflatten(2, (len(found), size))
            torch.index_select(blocks, 2, slots, out=front)

    def store(self, ids: bytes, kv: Layers, *, from_token: int = 0, routes: torch.Tensor) -> None:
        """Cache the whole blocks of `ids`; their keys and values are at the front of `kv`, their
        experts at the front of `routes`.

        Both may begin at `from_token` if all tokens before it are cached and pinned. After an error
        nothing more is cached than before.
        """
        placed = self.insert(ids)
        for block in placed:
            self._states.forget(block.slot)
        if not placed:
            return
        try:
            self._fill(placed, kv, routes, from_token=from_token)
        except BaseException:
            self.withdraw(placed)
            raise

    def _fill(
        self, placed: Sequence[Placed], kv: Layers, routes: torch.Tensor, *, from_token: int
    ) -> None:
        """Copy new blocks, which are consecutive: the uncached part of a prefix."""
        size = self.block_tokens
        start = placed[0].start_token - from_token
        end = placed[-1].start_token + size - from_token
        assert start >= 0
        slots = torch.tensor([block.slot for block in placed], device=self._blocks.device)
        for layer, blocks in zip(kv, self._blocks, strict=True):
            new = layer[:, :, start:end].unflatten(2, (len(placed), size))
            blocks.index_copy_(2, slots, new)
        if self._routes.shape[2]:
            shape = (len(placed), size, -1)
            self._routes[slots.cpu()] = routes[start:end].reshape(shape)


def cache_sizes(
    shape: KvShape, *, block_tokens: int, capacity_bytes: int, resumes: bool
) -> tuple[int, int]:
    """Number of blocks and of states in a cache."""
    rows = state_rows(shape, capacity_bytes) if resumes else 0
    blocks = (capacity_bytes - rows * shape.state_bytes) // (block_tokens * shape.token_bytes)
    return blocks, rows


def prefix(ids: bytes, tokens: int) -> bytes:
    """Return the first `tokens` ids."""
    return ids[: tokens * TOKEN_BYTES]
