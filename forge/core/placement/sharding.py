"""The pool shard of a new group: rendezvous (highest random weight) hashing.

The live shards come from etcd. Written groups stay on their recorded shard; the rule places only
new groups.

Processes with the same shard names make the same choice without communication. A shard that joins
takes an equal part from each other shard, and no group moves between those; a shard that leaves
distributes its part in the same way (Thaler and Ravishankar, "Using name-based mappings to increase
hit rates", 1998).
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

from forge.core.errors import Unavailable


def choose_shard(group: str, shards: Collection[str]) -> str:
    """Return the shard of `group` among the live `shards`, in any order.

    Raises `Unavailable` without a shard.
    """
    if not shards:
        raise Unavailable(f"no pool shard is registered, so group {group} cannot be placed")
    return max(shards, key=lambda shard: (_weight(group, shard), shard))


def _weight(group: str, shard: str) -> bytes:
    # Keyed by the shard: no two pairs of names collide by concatenation. blake2b: `hash` differs
    # between processes.
    key = shard.encode()
    if len(key) > 64:
        key = blake2b(key).digest()
    return blake2b(group.encode(), digest_size=8, key=key).digest()
