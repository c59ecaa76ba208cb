"""What a pool instance counts."""

from __future__ import annotations

from forge.runtime.telemetry import counter, gauge, histogram

COMMIT_SECONDS = histogram("forge_pool_commit_seconds", "One group commit, fsync included.")
COMMANDS = counter("forge_pool_commands_total", "Changes handled, by kind.", ["kind"])
COMMITTED_BYTES = counter("forge_pool_commit_bytes_total", "Payload of all commits.")
REFUSALS = counter(
    "forge_pool_refusals_total", "Turns and other changes refused one by one.", ["kind", "code"]
)
COMMIT_FAILURES = counter("forge_pool_commit_failures_total", "Commits refused whole.", ["code"])
USED_BYTES = gauge("forge_pool_used_bytes", "Of the shard's file.")
LIVE_BYTES = gauge("forge_pool_live_bytes", "Of the file, what records lie in.")
DISK_FREE_BYTES = gauge("forge_pool_disk_free_bytes", "On the disk of the shard.")
COMPACTIONS = counter("forge_pool_compactions_total", "Files rewritten while they were served.")
UNQUEUED_GROUPS = counter(
    "forge_pool_unqueued_groups_total", "Groups told by a scan although their queue entry is lost."
)
CLOSED_READS = counter(
    "forge_pool_closed_reads_total",
    "Reads of whole closed trajectories, by their comparison with the seal: verified, unverified "
    "(closed by a version without digests) or damaged.",
    ["outcome"],
)
FREED_GROUPS = counter("forge_pool_freed_groups_total", "Groups of which only the books are left.")
FREED_RECORDS = counter("forge_pool_freed_records_total", "Turns and rewards freed.")
ORPHANS = counter("forge_pool_orphans_total", "Tasks given up that have trajectories and no group.")
FREED_BYTES = counter("forge_pool_freed_bytes_total", "Payload freed.")
DAMAGED_ENTRIES = counter(
    "forge_pool_damaged_entries_total", "Settled groups that are kept: their entry is damaged."
)
COVERED_STEP = gauge("forge_pool_covered_step", "What up to it was trained may be freed.")
REPAIRS = counter(
    "forge_pool_repairs_total",
    "Damaged records: repaired from a copy, left without one, or overwritten by a new state.",
    ["outcome"],
)
REPLICA_LAG = gauge(
    "forge_pool_replica_lag_commits", "Commits that the follower has not confirmed."
)
CATCH_UPS = counter("forge_pool_catch_ups_total", "Followers brought up to date.", ["way"])
REPLICAS_IN_SYNC = gauge(
    "forge_pool_replicas_in_sync", "Replicas that have all that was acknowledged."
)
LEADS = gauge("forge_pool_leads", "1 while this instance leads its shard, 0 while it follows.")
