"""An etcd with TLS and authentication: each service has its own user, and its own keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
from etcd3aio.auth import AuthService, PermissionType
from etcd3aio.kv import prefix_range_end

from forge.core.errors import StaleFence, Unauthenticated, Unavailable
from forge.runtime.coordination import Coordinator, Login, etcd_users
from forge.runtime.coordination.etcd import Etcd, Refused
from forge.runtime.coordination.etcd_channel import open_channel
from forge.runtime.coordination.etcd_roles import ROLES
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.secure_etcd import SecureEtcd
from tests.support.runtime.waiting import until

CLUSTER = "secure"
WRITTEN = sorted({key for role in ROLES.values() for key in role.writes} | {"other/"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_secure(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[SecureEtcd]:
    """For tests that leave its users alone."""
    made = SecureEtcd(tmp_path_factory.mktemp("secure"), cluster=CLUSTER)
    await made.start()
    yield made
    made.server.stop()


@pytest_asyncio.fixture
async def secure(tmp_path: Path) -> AsyncIterator[SecureEtcd]:
    """For a test that changes it."""
    made = SecureEtcd(tmp_path, cluster=CLUSTER)
    await made.start()
    yield made
    made.server.stop()


def permits(role: tuple[str, ...], key: str) -> bool:
    def covers(one: str) -> bool:
        begins = one.removesuffix("*")
        return key == one or (begins.endswith(("/", "@")) and key.startswith(begins))

    return any(map(covers, role))


@pytest.mark.parametrize("service", ROLES)
async def test_service_reads_and_writes_only_its_own_keys(
    shared_secure: SecureEtcd, service: str
) -> None:
    """No service writes the entry, the record or the lease of another, and only an admin writes
    revocations; the refusal names key and user."""
    coordinator = await shared_secure.connect(service)
    try:
        for key in WRITTEN:
            path = f"{key}of-{service}" if key.endswith("/") else key
            if key.endswith("*"):
                path = f"{key.removesuffix('*')}group/of-{service}"
            if permits(ROLES[service].writes, path):
                found = await coordinator.get(path)
                revision = 0 if found is None else found.mod_revision
                await coordinator.compare_and_swap(path, b"{}", expected_revision=revision)
                continue
            refused = rf"refuses /forge/{CLUSTER}/{path} to {CLUSTER}\.{service}$"
            with pytest.raises(Unavailable, match=refused):
                await coordinator.compare_and_swap(path, b"{}", expected_revision=0)
            if not (permits(ROLES[service].reads, path) or ROLES[service].reads == ("",)):
                with pytest.raises(Unavailable, match=refused):
                    await coordinator.get(path)
        await coordinator.all_instances()
    finally:
        await coordinator.close()


async def test_service_cannot_reach_another_cluster(shared_secure: SecureEtcd) -> None:
    """Clusters share an etcd, and nothing in it."""
    with pytest.raises(Refused, match=r"refuses /forge/other/config/cluster to secure\.admin"):
        await Coordinator.connect(
            shared_secure.endpoint,
            cluster="other",
            credentials=shared_secure.credentials,
            login=shared_secure.login("admin"),
        )


async def test_fake_trainer_cannot_register(shared_secure: SecureEtcd) -> None:
    """A registered trainer gets tokens of its callers. Runners, operators, gateways and hosts with
    only a certificate cannot register one."""
    for service in ("runner", "operator", "admin", "gateway"):
        thief = await shared_secure.connect(service)
        with pytest.raises(Unavailable, match="refuses /forge/secure/services/trainer/t"):
            await thief.register("trainer", "t", "127.0.0.1:1")
        await thief.close()
    with pytest.raises(Refused, match="set etcd_password_file"):
        await shared_secure.connect(None)
    trainer = await shared_secure.connect("trainer")
    registration = await trainer.register("trainer", "t", "127.0.0.1:1")
    await registration.close()
    await trainer.close()


async def test_runner_host_writes_only_its_own_entries(secure: SecureEtcd) -> None:
    """The user of one host cannot replace the entry of a runner on another."""
    changes = await secure.apply(runners=["h1", "h2"])
    assert "secure.runner@h1: writes /forge/secure/services/runner/agents-h1-*" in changes
    first, second = [await secure.connect(f"runner@{host}") for host in ("h1", "h2")]
    entry = await first.register("runner", "agents-h1-0", "127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"agents-h1-0 to secure\.runner@h2$"):
        await second.compare_and_swap("services/runner/agents-h1-0", b"{}", expected_revision=0)
    with pytest.raises(Unavailable, match=r"agents-h10-0 to secure\.runner@h1$"):
        await first.register("runner", "agents-h10-0", "127.0.0.1:1")
    await entry.close()
    for each in (first, second):
        await each.close()


async def test_wrong_password_and_open_etcd_are_refused(
    shared_secure: SecureEtcd, etcd: EtcdServer, tmp_path: Path
) -> None:
    """One line each; a process with a password never works with an etcd without authentication."""
    (tmp_path / "wrong").write_text("wrong")
    login = Login(user="secure.pool", password_file=str(tmp_path / "wrong"))
    said = r"refuses user secure\.pool: etcdserver: "
    for endpoint, credentials, reason in (
        (shared_secure.endpoint, shared_secure.credentials, "authentication failed"),
        (etcd.endpoint, None, "authentication is not enabled"),
    ):
        with pytest.raises(Unauthenticated, match=said + reason) as caught:
            await Coordinator.connect(
                endpoint, cluster=CLUSTER, credentials=credentials, login=login
            )
        assert "\n" not in str(caught.value)


async def test_process_outlives_its_etcd_token(secure: SecureEtcd) -> None:
    """A restart of etcd loses all tokens, and a new password ends those of its user."""
    pool, watcher = await secure.connect("pool"), await secure.connect("scheduler")
    registration = await pool.register("pool", "p0", "127.0.0.1:1", ttl_s=30.0)
    await watcher.discover("pool").wait(timeout_s=30.0)
    await asyncio.to_thread(secure.server.restart)
    revision = await until(lambda: written(pool, b"1", 0))
    Path(secure.login("pool").password_file).write_text("another")
    assert await secure.apply() == ["new password of user secure.pool"]
    assert await written(pool, b"2", revision)
    await registration.update({"a": "1"})
    await watcher.discover("pool").wait(timeout_s=30.0, where=lambda one: bool(one.metadata))
    for each in (pool, watcher):
        await each.close()


async def test_process_outlives_a_restored_etcd(tmp_path: Path) -> None:
    """The restored one is at an earlier position: calls with a token of before get no answer."""
    secure = SecureEtcd(tmp_path, cluster="restored")
    try:
        await secure.start()
        pool = await secure.connect("pool")
        registration = await pool.register("pool", "p", "h:1", ttl_s=2.0)
        revision = await pool.compare_and_swap("pool/x", b"1", expected_revision=0)
        await secure.restore()
        await until(lambda: written(pool, b"2", revision))
        await until(lambda: registration.alive)
        await pool.close()
    finally:
        secure.server.kill()


async def written(coordinator: Coordinator, value: bytes, revision: int) -> int:
    """The new revision; 0 while etcd is unreachable."""
    try:
        return await coordinator.compare_and_swap("pool/x", value, expected_revision=revision)
    except StaleFence:
        found = await coordinator.get("pool/x")
        assert found is not None
        return found.mod_revision
    except Unavailable:
        return 0


async def test_repeated_apply_restores_the_roles(secure: SecureEtcd) -> None:
    """It changes nothing else; password files are readable by their owner only."""
    assert await secure.apply() == []
    assert {one.stat().st_mode & 0o777 for one in secure.passwords.iterdir()} == {0o600}
    channel = await open_channel(secure.endpoint, secure.credentials)
    root = Etcd(channel, endpoints=secure.endpoint, cluster=CLUSTER, login=secure.login("root"))
    await root.log_in()
    await root.administer(
        lambda auth: auth.role_grant_permission(
            "secure.runner", "/forge/", prefix_range_end("/forge/"), perm_type=PermissionType.WRITE
        )
    )
    await root.administer(
        lambda auth: auth.role_revoke_permission("secure.pool", "/forge/secure/tokens")
    )
    await root.close()
    assert await secure.apply() == [
        "secure.pool: reads /forge/secure/tokens",
        "secure.runner: no longer writes /forge/*",
    ]


async def test_other_root_password_is_refused(secure: SecureEtcd, tmp_path: Path) -> None:
    """Only the directory of the first `forge etcd apply` changes users."""
    with pytest.raises(Unauthenticated, match="refuses user root"):
        await secure.apply(tmp_path / "others")


async def test_refused_candidate_leads_once_it_is_permitted(secure: SecureEtcd) -> None:
    """Its campaign waits meanwhile, as during an outage."""
    pool = await secure.connect("pool")
    campaign = asyncio.create_task(pool.campaign("other", "p0"))
    with pytest.raises(Unavailable, match="refuses /forge/secure/leader/other"):
        await pool.get("leader/other")
    channel = await open_channel(secure.endpoint, secure.credentials)
    root = Etcd(channel, endpoints=secure.endpoint, cluster=CLUSTER, login=secure.login("root"))
    await root.log_in()
    grant = partial(
        AuthService.role_grant_permission, role="secure.pool", perm_type=PermissionType.READWRITE
    )
    # The campaign begins with the leader's key.
    for key in ("other/fence", "leader/other"):
        await root.administer(partial(grant, key=f"/forge/secure/{key}"))
    await root.close()
    leadership = await campaign
    assert leadership.alive
    await leadership.resign()
    await pool.close()


async def test_roles_are_applied_over_calls_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """etcd is frozen during the first calls for the second role: these are repeated."""
    made = SecureEtcd(tmp_path, cluster=CLUSTER)
    await asyncio.to_thread(made.server.start)
    monkeypatch.setattr(etcd_users, "TIMEOUT_S", 0.5)
    add_role, calls = etcd_users._Users.add_role, list[str]()

    async def frozen(users: etcd_users._Users, role: str) -> None:
        calls.append(role)
        if len(calls) == 2:
            made.server.freeze()
        try:
            await add_role(users, role)
        except Unavailable:
            made.server.thaw()
            raise

    monkeypatch.setattr(etcd_users._Users, "add_role", frozen)
    try:
        changes = await made.apply()
        assert calls[:2] == calls[2:4] and len(calls) == 2 + 1 + len(ROLES)
        assert changes[-1] == "authentication is enabled" and len(changes) == len({*changes})
        monkeypatch.undo()
        assert await made.apply() == []
    finally:
        made.server.stop()
