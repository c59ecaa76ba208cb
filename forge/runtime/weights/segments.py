"""Segments of a manifest: runs of whole tensors that the ranks of a trainer hold and send.

Owns where the segments begin. Not here: gathering a segment (`services.trainer.learner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A run of tensors, up to the next segment; in JSON an array of these fields."""

    first: int
    """Number of its first tensor in the manifest's order."""
    source: str
    """The rank that sends it, host:port."""


def cut(sizes: Sequence[int], parts: int) -> list[range]:
    """Divide tensors of these sizes (bytes) into contiguous runs, one for each of `parts`.

    A tensor belongs to the part that has its middle byte. So a part has at most its share of all
    bytes and one largest tensor, and may be empty.
    """
    total = sum(sizes)
    borders = [0] * parts
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        # Twice the position of the middle, so that it is a whole number.
        owner = min(parts - 1, (2 * end - size) * parts // (2 * total)) if total else 0
        borders[owner] += 1
    ends = list(accumulate(borders))
    return [range(end - count, end) for end, count in zip(ends, borders, strict=True)]


def owner_of(segments: Sequence[Segment], tensor: int, *, tensors: int) -> tuple[str, int]:
    """Return the source of a tensor, and the end of its segment among all `tensors`."""
    end = tensors
    for one in reversed(segments):
        if one.first <= tensor:
            return one.source, end
        end = one.first
    raise IndexError(f"no segment has tensor {tensor}")
