"""Which gateway a rollout gets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from forge.agents.gateways import AVOID_S, Gateways, least_loaded
from forge.core.errors import Unavailable
from forge.runtime.coordination import Instance
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Keyring
from tests.support.agents.scripted_gateway import Instances


def instances(count: int) -> tuple[Instance, ...]:
    return tuple(
        Instance(
            kind="gateway",
            instance_id=f"gateway-{number}",
            address=f"127.0.0.1:{9000 + number}",
            metadata={"http": f"127.0.0.1:{8000 + number}"},
            revision=1,
        )
        for number in range(count)
    )


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gateways(clock: Clock) -> Gateways:
    channels = Channels(Security(Keyring.from_bytes(b"k" * 32)))
    found = Instances(*instances(3))
    return Gateways(found, channels, wait_s=1.0, clock=clock)  # type: ignore[arg-type]


async def test_rollouts_are_spread_evenly_over_gateways(gateways: Gateways) -> None:
    """Each new rollout goes to the gateway with the fewest."""
    chosen = Counter([(await gateways.acquire(f"t{i}:0:0")).instance_id for i in range(30)])
    assert set(chosen.values()) == {10}


async def test_gateway_of_an_ended_rollout_is_chosen_next(gateways: Gateways) -> None:
    """The gateway that was released is the next to be chosen."""
    held = [await gateways.acquire(f"t{i}:0:0") for i in range(3)]
    gateways.release(held[1])
    assert (await gateways.acquire("t9:0:0")).instance_id == held[1].instance_id


def test_idle_runners_choose_different_gateways() -> None:
    """The trajectory decides among equals, so runners with one rollout each are spread."""
    chosen = Counter(least_loaded(instances(4), {}, f"t{i}:0:0").instance_id for i in range(400))
    assert len(chosen) == 4
    assert min(chosen.values()) > 50


async def test_failed_gateway_is_avoided_until_its_lease_would_expire(
    gateways: Gateways, clock: Clock
) -> None:
    """No new rollout goes there until its lease would have run out."""
    failed = await gateways.acquire("t0:0:0")
    gateways.avoid(failed)
    others = {(await gateways.acquire(f"t{i}:0:0")).instance_id for i in range(8)}
    assert failed.instance_id not in others
    clock.now_s += AVOID_S
    assert (await gateways.acquire("t9:0:0")).instance_id == failed.instance_id


async def test_gateway_restarted_at_another_address_is_used_again(clock: Clock) -> None:
    """The same name at a new address is a new process."""
    found = Instances(*instances(1))
    channels = Channels(Security(Keyring.from_bytes(b"k" * 32)))
    gateways = Gateways(found, channels, wait_s=1.0, clock=clock)  # type: ignore[arg-type]
    gateways.avoid(await gateways.acquire("t0:0:0"))
    restarted = replace(instances(1)[0], address="127.0.0.1:9999")
    found.instances = (*found.instances, restarted)
    assert (await gateways.acquire("t1:0:0")).grpc_address == "127.0.0.1:9999"


async def test_failed_gateway_is_tried_if_no_other_is_left(gateways: Gateways) -> None:
    """Avoiding is a preference."""
    for number in range(3):
        gateways.avoid(await gateways.acquire(f"t{number}:0:0"))
    assert (await gateways.acquire("t9:0:0")).http_url.startswith("http://127.0.0.1:80")


def test_no_gateway_is_unavailable() -> None:
    """The error says that no gateway is registered."""
    with pytest.raises(Unavailable, match="no gateway"):
        least_loaded((), {}, "t0:0:0")
