"""The published weights: versions, which worker serves which, and the hold."""

from __future__ import annotations

from typing import Any

from forge.client.weights import WeightSteering


async def read_weights(steering: WeightSteering) -> dict[str, Any]:
    """Versions, the newest first, workers and the hold. Raises `Unavailable` without a trainer."""
    listing = await steering.listing()
    hold = listing.hold
    return {
        "versions": [
            {
                "weight_version": one.weight_version,
                "step": one.step,
                "published_unix_s": one.published_unix_s,
                "digest": one.digest,
                "total_bytes": one.total_bytes,
                "on_disk": one.on_disk,
                "trajectories": one.trajectories,
                "mean_reward": one.mean_reward if one.trajectories else None,
                "logprob_gap": one.logprob_gap if one.tokens else None,
            }
            for one in reversed(listing.versions)
        ],
        "workers": [
            {
                "instance": one.instance_id,
                "role": one.role,
                "weight_version": one.weight_version,
                "wanted_version": one.wanted_version,
                "error": one.error,
            }
            for one in listing.workers
        ],
        "hold": {
            "base_version": hold.base_version,
            "canary_version": hold.canary_version,
            "canary_workers": list(hold.canary_workers),
            "subject": hold.subject,
            "since_unix_s": hold.since_unix_s,
        },
    }
