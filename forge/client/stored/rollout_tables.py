"""Trackers of experiments that have tables of rollouts, which an erasure does not reach.

A trainer notes them in etcd before it writes the first table, so that `forge pool erase` can name
them also after the trainer has ended, or has other settings.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import msgspec

from forge.core.errors import StaleFence
from forge.runtime.coordination import Coordinator, Versioned
from forge.runtime.stored_json import decode_stored

KEY = "trainer/rollout-tables"
"""A JSON list in etcd, sorted."""


async def known_tables(coordinator: Coordinator) -> list[str]:
    """Return the places, for example "project x of Weights & Biases". Raises `Unavailable`, and
    `DataLoss` for a damaged value."""
    return _places(await coordinator.get(KEY))


async def note_tables(coordinator: Coordinator, places: Collection[str]) -> None:
    """Add places. Raises as `known_tables`."""
    while True:
        stored = await coordinator.get(KEY)
        known = _places(stored)
        if set(places) <= set(known):
            return
        value = msgspec.json.encode(sorted({*known, *places}))
        revision = 0 if stored is None else stored.mod_revision
        with suppress(StaleFence):
            await coordinator.compare_and_swap(KEY, value, expected_revision=revision)


def _places(stored: Versioned | None) -> list[str]:
    return [] if stored is None else decode_stored(stored.value, list[str], f"{KEY} in etcd")
