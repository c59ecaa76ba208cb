"""Which pool shard a new group goes to: rendezvous (highest random weight) hashing.

Owns the choice alone. Who is alive comes from etcd, and a group that has been written stays where
its record says it is; only new groups are placed by this rule.

Every process that knows the same shard names makes the same choice, without talking to another.
A shard that joins takes over an equal part from each of the others and nothing moves between
those; a shard that leaves gives its part away in the same way (Thaler and Ravishankar, "Using
name-based mappings to increase hit rates", 1998).
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

from forge.core.errors import Unavailable


def choose_shard(group: str, shards: Collection[str]) -> str:
    """The shard for `group` among the live `shards`, whose order does not matter.

    Raises `Unavailable` when there is none.
    """
    if not shards:
        raise Unavailable(f"no pool shard is registered, so group {group} has no place")
    return max(shards, key=lambda shard: (_weight(group, shard), shard))


def _weight(group: str, shard: str) -> bytes:
    # Keyed by the shard, so that no pair of names can collide by concatenation; blake2b rather
    # than `hash`, because every process and every Python must agree.
    key = shard.encode()
    if len(key) > 64:
        key = blake2b(key).digest()
    return blake2b(group.encode(), digest_size=8, key=key).digest()
