"""The turns of a batch whose token values are stored. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple


class TurnPlace(NamedTuple):
    """A turn in the pool."""

    trajectory_id: str
    turn_index: int


class SampleSize(NamedTuple):
    """The fields of a sample by which it is chosen."""

    number: int
    """`Sample.number`."""
    group: int
    trained_tokens: int


def chosen_numbers(
    samples: Sequence[SampleSize], most_tokens: int, *, rng: Random
) -> tuple[int, ...]:
    """Numbers of samples with at most `most_tokens` trained tokens in all, group after group in a
    random order. A sample that does not fit is left out, so the last group may be in part."""
    groups: dict[int, list[SampleSize]] = {}
    for one in samples:
        groups.setdefault(one.group, []).append(one)
    order = list(groups.values())
    rng.shuffle(order)
    chosen, left = [], most_tokens
    for one in (sample for group in order for sample in group):
        if one.trained_tokens <= left:
            chosen.append(one.number)
            left -= one.trained_tokens
        if not left:
            break
    return tuple(chosen)
