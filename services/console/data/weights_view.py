"""The published weights: versions, which worker serves which, and the hold."""

from __future__ import annotations

from typing import Any

from forge.client.weights import WeightSteering
from forge.v1 import trainer_pb2


class WeightsView:
    """Reads the weights of a cluster from its trainer."""

    def __init__(self, steering: WeightSteering) -> None:
        self._steering = steering

    async def read(self) -> dict[str, Any]:
        """The state as plain data. Raises `Unavailable` without a trainer."""
        return weights_row(await self._steering.listing())


def weights_row(listing: trainer_pb2.ListWeightsResponse) -> dict[str, Any]:
    """Versions, the newest first, workers and the hold."""
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
