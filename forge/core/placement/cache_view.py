"""A router's view of a worker's prefix cache: reported blocks, and blocks expected soon.

A worker reports the chain hashes of blocks that it has stored and removed. Prompts that were just
placed there count as cached, too, since the requests of a group come together. They count until the
worker reports them, or for a short time. For a worker without reports the router keeps a guess: the
prompts that it sent there, with LRU eviction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import filterfalse

from forge.core.placement.chain_hashes import PromptChains
from forge.core.placement.prefix_cache import PrefixCache


class CacheView:
    """The cached prefixes of one worker."""

    def __init__(self, *, block_tokens: int, capacity_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._guess = PrefixCache(block_tokens=block_tokens, capacity_tokens=capacity_tokens)
        self._reported: set[bytes] | None = None
        """None until the worker has reported."""
        self._expected: dict[bytes, float] = {}
        """Hashes of placed prompts, and the time until which they count."""
        self._first_end_s = math.inf
        """No expectation ends before."""

    @property
    def reported_blocks(self) -> int:
        """Number of blocks that the worker has reported; 0 for one that is guessed."""
        return len(self._reported or ())

    def tokens(self, prompt: PromptChains, *, now_s: float) -> int:
        """Return the tokens of the longest cached prefix."""
        if self._reported is None:
            return self._guess.peek(prompt.ids)
        reported, expected, blocks = self._reported, self._expected, 0
        for chain in prompt.of(self._block_tokens):
            if chain not in reported and expected.get(chain, 0.0) <= now_s:
                break
            blocks += 1
        return blocks * self._block_tokens

    def expect(self, prompt: PromptChains, *, until_s: float) -> None:
        """Count a prompt as cached until a time, which is not before that of an earlier call;
        without reports, until it is evicted."""
        if self._reported is None:
            self._guess.insert(prompt.ids)
            return
        chains = prompt.of(self._block_tokens)
        self._expected |= dict.fromkeys(filterfalse(self._reported.__contains__, chains), until_s)
        self._first_end_s = min(self._first_end_s, until_s)

    def report(self, *, stored: Iterable[bytes], removed: Iterable[bytes], anew: bool) -> None:
        """Apply a worker's report; `anew`: `stored` has all its blocks."""
        if self._reported is None or anew:
            self._reported = set()
        self._reported.difference_update(removed)
        for chain in stored:
            self._reported.add(chain)
            self._expected.pop(chain, None)

    def forget_expected(self, *, now_s: float) -> None:
        """Drop expectations whose time is over."""
        if now_s < self._first_end_s:
            return
        self._expected = {c: until for c, until in self._expected.items() if until > now_s}
        self._first_end_s = min(self._expected.values(), default=math.inf)

    def forget_guess(self) -> None:
        """Drop the guess: the worker has new weights, or may be dead. Reports need no such call."""
        if self._reported is None:
            self._guess.clear()
