"""Versions that several ranks hold: rank 0 has the first tensors, each other rank the next ones.

Owns the messages between rank 0 and the others, without transport (`services.trainer.learner`) and
without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from forge.runtime.weights import Segment, TensorEntry


class RankSegment(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a version that one rank above 0 holds."""

    entries: tuple[TensorEntry, ...]
    """The segment's tensors in the manifest's order."""
    source: str
    """Address of the rank, host:port."""
    place: str
    """Name of the shared memory that it sees."""


class OtherRanks(Protocol):
    """The ranks above 0. Each call returns once all of them have answered.

    Raises `Unavailable` when one fails or is lost.
    """

    async def described(self, number: int) -> Sequence[RankSegment]:
        """Return the segments of the copy with this number, in order, once they are copied."""

    async def serve(self, number: int, version: int) -> None:
        """Tells the ranks to send the copy with this number as a version."""

    async def keep(self, versions: Collection[int]) -> None:
        """Tells the ranks to drop all other versions."""

    async def write(self, version: int, path: Path, *, aligned_bytes: int, mapped: bool) -> None:
        """Let each rank write its segment of a version into the file of all tensors at `path`,
        durably, or into shared memory, from which it then sends. Raises `ResourceExhausted` when
        one cannot write."""


def segments_of(own: int, source: str, others: Sequence[RankSegment]) -> tuple[Segment, ...]:
    """Return the segments for an announcement: `own` tensors of rank 0, then those of the others;
    ranks without a tensor are left out."""
    found, first = [], 0
    for count, address in [(own, source), *((len(one.entries), one.source) for one in others)]:
        if count:
            found.append(Segment(first, address))
        first += count
    return tuple(found)
