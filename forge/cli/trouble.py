"""What the scheduler says is wrong, for `forge run`, `forge status` and `forge queue status`.

Owns the wording around the scheduler's own texts; it decides nothing.
"""

from __future__ import annotations

from forge.v1 import scheduler_pb2


def troubles(status: scheduler_pb2.GetSchedulerStatusResponse | None) -> dict[str, str]:
    """One line each, by what makes two of them the same: why nothing is trained, and which pool
    shards are awaited. Empty while all is well."""
    if status is None:
        return {}
    found = {}
    if status.HasField("stall"):
        minutes = status.untrained_s / 60
        found[f"stall {status.stall.cause}"] = (
            f"Nothing was trained for {minutes:.0f} min: {status.stall.text}"
        )
    if status.shards_away and status.stall.cause != "shard_away":
        names = ", ".join(status.shards_away)
        found[f"away {names}"] = (
            f"Awaited: pool shard {names}. It does not answer; its groups wait, and training goes "
            "on without them."
        )
    return found
