"""`forge deploy apply`: the order of starts and restarts; and transports."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from forge.cli.deploy.cluster.apply import apply
from forge.cli.deploy.cluster.cluster import StepFailed, last_cause
from forge.cli.deploy.cluster.transport import Local, Ssh, transport_for
from forge.cli.deploy.render.render import rendered_hosts
from forge.cli.deploy.render.rendered import Manifest
from forge.core.errors import FailedPrecondition, Unavailable
from tests.support.deploy.fake_etcd import FakeEtcd
from tests.support.deploy.fake_hosts import FakeHosts
from tests.support.deploy.inventories import RELEASE, SMALL, rendered

ETCD, SCHEDULER = "forge-etcd.service", "forge-scheduler@1.service"
WORKER = "forge-inference@decode-1.service"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rendered")
    rendered(SMALL, out)
    return out


def applied(hosts: FakeHosts, out: Path) -> list[tuple[str, str]]:
    """The commands that change units, in their order."""
    apply(hosts.cluster(out), lambda _: None)
    return [
        (host, words.partition("deploy ")[2] or words)
        for host, words in hosts.commands
        if words.startswith(("systemctl start", "systemctl restart"))
        or words.endswith("bootstrap")
        or "deploy prepare-etcd" in words
        or "deploy drain" in words
    ]


def test_first_apply_starts_etcd_then_roles_then_everything(out: Path) -> None:
    """Services need their users in etcd; some are ready only when others are, so none waits."""
    hosts = FakeHosts(rendered_hosts(out), RELEASE)
    hosts.etcd = FakeEtcd(hosts.manifests)
    hosts.needs = {
        "alpha": {"start": [ETCD, SCHEDULER, WORKER]},
        "beta": {"start": [SCHEDULER]},
    }
    assert applied(hosts, out) == [
        ("alpha", "prepare-etcd --new"),
        ("alpha", f"systemctl start --no-block {ETCD}"),
        ("alpha", "prepare-etcd --finish"),
        ("alpha", "bootstrap"),
        ("alpha", f"systemctl start --no-block {SCHEDULER} {WORKER}"),
        ("beta", f"systemctl start --no-block {SCHEDULER}"),
    ]


def test_stopped_and_kept_units_are_reported(out: Path) -> None:
    """Those that left the inventory; a pool's data must be moved first."""
    hosts = FakeHosts(rendered_hosts(out), RELEASE)
    pool = "forge-pool@1.service"
    hosts.needs = {"beta": {"stopped": [WORKER], "kept": [pool]}}
    lines: list[str] = []
    apply(hosts.cluster(out), lines.append)
    assert f"beta: {WORKER} left the inventory: stopped" in lines
    assert any(one.startswith(f"beta: {pool} left the inventory and still") for one in lines)


def test_changed_units_restart_one_after_another(out: Path) -> None:
    """The standby before the leader, and a worker after its drain."""
    hosts = FakeHosts(rendered_hosts(out), RELEASE)
    hosts.needs = {
        "alpha": {"restart": [ETCD, SCHEDULER, WORKER]},
        "beta": {"restart": [SCHEDULER]},
    }
    assert applied(hosts, out) == [
        ("alpha", f"systemctl restart {ETCD}"),
        ("alpha", "bootstrap"),
        ("beta", f"systemctl restart {SCHEDULER}"),
        ("alpha", f"systemctl restart {SCHEDULER}"),
        ("alpha", "drain inference-alpha-decode-1 --wait 120s"),
        ("alpha", f"systemctl restart {WORKER}"),
    ]


def test_apply_without_a_change_touches_no_unit(out: Path) -> None:
    """Users and roles are compared each time."""
    hosts = FakeHosts(rendered_hosts(out), RELEASE)
    assert applied(hosts, out) == [("alpha", "bootstrap")]


def test_apply_waits_for_an_etcd_that_elects_its_leader(out: Path) -> None:
    """And says what it answered last if that takes too long."""
    hosts = FakeHosts(rendered_hosts(out), RELEASE)
    refused = iter([True, True])
    hosts.fails = lambda host, words: words[-1] == "bootstrap" and next(refused, False)
    assert applied(hosts, out) == [("alpha", "bootstrap")] * 3
    hosts.fails = lambda host, words: words[-1] == "bootstrap"
    with pytest.raises(StepFailed, match="planted"):
        apply(hosts.cluster(out), lambda _: None)


