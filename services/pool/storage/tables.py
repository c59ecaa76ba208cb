"""The tables of a shard."""

from __future__ import annotations

from enum import Enum


class Table(Enum):
    """The named databases of a shard; the value is the name on disk."""

    META = "meta"
    GROUPS = "groups"
    """What never changes about a group: a GroupRecord without its state."""
    STATES = "group_states"
    """What does: a GroupRecord with only state, batch, step, reason and times."""
    QUEUE = "queue"
    """Queue order of the groups; the key says it all."""
    TRAJECTORIES = "trajectories"
    TURNS = "turns"
    """A TurnHead, then the serialized Turn as it arrived."""
    REWARDS = "rewards"
    CHANGES = "changes"
    """The order in which trajectories were closed and rewarded; see `change_log`."""
    SETTLED = "settled"
    """Which groups can be freed, by when they were settled; see `settled_index`."""
    PENDING = "pending"
    """Queue order of the groups that are not settled; see `group_index`, as for the next three."""
    SETTLED_ORDER = "settled_order"
    """Every settled group: what was trained by step, the others by when they were settled."""
    TAGS = "tags"
    """Queue order of the groups of each tag."""
    SETTLED_COUNTS = "settled_counts"
    """Counters of the settled groups, and the commits that settled them."""
    REPLICA = "replica"
    """Where this replica stands; see `journal`."""
    JOURNAL = "journal"
    """The keys that each of the last commits changed; see `journal`."""


LOCAL = frozenset({Table.REPLICA, Table.JOURNAL})
"""Tables of one replica alone; followers never get them."""
Key = tuple[Table, bytes]
"""Names a record."""
