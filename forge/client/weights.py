"""Steering of the served weights: the calls, and what an operator reads from their answers.

Owns the version that a command means without naming one, so that a repeated call means the same.
"""

from __future__ import annotations

from typing import Any

from forge.core.errors import FailedPrecondition
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc.channel import Channels
from forge.runtime.rpc.remote import Remote
from forge.v1 import trainer_pb2 as pb
from forge.v1.trainer_pb2_grpc import TrainerServiceStub

LIST_S = 5.0
CHANGE_S = 600.0
"""Deadline of a change, which writes a version to the trainer's disk."""


class WeightSteering:
    """The weights of a cluster, as its trainer steers them."""

    def __init__(
        self, coordinator: Coordinator, channels: Channels, *, retry_for_s: float = 30.0
    ) -> None:
        self._trainer = Remote(coordinator, channels, kind="trainer", stub=TrainerServiceStub)
        self._retry_for_s = retry_for_s

    async def listing(self) -> pb.ListWeightsResponse:
        """Return versions, workers and the hold."""
        answer: pb.ListWeightsResponse = await self._call(
            "ListWeights", pb.ListWeightsRequest(), timeout_s=LIST_S
        )
        return answer

    async def roll_back(self, version: int, *, on_behalf_of: str = "") -> pb.WeightsHold:
        """Hold one version for all workers. Raises `NotFound`, `ResourceExhausted`."""
        request = pb.RollBackWeightsRequest(weight_version=version, on_behalf_of=on_behalf_of)
        return await self._change("RollBackWeights", request)

    async def start_canary(
        self, version: int, *, share: float, on_behalf_of: str = ""
    ) -> pb.WeightsHold:
        """Hold a second version for a share of the workers. Raises as `roll_back`, and
        `FailedPrecondition`."""
        request = pb.StartWeightCanaryRequest(
            weight_version=version, share=share, on_behalf_of=on_behalf_of
        )
        return await self._change("StartWeightCanary", request)

    async def promote(self, *, on_behalf_of: str = "") -> pb.WeightsHold:
        """End the hold: all workers follow the newest version."""
        request = pb.PromoteWeightsRequest(on_behalf_of=on_behalf_of)
        return await self._change("PromoteWeights", request)

    async def _change(self, method: str, request: Any) -> pb.WeightsHold:
        hold: pb.WeightsHold = (await self._call(method, request, timeout_s=CHANGE_S)).hold
        return hold

    async def _call(self, method: str, request: Any, *, timeout_s: float) -> Any:
        return await self._trainer.call(
            method, request, timeout_s=timeout_s, retry_for_s=self._retry_for_s
        )


def newest_version(listing: pb.ListWeightsResponse) -> int:
    """The newest version that the trainer holds. Raises `FailedPrecondition` without any."""
    if not listing.versions:
        raise FailedPrecondition("the trainer has published no weights yet")
    return listing.versions[-1].weight_version


def earlier_version(listing: pb.ListWeightsResponse) -> int:
    """The version that a rollback returns to: the base of a canary, else the one before the served
    version. Raises `FailedPrecondition` without one."""
    hold = listing.hold
    if hold.canary_version:
        return hold.base_version
    served = hold.base_version or newest_version(listing)
    held = [one.weight_version for one in listing.versions]
    earlier = [version for version in held if version < served]
    if not earlier:
        raise FailedPrecondition(
            f"no version before {served} is held; held: {held}. The trainer's setting "
            "kept_versions is the number of published versions that it keeps"
        )
    return max(earlier)


def lagging(listing: pb.ListWeightsResponse) -> list[pb.WeightsWorker]:
    """Workers that do not yet serve their assigned version."""
    return [one for one in listing.workers if one.weight_version != one.wanted_version]
