"""The choice of a gateway for a rollout.

Owns the rule: the gateway with the fewest rollouts of this runner; among equals, rendezvous
hashing, so many runners with few rollouts still use all gateways. A rollout keeps its gateway. A
gateway that did not answer is avoided for a short time.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from forge.agents.rollout import Gateway
from forge.core.errors import Unavailable
from forge.runtime.coordination import Discovery, Instance
from forge.runtime.rpc.channel import Channels
from forge.v1.gateway_pb2_grpc import GatewayServiceStub

AVOID_S = 5.0
"""Time for which a dead process stays in discovery."""


class Gateways:
    """The live gateways, and the number of this runner's rollouts on each."""

    def __init__(
        self,
        discovery: Discovery,
        channels: Channels,
        *,
        wait_s: float,
        scheme: str = "http",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._discovery = discovery
        self._channels = channels
        self._wait_s = wait_s
        self._scheme = scheme
        self._clock = clock
        self._rollouts: Counter[str] = Counter()
        self._avoid_until_s: dict[str, float] = {}

    async def acquire(self, trajectory_id: str) -> Gateway:
        """Returns a gateway for a new rollout; `release` has to follow. Raises `Unavailable`."""
        try:
            live = await self._discovery.wait(timeout_s=AVOID_S, where=self._trusted)
        except Unavailable:
            live = await self._discovery.wait(timeout_s=self._wait_s, where=_speaks_http)
        chosen = least_loaded(live, self._rollouts, trajectory_id)
        self._rollouts[chosen.instance_id] += 1
        return Gateway(
            instance_id=chosen.instance_id,
            http_url=f"{self._scheme}://{chosen.metadata['http']}",
            grpc_address=chosen.address,
            channel=self._channels.get(chosen.address),
            stub=self._channels.stub(GatewayServiceStub, chosen.address),
        )

    def release(self, gateway: Gateway) -> None:
        """Observes the end of a rollout on this gateway."""
        self._rollouts[gateway.instance_id] -= 1
        if self._rollouts[gateway.instance_id] <= 0:
            del self._rollouts[gateway.instance_id]

    def avoid(self, gateway: Gateway) -> None:
        """Prefers other gateways for a short time, because this one did not answer."""
        now_s = self._clock()
        kept = {at: until for at, until in self._avoid_until_s.items() if until > now_s}
        # By address: after a restart with the same instance id it is not avoided.
        self._avoid_until_s = kept | {gateway.grpc_address: now_s + AVOID_S}

    def _trusted(self, instance: Instance) -> bool:
        return _speaks_http(instance) and (
            self._avoid_until_s.get(instance.address, 0.0) <= self._clock()
        )


def least_loaded(instances: Iterable[Instance], rollouts: Mapping[str, int], key: str) -> Instance:
    """Returns the instance with the fewest rollouts; among equals, by rendezvous hash of `key`.

    Raises `Unavailable` without instances.
    """

    def rank(instance: Instance) -> tuple[int, bytes]:
        digest = hashlib.blake2b(f"{key}@{instance.instance_id}".encode(), digest_size=8)
        return rollouts.get(instance.instance_id, 0), digest.digest()

    ranked = min(instances, key=rank, default=None)
    if ranked is None:
        raise Unavailable("no gateway is registered")
    return ranked


def _speaks_http(instance: Instance) -> bool:
    return "http" in instance.metadata
