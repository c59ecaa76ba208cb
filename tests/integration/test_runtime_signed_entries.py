"""A process that can write to etcd and has no credential gets no token."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio

from forge.core.errors import Unauthenticated
from forge.runtime.coordination import Coordinator
from forge.runtime.rpc import Channels, Remote
from forge.runtime.security.bearer import Bearer
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Claims, Keyring
from forge.v1 import trainer_pb2
from forge.v1.trainer_pb2_grpc import TrainerServiceStub
from tests.support.runtime.etcd import EtcdServer

KEYRING = Keyring.from_bytes(b"k" * 32)
SERVICE = Security(KEYRING, subject="trainer-0")


class Harvest(grpc.GenericRpcHandler):
    """A server that keeps the authorization of every call."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> None:
        self.tokens += [str(v) for key, v in details.invocation_metadata if key == "authorization"]


@pytest_asyncio.fixture
async def thief() -> AsyncIterator[tuple[Harvest, str]]:
    """A fake trainer and its address."""
    harvest = Harvest()
    server = grpc.aio.server(handlers=[harvest])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield harvest, f"127.0.0.1:{port}"
    await server.stop(0)


async def connect(etcd: EtcdServer, cluster: str, security: Security | None) -> Coordinator:
    return await Coordinator.connect(etcd.endpoint, cluster=cluster, signatures=security)


async def ask(coordinator: Coordinator) -> None:
    """A call to any trainer, as the scheduler or the CLI makes it."""
    channels = Channels(Security(KEYRING, subject="caller"))
    remote = Remote(coordinator, channels, kind="trainer", stub=TrainerServiceStub)
    try:
        request = trainer_pb2.GetTrainerStatusRequest()
        await remote.call("GetTrainerStatus", request, timeout_s=2.0)
    finally:
        await channels.close()


def runner_token() -> Bearer:
    claims = Claims(subject="r", scopes=frozenset({"runner"}), token_id="t")
    return Bearer(text=KEYRING.sign(claims))


@pytest.mark.parametrize(
    "signer",
    [
        None,
        Security(Keyring.from_bytes(b"x" * 32), subject="trainer-0"),
        Security(runner_token(), subject="trainer-0"),
    ],
    ids=["unsigned", "another key", "a runner as a trainer"],
)
async def test_fake_instance_gets_no_token(
    etcd: EtcdServer, cluster: str, thief: tuple[Harvest, str], signer: Security | None
) -> None:
    """Its entry is ignored, so no call is made to it; a caller without the rule sends it a
    token."""
    harvest, address = thief
    theirs = await connect(etcd, cluster, signer)
    ours = await connect(etcd, cluster, SERVICE)
    careless = await connect(etcd, cluster, None)
    try:
        await theirs.register("trainer", "trainer-0", address)
        with pytest.raises(Unauthenticated, match=r"no trainer instance .* has a valid entry"):
            await ask(ours)
        assert harvest.tokens == []
        assert await ours.all_instances() == ()
        with pytest.raises(Exception, match="Method not found"):
            await ask(careless)
        assert len(harvest.tokens) == 1
    finally:
        for each in (theirs, ours, careless):
            await each.close()


async def test_signed_entry_is_valid_for_its_place_and_lease_only(
    etcd: EtcdServer, cluster: str
) -> None:
    """A copy under another id, another kind or without the lease is refused; the original, a change
    of its metadata and a runner with a token are found."""
    ours = await connect(etcd, cluster, SERVICE)
    runner = await connect(etcd, cluster, Security(runner_token()))
    try:
        registration = await ours.register("trainer", "trainer-0", "h:1", metadata={"a": "1"})
        await registration.update({"a": "2"})
        await runner.register("runner", "runner-0", "h:2")
        entry = await ours.get("services/trainer/trainer-0")
        assert entry is not None
        assert json.loads(entry.value)["metadata"] == {"a": "2"}
        for key in ("services/trainer/trainer-1", "services/pool/trainer-0"):
            await ours.compare_and_swap(key, entry.value, expected_revision=0)
        await ours.compare_and_swap("services/trainer/list", b"[]", expected_revision=0)
        found = {one.instance_id for one in await ours.all_instances()}
        assert found == {"trainer-0", "runner-0"}
        (listed,) = await ours.discover("trainer").wait(timeout_s=30.0)
        assert (listed.instance_id, listed.metadata["a"]) == ("trainer-0", "2")
        await ours.compare_and_swap(
            "services/trainer/trainer-0", entry.value, expected_revision=entry.mod_revision
        )
        assert {one.instance_id for one in await ours.all_instances()} == {"runner-0"}
    finally:
        await runner.close()
        await ours.close()


async def test_caller_without_the_key_sends_a_narrowed_token(
    etcd: EtcdServer, cluster: str, thief: tuple[Harvest, str]
) -> None:
    """It cannot verify entries; the received token is refused elsewhere."""
    harvest, address = thief
    security = Security(runner_token(), subject="r")
    ours = await connect(etcd, cluster, security)
    theirs = await connect(etcd, cluster, None)
    channels = Channels(security)
    try:
        await theirs.register("trainer", "trainer-0", address)
        remote = Remote(ours, channels, kind="trainer", stub=TrainerServiceStub)
        request = trainer_pb2.GetTrainerStatusRequest()
        with pytest.raises(Exception, match="Method not found"):
            await remote.call("GetTrainerStatus", request, timeout_s=30.0)
        (caught,) = harvest.tokens
        claims = KEYRING.verify(caught.removeprefix("Bearer "), now_s=0.0)
        assert claims.audience == {"TrainerService"}
    finally:
        await channels.close()
        await theirs.close()
        await ours.close()


async def test_entries_of_an_earlier_release_are_accepted_by_a_setting(
    etcd: EtcdServer, cluster: str
) -> None:
    """For an upgrade, one service after the other."""
    upgrading = Security(KEYRING)
    upgrading.accept_unsigned = True
    earlier = await connect(etcd, cluster, None)
    ours = await connect(etcd, cluster, upgrading)
    try:
        await earlier.register("trainer", "trainer-0", "h:1")
        assert len(await ours.all_instances()) == 1
    finally:
        await ours.close()
        await earlier.close()
