"""The tables of a shard."""

from __future__ import annotations

from enum import Enum


class Table(Enum):
    """The named databases of a shard; the value is the name on disk."""

    META = "meta"
    GROUPS = "groups"
    """The constant part of a group: a GroupRecord without its state."""
    STATES = "group_states"
    """The variable part: a GroupRecord with only state, batch, step, reason and times."""
    QUEUE = "queue"
    """Queue order of the groups; the key says it all."""
    TRAJECTORIES = "trajectories"
    TURNS = "turns"
    """A TurnHead, then the serialized Turn as it arrived."""
    REWARDS = "rewards"
    CHANGES = "changes"
    """The order in which trajectories were closed and rewarded; see `change_log`."""
    SETTLED = "settled"
    """Groups that can be freed, by time of settlement; see `settled_index`."""
    PENDING = "pending"
    """Queue order of the groups that are not settled; see `group_index`, as for the next four."""
    SETTLED_ORDER = "settled_order"
    """Every settled group: trained ones by step, the others by time of settlement."""
    TAGS = "tags"
    """Queue order of the groups of each tag."""
    LABELS = "labels"
    """The groups with each tag, scaffold, user and fact of metadata, by task; see `labels`."""
    SETTLED_COUNTS = "settled_counts"
    """Counters of the settled groups, and the commits that settled them."""
    REPLICA = "replica"
    """State of this replica; see `journal`."""
    JOURNAL = "journal"
    """The keys that each of the last commits changed; see `journal`."""


CONTENT = (Table.TURNS, Table.REWARDS)
"""What a trajectory holds, and what goes when its group is freed or erased."""
LOCAL = frozenset({Table.REPLICA, Table.JOURNAL})
"""Tables of one replica alone; followers never get them."""
Key = tuple[Table, bytes]
"""Names a record."""
