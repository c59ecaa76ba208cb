"""Backups of a shard: full and incremental, on a schedule, restored, erased in."""
