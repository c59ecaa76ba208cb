"""Plans forward passes: the prompts that a pass reads, and how many tokens of each. No model.

A pass has a budget of tokens. The oldest prompt gets at least half of it, the others share the
rest, the one with the fewest tokens left first. So a short prompt does not wait for a long one, and
no prompt waits forever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from forge.core.placement.prefix_cache import PrefixCache
from services.inference.engines.base import Prompt
from services.inference.engines.embedded.recurrent.read_states import ReadStates

_MASK_ELEMENTS = 1 << 24
"""Most elements of one prompt's attention mask in one pass; longer prompts take several passes."""


@dataclass(slots=True, eq=False, kw_only=True)
class Reading:
    """A prompt during its computation."""

    prompt: Prompt
    ids: torch.Tensor
    """int64, shape [tokens]."""
    kv: torch.Tensor
    """[layers, 2, heads, tokens, head_size]."""
    routes: torch.Tensor
    """Experts of its tokens, [tokens, route_bytes], on the host."""
    cached: int
    """Tokens whose keys and values came from the prefix cache or the KV store."""
    stored: int = 0
    """Part of the cached tokens that the KV store had."""
    stored_s: float = 0.0
    source: Reading | None = None
    """An earlier reading that shares the first `shared` tokens."""
    shared: int = 0
    done: int = 0
    """Tokens that need no computation any more."""
    filled: int = 0
    """Tokens whose keys and values are in `kv`; those of the source come with the first pass."""
    compute_s: float = 0.0
    """The reading's share of the time of its passes."""
    logits: torch.Tensor | None = None
    """Logits of the last computed token, shape [vocabulary]."""
    state: torch.Tensor | None = None
    """The model's last hidden state of that token, shape [channels]; None without draft heads."""
    recurrent: ReadStates | None = None
    """States of the recurrent layers; None without such layers."""

    @property
    def start(self) -> int:
        """First token that is computed."""
        return max(self.cached, self.shared)

    @property
    def left(self) -> int:
        """Tokens to compute."""
        return self.prompt.tokens - self.done

    def separate(self) -> None:
        """Compute the tokens that the source would have given; it has failed."""
        self.source, self.shared = None, 0
        self.done = self.filled


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The tokens of one prompt that one pass computes."""

    reading: Reading
    start: int
    end: int


class WaitingPrefixes:
    """The prefixes of waiting readings, each inserted once: when a later prompt asks for them, so
    that a lone prompt is not indexed."""

    def __init__(self, readings: Iterable[Reading], *, tokens: int, block_tokens: int) -> None:
        """`tokens`: of `readings` and of all that will be added."""
        self._index = PrefixCache(block_tokens=block_tokens, capacity_tokens=tokens)
        self._owners: dict[int, Reading] = {}
        self._added = list(readings)
        """Those that are not in the index yet."""

    def add(self, reading: Reading) -> None:
        """Let later prompts share the prefixes of a reading."""
        self._added.append(reading)

    def longest(self, prompt: Prompt, *, limit_tokens: int) -> tuple[Reading | None, int]:
        """Return the reading with the longest common prefix in whole blocks, and its length."""
        for reading in self._added:
            for placed in self._index.insert(reading.prompt.ids):
                self._owners[placed.slot] = reading
        self._added.clear()
        found = self._index.match(prompt.ids, limit_tokens=limit_tokens)
        return (self._owners[found.slots[-1]], found.tokens) if found.slots else (None, 0)


def next_pass(pending: Sequence[Reading], *, budget: int) -> list[Span]:
    """Return the spans of the next pass, oldest reading first; a source comes before its sharers.

    At least one span where something is pending: the oldest reading waits for no other.
    """
    if not pending:
        return []
    oldest, *others = pending
    planned = {oldest: _end(oldest, budget if not others else (budget + 1) // 2)}
    room = budget - (planned[oldest] - oldest.done)
    waiting = sorted(others, key=lambda reading: reading.left)
    while room > 0 and (reading := next((r for r in waiting if _is_ready(r, planned)), None)):
        waiting.remove(reading)
        planned[reading] = _end(reading, room)
        room -= planned[reading] - reading.done
    if room > 0:
        planned[oldest] = _end(oldest, planned[oldest] - oldest.done + room)
    return [Span(reading=one, start=one.done, end=end) for one, end in planned.items()]


def _is_ready(reading: Reading, planned: Mapping[Reading, int]) -> bool:
    """Whether its source will have the shared prefix when the pass comes to it."""
    source = reading.source
    return source is None or planned.get(source, source.filled) >= reading.shared


def _end(reading: Reading, room: int) -> int:
    most = min(room, _most_tokens(reading.done))
    return min(reading.prompt.tokens, reading.done + most)


def _most_tokens(done: int) -> int:
    """Return the most tokens after `done` ones whose mask has at most _MASK_ELEMENTS."""
    return max(1, int((math.sqrt(done * done + 4 * _MASK_ELEMENTS) - done) / 2))
