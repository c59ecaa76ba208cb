"""`forge deploy apply`: the order of starts and restarts; and transports."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import pytest

from forge.cli.deploy.cluster.apply import apply
from forge.cli.deploy.cluster.cluster import StepFailed
from forge.cli.deploy.cluster.transport import Local, Ssh, transport_for
from forge.cli.deploy.render.render import rendered_hosts
from forge.cli.deploy.render.rendered import Manifest
from forge.core.errors import FailedPrecondition
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
