"""`forge deploy upgrade` that fails or is interrupted: the state of the cluster, and the line that
says it and what to do next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forge.cli.deploy import command
from forge.cli.deploy.cluster.transport import Ended
from forge.cli.deploy.cluster.upgrade import JOURNAL, read_journal
from forge.cli.deploy.render.lock import locked
from forge.cli.deploy.render.render import rendered_hosts
from forge.cli.deploy.render.rendered import Manifest
from forge.cli.main import app
from tests.support.deploy.fake_hosts import FakeHosts
from tests.support.deploy.inventories import SMALL, rendered

BEFORE, TO = "0.1.0", "0.2.0"
WORKER = "forge-inference@decode-1.service"


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    """Two hosts: schedulers on both, the leader and a worker on alpha."""
    out = tmp_path_factory.mktemp("rendered")
    rendered(SMALL, out)
    return {host: replace(one, release=TO) for host, one in rendered_hosts(out).items()}


@pytest.fixture
def hosts(manifests: dict[str, Manifest], monkeypatch: pytest.MonkeyPatch) -> FakeHosts:
    """The hosts that the command reaches."""
    hosts = FakeHosts(manifests, BEFORE)
    monkeypatch.setattr(command, "_hosts", lambda out, **_: hosts.cluster(out))
    monkeypatch.setattr(command, "_leave_link", lambda: None)
    return hosts


def upgraded(out: Path, *words: str, code: int) -> list[str]:
    """The lines of one start of the command, which ends with an exit code."""
    ended = CliRunner().invoke(app, ["deploy", "upgrade", "--out", str(out), *words])
    assert ended.exit_code == code, ended.output
    return ended.output.splitlines()


def test_lost_connection_turns_no_upgrade_around(hosts: FakeHosts, tmp_path: Path) -> None:
    """The command on the host is repeated: each changes nothing more then."""
    gaps = count()
    hosts.away = lambda host, words: "restart" in words and next(gaps) % 2 == 0
    assert upgraded(tmp_path, code=0)[-1] == f"every instance has release {TO}"
    assert hosts.releases() == {TO}


@pytest.mark.parametrize("first", ["fails", "is no JSON"])
def test_late_status_of_a_loaded_host_refuses_no_upgrade(
    hosts: FakeHosts, tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leaders are read again, and restart last; without any status nothing is changed."""
    looks = count()
    is_status = lambda words: words[:2] == ["bash", "-lc"]  # noqa: E731
    effect = FakeHosts._effect

    def late(self: FakeHosts, host: str, words: list[str]) -> Ended:
        if first == "is no JSON" and is_status(words) and next(looks) < 1:
            return Ended(code=0, output="forge: etcd has not listed the services\n")
        return effect(self, host, words)

    monkeypatch.setattr(FakeHosts, "_effect", late)
    hosts.fails = lambda _, words: first == "fails" and is_status([*words]) and next(looks) < 1
    assert upgraded(tmp_path, code=0)[-1] == f"every instance has release {TO}"
    restarts = [host for host, words in hosts.commands if "restart forge-scheduler@1" in words]
    assert restarts == ["beta", "alpha"]


def test_late_etcd_turns_no_upgrade_around(hosts: FakeHosts, tmp_path: Path) -> None:
    """Users and roles come last, when everything runs the release; they are applied again."""
    looks = count()
    hosts.fails = lambda _, words: words[-1] == "bootstrap" and next(looks) < 2
    assert upgraded(tmp_path, code=0)[-1] == f"every instance has release {TO}"
    assert hosts.releases() == {TO}


def test_upgrade_without_any_status_changes_nothing(hosts: FakeHosts, tmp_path: Path) -> None:
    """The line has the reason."""
    hosts.fails = lambda _, words: [*words][:2] == ["bash", "-lc"]
    assert "planted: forge status" in upgraded(tmp_path, code=1)[-1]
    assert hosts.releases() == {BEFORE} and not (tmp_path / JOURNAL).exists()


def test_lost_host_keeps_no_other_from_the_rollback(hosts: FakeHosts, tmp_path: Path) -> None:
    """beta has the new release and goes away: alpha has that of before again. The line names the
    host, the units that are left and the command, which finishes the rollback."""
    hosts.away = lambda host, words: host == "beta" and hosts.links["beta"] == TO
    *_, line = upgraded(tmp_path, code=1)
    assert line == (
        f"forge: the rollback to {BEFORE} is not finished, 3 steps are left: beta: "
        f"/opt/forge/{BEFORE}/bin/python -m forge.cli.main deploy install --rollback {TO}: "
        f"ssh beta: No route to host. 1 of 3 units may run {TO}, the others run {BEFORE}. "
        f"Mend that, then repeat: forge deploy upgrade --out {tmp_path}"
    )
    assert hosts.links == {"alpha": BEFORE, "beta": TO}
    hosts.away = lambda host, words: False
    assert (
        f"rolled back to release {BEFORE}, which every unit runs" in upgraded(tmp_path, code=1)[-1]
    )
    assert hosts.releases() == {BEFORE}


