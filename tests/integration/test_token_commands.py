"""`forge token` against real services: roles, expiry, revocation, hosts without the key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from forge.cli.connection import person
from forge.core.errors import FailedPrecondition
from forge.runtime.coordination import Coordinator
from forge.runtime.security.credentials import Security
from forge.runtime.security.issued_tokens import read_revocations, records, renew, revoke
from forge.runtime.security.tokens import Claims, Keyring, unverified_claims
from tests.support.runtime.command import run_command
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.service_process import start_service
from tests.support.runtime.waiting import until
from tests.support.scheduler.cluster import SchedulerCluster, make_task

pytestmark = pytest.mark.commands


class Host:
    """A machine with the `forge` command; only one with `key_file` has the cluster's key."""

    def __init__(self, etcd: EtcdServer, cluster: str, *credential: str, token: str = "") -> None:
        self._system = ["--etcd", etcd.endpoint, "--cluster", cluster, *credential]
        self._environ = {"FORGE_TOKEN": token}

    async def types(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        ended = await run_command(*words, *self._system, environ=self._environ)
        return ended.returncode, ended.stdout.strip(), ended.stderr.strip()


class System:
    """A scheduler, and hosts with and without the key."""

    def __init__(self, forge: SchedulerCluster, etcd: EtcdServer, cluster: str, key: Path) -> None:
        self.forge = forge
        self._etcd = etcd
        self._cluster = cluster
        self.key_host = Host(etcd, cluster, "--key-file", str(key))

    def host_of(self, token: str) -> Host:
        return Host(self._etcd, self._cluster, token=token)

    async def issue(self, role: str, *options: str) -> tuple[str, str]:
        """A new token and its id."""
        words = ("token", "issue", role, "--subject", f"{role}-host", *options)
        code, token, errors = await self.key_host.types(*words)
        assert (code, errors) == (0, "")
        claims = self.forge.keyring.verify(token, now_s=0.0)
        return token, claims.token_id


@pytest_asyncio.fixture
async def system(
    forge: SchedulerCluster, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> AsyncIterator[System]:
    """With a leader."""
    forge.start_scheduler()
    await forge.leader()
    yield System(forge, etcd, cluster, tmp_path / "key")


async def test_operator_token_works_until_it_is_revoked(system: System) -> None:
    """The roles limit the commands; revocation reaches running services through the watch."""
    token, token_id = await system.issue("operator")
    operator = system.host_of(token)
    code, out, _ = await operator.types("queue", "pause")
    assert (code, out.partition(";")[0]) == (0, "paused")
    code, out, _ = await system.key_host.types("token", "list")
    assert code == 0
    assert f"{token_id}  operator  operator-host" in out
    assert f"issued by {person()}" in out
    assert out.endswith("valid")

    viewer = system.host_of((await system.issue("viewer"))[0])
    code, _, errors = await viewer.types("queue", "resume")
    assert (code, "needs scope operator; the token of viewer-host has viewer" in errors) == (
        2,
        True,
    )
    assert (await viewer.types("queue", "status"))[0] == 0

    code, out, _ = await system.key_host.types("token", "revoke", token_id)
    assert (code, out.endswith("revoked")) == (0, True)
    assert f"revoked by {person()}" in out
    (scheduler,) = system.forge.schedulers
    await scheduler.until_logged("token_revoked")
    code, _, errors = await operator.types("queue", "resume")
    assert (code, f"token {token_id} of operator-host is revoked" in errors) == (2, True)


async def test_audit_log_names_person_token_and_target_of_each_change(system: System) -> None:
    """Of a holder of a token and of the key; refused calls too, reads not."""
    token, token_id = await system.issue("operator")
    viewer, viewer_id = await system.issue("viewer")
    assert (await system.host_of(token).types("queue", "pause"))[0] == 0
    assert (await system.host_of(token).types("queue", "status"))[0] == 0
    assert (await system.host_of(viewer).types("queue", "resume"))[0] == 2
    assert (await system.key_host.types("queue", "resume"))[0] == 0
    (scheduler,) = system.forge.schedulers
    lines = [
        (line["subject"], line["token_id"], line["scopes"], line["targets"], line["code"])
        for line in scheduler.logged("audit")
        if line["method"] == "SchedulerService/SetActivity"
    ]
    (key_id,) = {line[1] for line in lines} - {token_id, viewer_id}
    paused, running = ({"activity": f"ACTIVITY_{name}"} for name in ("PAUSED", "RUNNING"))
    assert lines == [
        ("operator-host", token_id, ["operator"], paused, "OK"),
        ("viewer-host", viewer_id, ["viewer"], running, "PERMISSION_DENIED"),
        (person(), key_id, ["service"], running, "OK"),
    ]
    assert not [x for x in scheduler.logged("audit") if "Status" in x["method"]]


async def test_tokens_are_issued_and_revoked_only_with_the_key(system: System) -> None:
    """One line says so, also for a wrong role and a wrong lifetime."""
    admin = system.host_of((await system.issue("admin"))[0])
    for words, said in (
        (("issue", "viewer", "--subject", "x"), "this command needs --key-file"),
        (("revoke", "0123"), "this command needs --key-file"),
    ):
        code, _, errors = await admin.types("token", *words)
        assert (code, errors) == (2, f"forge: {said}: the key of the cluster")
    for mistake, said in (
        (("issue", "root", "--subject", "x"), "role 'root' must be one of viewer, operator"),
        (("issue", "admin", "--subject", "x", "--life", "1y"), "must be a time like 90s, 15m"),
        (("issue", "admin", "--subject", "x", "--life", "999d"), "at most 366 days"),
        (("revoke", "v1.a.b"), "takes the id of a token"),
    ):
        code, _, errors = await system.key_host.types("token", *mistake)
        assert (code, said in errors, errors.count("\n")) == (2, True, 0), errors


async def test_service_that_starts_late_refuses_revoked_tokens(system: System) -> None:
    """It reads the revocations before it listens."""
    token, token_id = await system.issue("operator")
    assert (await system.key_host.types("token", "revoke", token_id))[0] == 0
    (first,) = system.forge.schedulers
    led = (await system.forge.leader()).instance_id
    await system.forge.kill(first)
    system.forge.start_scheduler()
    await system.forge.leader(other_than=led)
    code, _, errors = await system.host_of(token).types("queue", "status")
    assert (code, "is revoked" in errors) == (2, True)


async def test_revocation_outlives_the_data_of_etcd(own_etcd: EtcdServer, cluster: str) -> None:
    """A running service keeps its last view; expired records are removed with the next change."""
    coordinator = await Coordinator.connect(own_etcd.endpoint, cluster=cluster)
    try:
        await revoke(coordinator, "stolen", by="a")
        security = Security(Keyring.from_bytes(b"k" * 32))
        await read_revocations(coordinator, security)
        assert security.revoked.keys() == {"stolen"}
        raw = await coordinator.get("tokens")
        assert raw is not None
        old = b'{"old": {"subject": "", "scopes": [], "audience": [], "issued_unix_s": 0.0, '
        old += b'"expires_unix_s": 1.0, "revoked_unix_s": 1.0}}'
        await coordinator.compare_and_swap("tokens", old, expected_revision=raw.mod_revision)
        await read_revocations(coordinator, security)
        assert security.revoked.keys() == {"stolen"}
        await revoke(coordinator, "other", by="a")
        assert (await records(coordinator)).keys() == {"other"}
    finally:
        await coordinator.close()


async def test_runner_without_the_key_leases_by_its_token(
    system: System, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """Its token leases rollouts and does nothing else."""
    file = tmp_path / "token"
    words = ("token", "issue", "runner", "--subject", "r", "--out", str(file))
    assert (await system.key_host.types(*words))[0] == 0
    assert file.stat().st_mode & 0o077 == 0
    token = file.read_text().strip()
    argv = ("--etcd", etcd.endpoint, "--cluster", cluster, "--log-file", str(tmp_path / "r.log"))
    runner = start_service("forge.agents", "run", *argv, "--token-file", str(file))
    try:
        await system.forge.submit([make_task("a")])

        async def leased() -> bool:
            return (await system.forge.status()).running_rollouts > 0

        await until(leased)
    finally:
        runner.kill()
        runner.wait()
    code, _, errors = await system.host_of(token).types("queue", "pause")
    assert (code, "needs scope operator" in errors) == (2, True)


async def test_runner_renews_its_token_until_it_is_revoked(
    system: System, etcd: EtcdServer, cluster: str, tmp_path: Path
) -> None:
    """Its renewal has the same id, and a later expiry; revoking the id ends every renewal."""
    file, state = tmp_path / "token", tmp_path / "state"
    words = ("token", "issue", "runner", "--subject", "r", "--life", "4s", "--renewable", "1h")
    assert (await system.key_host.types(*words, "--out", str(file)))[0] == 0
    argv = ("--etcd", etcd.endpoint, "--cluster", cluster, "--log-file", str(tmp_path / "r.log"))
    tokens = ("--token-file", str(file), "--token-state-file", str(state))
    runner = start_service("forge.agents", "run", *argv, *tokens)
    issued = unverified_claims(file.read_text().strip())
    try:
        await until(state.exists)
        first = unverified_claims(state.read_text().strip())
        assert (first.token_id, first.subject) == (issued.token_id, "r")
        assert first.expires_unix_s > issued.expires_unix_s
        assert first.audience == {"SchedulerService"}
        await until(
            lambda: (
                unverified_claims(state.read_text().strip()).expires_unix_s > first.expires_unix_s
            )
        )
        assert (await system.key_host.types("token", "revoke", issued.token_id))[0] == 0
        await asyncio.to_thread(runner.wait)
        assert "is revoked" in (tmp_path / "r.log").read_text()
    finally:
        runner.kill()
        runner.wait()


async def test_token_that_is_not_renewable_is_not_renewed(system: System) -> None:
    """Neither one issued so, nor one whose time is over, nor an unrecorded one."""
    _, token_id = await system.issue("runner", "--renewable", "0s")
    _, late_id = await system.issue("runner", "--renewable", "1h")
    keyring, coordinator = system.forge.keyring, system.forge.coordinator
    runner = Claims(subject="r", scopes=frozenset({"runner"}), token_id=token_id)
    for claims, now_s in (
        (runner, time.time()),
        (replace(runner, token_id=late_id), time.time() + 3601.0),
        (replace(runner, token_id="unknown"), time.time()),
        (replace(runner, token_id=late_id, scopes=frozenset({"service"})), time.time()),
    ):
        with pytest.raises(FailedPrecondition, match="renewable"):
            await renew(coordinator, keyring, claims, now_s=now_s)
    late = replace(runner, token_id=late_id)
    _, renewed = await renew(coordinator, keyring, late, now_s=time.time() + 3000.0)
    issued = (await records(coordinator))[late_id]
    assert renewed.expires_unix_s == issued.renewable_until_unix_s
