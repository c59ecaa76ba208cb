"""Metrics of a pool instance."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge, histogram

COMMIT_SECONDS = histogram("forge_pool_commit_seconds", "Duration of one commit, fsync included.")
COMMANDS = counter("forge_pool_commands_total", "Commands applied, by kind.", ["kind"])
COMMITTED_BYTES = counter("forge_pool_commit_bytes_total", "Payload bytes of all commits.")
REFUSALS = counter(
    "forge_pool_refusals_total", "Turns and other commands refused one by one.", ["kind", "code"]
)
COMMIT_FAILURES = counter(
    "forge_pool_commit_failures_total", "Commits that failed as a whole.", ["code"]
)
USED_BYTES = gauge("forge_pool_used_bytes", "Bytes of the data file, free pages included.")
LIVE_BYTES = gauge("forge_pool_live_bytes", "Bytes of the data file in use by records.")
DISK_FREE_BYTES = gauge("forge_pool_disk_free_bytes", "Free bytes on the disk of the shard.")
COMPACTIONS = counter("forge_pool_compactions_total", "Compactions of a served data file.")
UNQUEUED_GROUPS = counter(
    "forge_pool_unqueued_groups_total", "Groups that a scan returned without a queue entry."
)
CLOSED_READS = counter(
    "forge_pool_closed_reads_total",
    "Reads of closed trajectories by digest check: verified, unverified (closed by a version "
    "without digests) or damaged.",
    ["outcome"],
)
FREED_GROUPS = counter("forge_pool_freed_groups_total", "Groups whose payload was freed.")
FREED_RECORDS = counter("forge_pool_freed_records_total", "Turns and rewards freed.")
ORPHANS = counter(
    "forge_pool_orphans_total", "Tasks tombstoned because their trajectories have no group."
)
FREED_BYTES = counter("forge_pool_freed_bytes_total", "Payload bytes freed.")
DAMAGED_ENTRIES = counter(
    "forge_pool_damaged_entries_total",
    "Settled groups that are not freed: their index entry is damaged.",
)
COVERED_STEP = gauge(
    "forge_pool_covered_step", "Groups trained at or before this step may be freed."
)
TRAINED_SINCE_BACKUP = gauge(
    "forge_pool_trained_since_backup_steps",
    "Steps that the trainer took after the backup from which the shard was restored.",
)
REPAIRS = counter(
    "forge_pool_repairs_total",
    "Damaged records: repaired from a copy, left without one, or overwritten by a new state.",
    ["outcome"],
)
MOVED_GROUPS = counter(
    "forge_pool_moved_groups_total",
    "Groups copied from a shard that retires (in), and groups that moved to another shard (out).",
    ["direction"],
)
REPLICA_LAG = gauge(
    "forge_pool_replica_lag_commits", "Commits that the follower has not confirmed."
)
CATCH_UPS = counter(
    "forge_pool_catch_ups_total",
    "Catch-ups of followers, by way: journal (the missing records), copy (all records), rest (the "
    "rest of an interrupted copy).",
    ["way"],
)
REPLICAS_IN_SYNC = gauge(
    "forge_pool_replicas_in_sync",
    "Connected replicas that have every acknowledged write, the leader included.",
)
LEADS = gauge("forge_pool_leads", "1 while this instance leads its shard, else 0.")
