"""Names of records in messages for operators."""

from __future__ import annotations

import struct

from services.pool.storage.change_log import number_of_change_key
from services.pool.storage.groups.settled_index import parse_settled_key
from services.pool.storage.keys import (
    index_of_turn_key,
    name_of_trajectory_key,
    task_of_queue_key,
    trajectory_of_turn_key,
)
from services.pool.storage.tables import Table


def describe(table: Table, key: bytes) -> str:
    """A key as operators write it; in hex if it cannot be parsed."""
    try:
        match table:
            case Table.TRAJECTORIES:
                return str(name_of_trajectory_key(key))
            case Table.TURNS:
                name = name_of_trajectory_key(trajectory_of_turn_key(key))
                return f"{name} turn {index_of_turn_key(key)}"
            case Table.REWARDS:
                end = key.index(b":") + 9
                return f"{name_of_trajectory_key(key[:end])} event {key[end:].decode()}"
            case Table.QUEUE:
                index = int.from_bytes(key[1:9], "big")
                return f"{task_of_queue_key(key)} (purpose {key[0]}, index {index})"
            case Table.CHANGES:
                return str(number_of_change_key(key))
            case Table.SETTLED:
                settled_unix_s, task_id = parse_settled_key(key)
                return f"{task_id} (settled at {settled_unix_s:.3f})"
            case _:
                return key.decode()
    except (ValueError, IndexError, struct.error):
        return f"key {key.hex() or 'none'}"