def test_unit_that_fails_in_the_rollback_keeps_no_other_from_it(
    hosts: FakeHosts, tmp_path: Path
) -> None:
    """The leader fails with the new release, the worker's turn was before; it does not start with
    the release of before either. All others run that."""
    hosts.broken = {(WORKER, TO), (WORKER, BEFORE)}
    *_, line = upgraded(tmp_path, code=1)
    assert "is not finished, 1 steps are left: alpha: " + WORKER + " is failed" in line
    assert f"1 of 3 units may run {TO}" in line
    assert hosts.releases() == {BEFORE}
    hosts.broken = set()
    upgraded(tmp_path, code=1)
    journal = read_journal(tmp_path / JOURNAL)
    assert journal is not None and journal.state == "rolled back"


def test_instance_that_never_registers_rolls_back(hosts: FakeHosts, tmp_path: Path) -> None:
    """Its unit is active, and discovery never shows it: the reason says so."""
    hosts.unregistered = {("inference-alpha-decode-1", TO)}
    lines = upgraded(tmp_path, code=1)
    reason = f"alpha: {WORKER}: inference-alpha-decode-1 is not in discovery"
    assert f"failed: {reason}" in lines and f"rolling back to {BEFORE}: {reason}" in lines
    assert lines[-1].endswith("Mend it, then repeat the command: it begins a new upgrade")
    assert hosts.releases() == {BEFORE}


def test_second_upgrade_beside_the_first_changes_nothing(hosts: FakeHosts, tmp_path: Path) -> None:
    """Nor does a render, which would change the files that the first one copies."""
    with locked(tmp_path):
        (line,) = upgraded(tmp_path, code=2)
        assert re.search(r"in use by another forge deploy, process \d+: this one has changed", line)
        inventory = tmp_path / "cluster.toml"
        inventory.write_text(SMALL)
        words = ["deploy", "render", "--inventory", str(inventory), "--out", str(tmp_path)]
        ended = CliRunner().invoke(app, words)
        assert ended.exit_code == 2 and "another forge deploy" in ended.output
    assert hosts.commands == [] and not (tmp_path / "inventory.toml").exists()
    assert upgraded(tmp_path, code=0)


def interrupt_at(hosts: FakeHosts, *, word: str) -> None:
    """Ctrl-C once the command with a word has its effect."""

    def interrupted(host: str, words: Sequence[str]) -> bool:
        if word in words:
            hosts.kills = lambda host, words: False
            raise KeyboardInterrupt
        return False

    hosts.kills = interrupted


def test_interrupted_upgrade_says_how_it_continues(hosts: FakeHosts, tmp_path: Path) -> None:
    """Exit code 130; the same command continues it."""
    interrupt_at(hosts, word="restart")
    *_, line = upgraded(tmp_path, code=130)
    command = f"forge deploy upgrade --out {tmp_path}"
    assert line == (
        "interrupted at step 4 of 12, which may still run on its host: 1 of 3 units may run "
        f"{TO}, the others run {BEFORE}. To continue: {command}; to undo it: {command} --rollback"
    )
    assert upgraded(tmp_path, code=0)[-1] == f"every instance has release {TO}"


def test_interrupted_upgrade_is_undone_at_will(hosts: FakeHosts, tmp_path: Path) -> None:
    """Also by two commands: an interrupted rollback continues without the option."""
    interrupt_at(hosts, word=WORKER)
    upgraded(tmp_path, code=130)
    interrupt_at(hosts, word="--rollback")
    *_, line = upgraded(tmp_path, "--rollback", code=130)
    assert line.startswith("interrupted at step 1 of 8 of the rollback, which may still run")
    assert line.endswith(f"To continue: forge deploy upgrade --out {tmp_path}")
    upgraded(tmp_path, code=1)
    assert hosts.releases() == {BEFORE}


def test_upgrade_interrupted_before_its_begin_changed_nothing(
    hosts: FakeHosts, tmp_path: Path
) -> None:
    """It has only looked at the hosts."""
    interrupt_at(hosts, word="--version")
    *_, line = upgraded(tmp_path, code=130)
    assert line.startswith("interrupted") and hosts.releases() == {BEFORE}
    assert not (tmp_path / JOURNAL).exists()
