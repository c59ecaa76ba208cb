"""Sources of a version of the weights, in the order of use."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

from forge.runtime.coordination import Discovery

AVOID_S = 60.0
"""Time in which a failed source comes last."""


class WeightSources:
    """Workers with the version, else one that relays it, then the trainer; recently failed sources
    come last."""

    def __init__(
        self,
        peers: Sequence[Discovery],
        *,
        own_id: str,
        fetches: Callable[[str, int], bool],
    ) -> None:
        """`fetches`: whether an instance is to serve a version; others cannot relay it."""
        self._peers = peers
        self._own_id = own_id
        self._fetches = fetches
        self._avoided_until_s: dict[str, float] = {}

    def of(self, version: int, *, trainer: str) -> list[str]:
        """Return addresses in the order of use: workers first, to spare the trainer's network.

        After a publication no worker has the version. Then each fetches from the one above it in a
        binary tree over all workers that are to serve it, and the first one from the trainer.
        """
        now_s = time.monotonic()
        self._avoided_until_s = {
            address: until_s
            for address, until_s in self._avoided_until_s.items()
            if until_s > now_s
        }
        holders = [
            peer.address
            for discovery in self._peers
            for peer in discovery.instances
            if peer.metadata.get("weight_version") == str(version)
            and peer.instance_id != self._own_id
        ]
        random.shuffle(holders)
        if not holders:
            holders = self._above(version)
        # The sort is stable.
        return sorted([*holders, trainer], key=self._avoided_until_s.__contains__)

    def _above(self, version: int) -> list[str]:
        """Return the worker above this one in the tree of a version; none for the first one."""
        addresses = {
            peer.instance_id: peer.address
            for discovery in self._peers
            for peer in discovery.instances
            if self._fetches(peer.instance_id, version)
        }
        # Each version has another order, so that each worker's network has its turn.
        order = sorted({*addresses, self._own_id}, key=partial(_place, version))
        place = order.index(self._own_id)
        return [addresses[order[(place - 1) // 2]]] if place else []

    def avoid(self, address: str) -> None:
        """Record a failure of a source."""
        self._avoided_until_s[address] = time.monotonic() + AVOID_S


def _place(version: int, instance_id: str) -> bytes:
    return blake2b(f"{version}/{instance_id}".encode(), digest_size=8).digest()