def test_failed_restart_has_the_cause_that_the_service_names(out: Path) -> None:
    """Not the commands that systemctl names: the line of this start, among those of systemd."""
    hosts = FakeHosts(rendered_hosts(out), RELEASE)
    hosts.needs = {"beta": {"restart": [SCHEDULER]}}
    hosts.fails = lambda host, words: "restart" in words
    hosts.broken = {(SCHEDULER, RELEASE)}
    hosts.journals = {
        SCHEDULER: """Starting forge-scheduler@1.service - Forge scheduler (1)...
forge scheduler: the cause of an earlier start
Failed to start forge-scheduler@1.service - Forge scheduler (1).
Starting forge-scheduler@1.service - Forge scheduler (1)...
{"event": "starting"}
forge scheduler: http.port = 8001 cannot be bound: Address already in use
forge-scheduler@1.service: Failed with result 'exit-code'.
Failed to start forge-scheduler@1.service - Forge scheduler (1).
"""
    }
    with pytest.raises(StepFailed) as failed:
        apply(hosts.cluster(out), lambda _: None)
    assert str(failed.value) == (
        f"beta: {SCHEDULER} is failed: forge scheduler: http.port = 8001 cannot be bound: Address "
        "already in use"
    )
    hosts.broken = set()
    with pytest.raises(StepFailed, match="planted"):
        apply(hosts.cluster(out), lambda _: None)


@pytest.mark.parametrize(
    ("journal", "cause"),
    [
        ("", "its journal is empty"),
        ("Starting a\nforge pool: old\nStarting a\ntimed out", "timed out"),
        ("forge trainer: model_path is missing\nFailed", "forge trainer: model_path is missing"),
    ],
)
def test_cause_of_a_start_without_a_line_is_that_of_systemd(journal: str, cause: str) -> None:
    """The line of an earlier start is none of this one."""
    assert last_cause(journal) == cause


def test_host_that_is_away_needs_no_installation(out: Path) -> None:
    """The line names the reason, and what helps."""
    hosts = FakeHosts(rendered_hosts(out), RELEASE)
    hosts.away = lambda host, words: host == "beta"
    with pytest.raises(Unavailable) as away:
        apply(hosts.cluster(out), lambda _: None)
    start = "start it, or correct login in the inventory"
    assert str(away.value) == f"beta: ssh beta: No route to host; {start}"
    hosts.away = lambda host, words: False
    hosts.fails = lambda host, words: host == "beta" and words[-1] == "--version"
    with pytest.raises(Unavailable, match=f"install forge {RELEASE} there, or correct login"):
        apply(hosts.cluster(out), lambda _: None)


def test_apply_refuses_another_release_than_that_of_the_hosts(out: Path) -> None:
    """An upgrade rolls; nothing is copied."""
    manifests: dict[str, Manifest] = {
        host: replace(one, release="0.2.0") for host, one in rendered_hosts(out).items()
    }
    hosts = FakeHosts(manifests, RELEASE)
    with pytest.raises(FailedPrecondition, match="forge deploy upgrade changes releases"):
        apply(hosts.cluster(out), lambda _: None)
    assert hosts.copied == {}


def test_hosts_are_installed_at_once(out: Path) -> None:
    """Each waits until the other one has begun; the fault of one has its name."""
    hosts = FakeHosts(rendered_hosts(out), RELEASE)
    both = Barrier(2)
    cluster = hosts.cluster(out)
    found = cluster.on_hosts(lambda host: (both.wait(60.0), host)[1])
    assert found == {"alpha": "alpha", "beta": "beta"}
    hosts.fails = lambda host, words: host == "beta" and words[-1] == "--json"
    with pytest.raises(StepFailed, match=r"^beta: .*planted"):
        apply(cluster, lambda _: None)


def test_local_transport_returns_code_output_and_reason() -> None:
    """Also of a command that is absent, and of one that ends too late."""
    local = transport_for("local")
    assert isinstance(local, Local)
    assert local.run(["cat"], stdin=b"text").output == "text"
    failed = local.run(["sh", "-c", "echo first >&2; echo last >&2; exit 3"])
    assert (failed.code, failed.reason) == (3, "last")
    full = local.run(
        [
            "sh",
            "-c",
            "echo 'tar: ./a: No space left on device' >&2; echo 'tar: Exiting with failure"
            " status due to previous errors' >&2; exit 2",
        ]
    )
    assert full.reason == "tar: ./a: No space left on device"
    assert "not installed" in local.run(["forge-no-such-program"]).reason
    assert "no end within" in local.run(["sleep", "60"], limit_s=0.05).reason


def test_ssh_transport_quotes_words_and_names_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for ssh runs its last word as the remote shell does."""
    program = tmp_path / "ssh"
    program.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ssh = transport_for("root@10.0.0.2")
    assert ssh == Ssh(login="root@10.0.0.2")
    assert ssh.run(["printf", "%s|", "a b", "$HOME", "it's"]).output == "a b|$HOME|it's|"
    program.write_text("#!/bin/sh\necho Connection refused >&2\nexit 255\n")
    refused = ssh.run(["true"])
    assert refused.reason == "ssh root@10.0.0.2: Connection refused" and refused.is_away
