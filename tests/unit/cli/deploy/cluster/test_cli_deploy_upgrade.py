"""`forge deploy upgrade`: the order, and what a failure or a kill at each step leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forge.cli.deploy.cluster.cluster import StepFailed, fault
from forge.cli.deploy.cluster.plan import Step, rollback_steps, upgrade_steps
from forge.cli.deploy.cluster.upgrade import JOURNAL, Upgrade, read_journal
from forge.cli.deploy.render.render import rendered_hosts
from forge.cli.deploy.render.rendered import Manifest
from forge.core.errors import FailedPrecondition, Unavailable
from tests.support.deploy.fake_hosts import FakeHosts, Killed
from tests.support.deploy.inventories import RANKS, SMALL, TWO_HOSTS, rendered

BEFORE, TO = "0.1.0", "0.2.0"
LEADERS = {"pool-alpha-s0", "scheduler-alpha-1", "trainer-beta-1"}
FAILING = ("copy", "swap", "restart", "check", "roles")


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    """Two hosts, rendered for the release of after."""
    return manifests_of(TWO_HOSTS, tmp_path_factory.mktemp("rendered"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    """Three units: a test kills at each command."""
    return manifests_of(SMALL, tmp_path_factory.mktemp("rendered"))


def manifests_of(text: str, out: Path) -> dict[str, Manifest]:
    rendered(text, out)
    return {host: replace(one, release=TO) for host, one in rendered_hosts(out).items()}


def rolled(hosts: FakeHosts, out: Path) -> bool:
    """One start of the command."""
    upgrade = Upgrade(hosts.cluster(out), lambda _: None)
    return upgrade.run(upgrade.plan())


def steps_of(manifests: dict[str, Manifest]) -> list[Step]:
    return upgrade_steps(manifests, LEADERS)


def is_command_of(step: Step, host: str, words: Sequence[str]) -> bool:
    """Whether a command is the one that does a step."""
    words = list(words)
    match step.action:
        case "copy":
            found = words[:2] == ["sh", "-c"]
        case "swap":
            found = words[3:5] == ["deploy", "install"] and "--json" in words
        case "back":
            found = "--rollback" in words
        case "drain":
            found = words[3:6] == ["deploy", "drain", step.instance_id]
            return found and host == "alpha"
        case "restart":
            found = words == ["systemctl", "restart", *step.units]
        case "check":
            found = words == ["systemctl", "is-active", step.unit]
        case "roles":
            found = words[-1] == "bootstrap"
    return found and host == step.host


def test_upgrade_rolls_pools_first_and_leaders_last(manifests: dict[str, Manifest]) -> None:
    """Standbys before leaders; workers and runners are drained, one of each role at a time; a host
    swaps before its first unit; etcd is not restarted."""
    steps = steps_of(manifests)
    restarts = [(one.host, *one.units) for one in steps if one.action == "restart"]
    assert restarts == [
        ("beta", "forge-pool@1.service"),
        ("beta", "forge-pool-replica@s0.service"),
        ("alpha", "forge-pool-replica@s0.service"),
        ("beta", "forge-scheduler@1.service"),
        ("alpha", "forge-scheduler@1.service"),
        ("alpha", "forge-inference@prefill-1.service", "forge-inference@decode-1.service"),
        ("alpha", "forge-inference@decode-2.service"),
        ("alpha", "forge-inference@router-1.service"),
        ("beta", "forge-trainer@1.service"),
        ("alpha", "forge-gateway@1.service"),
        ("alpha", "forge-gateway@2.service"),
        ("beta", "forge-agents@1.service"),
        ("beta", "forge-feed@math.service"),
        ("alpha", "forge-console@1.service"),
        ("alpha", "forge-pool-backup@pool-replica-s0.timer"),
        ("beta", "forge-pool-backup@pool-1.timer"),
    ]
    assert [one.kind for one in steps if one.action == "drain"] == [
        *("prefill", "decode", "decode", "agents")
    ]
    actions = [one.action for one in steps]
    assert actions[:3] == ["copy", "copy", "swap"] and actions[-1] == "roles"
    for host in manifests:
        swap = (
            actions.index("swap") if host == "beta" else steps.index(Step(action="swap", host=host))
        )
        assert all(steps.index(one) > swap for one in steps if one.unit and one.host == host)


def test_upgrade_changes_every_release(manifests: dict[str, Manifest], tmp_path: Path) -> None:
    """And a second start of the command says that nothing is left."""
    hosts = FakeHosts(manifests, BEFORE)
    assert rolled(hosts, tmp_path)
    assert hosts.releases() == {TO} and hosts.drained == set()
    with pytest.raises(FailedPrecondition, match="every host has release"):
        rolled(hosts, tmp_path)


def test_failure_at_each_step_rolls_everything_back(
    small: dict[str, Manifest], tmp_path: Path
) -> None:
    """Every unit runs the release of before, no instance stays drained, and the journal says why.
    The next start begins a new upgrade."""
    for number, step in enumerate(steps_of(small)):
        if step.action not in FAILING:
            continue
        hosts = FakeHosts(small, BEFORE)
        # A fault of the new release: a rollback's restart of the same unit succeeds.
        hosts.fails = lambda host, words, step=step, hosts=hosts: (  # type: ignore[misc]
            is_command_of(step, host, words) and (not step.unit or hosts.links[host] == TO)
        )
        out = tmp_path / str(number)
        out.mkdir()
        assert not rolled(hosts, out), step
        assert hosts.releases() == {BEFORE} and hosts.drained == set(), step
        journal = read_journal(out / JOURNAL)
        assert journal is not None and journal.state == "rolled back"
        assert "planted" in journal.reason or step.action == "check"
        assert step.host in journal.reason
        hosts.fails = lambda host, words: False
        assert rolled(hosts, out) and hosts.releases() == {TO}


def test_upgrade_continues_after_a_kill_at_any_command(
    small: dict[str, Manifest], tmp_path: Path
) -> None:
    """Once the command's effect is there and the journal does not know it."""
    whole = FakeHosts(small, BEFORE)
    (tmp_path / "whole").mkdir()
    rolled(whole, tmp_path / "whole")
    for number in range(len(whole.commands)):
        hosts = FakeHosts(small, BEFORE)
        hosts.kills = lambda *_, hosts=hosts, number=number: len(hosts.commands) == number + 1
        out = tmp_path / str(number)
        out.mkdir()
        with pytest.raises(Killed):
            rolled(hosts, out)
        assert rolled(hosts, out), whole.commands[number]
        assert hosts.releases() == {TO} and hosts.drained == set()


def test_rollback_continues_after_a_kill_at_any_command(
    small: dict[str, Manifest], tmp_path: Path
) -> None:
    """A worker fails; the rolling process is killed within the rollback."""

    def failing() -> FakeHosts:
        hosts = FakeHosts(small, BEFORE)
        hosts.broken = {("forge-inference@decode-1.service", TO)}
        return hosts

    whole = failing()
    (tmp_path / "whole").mkdir()
    assert not rolled(whole, tmp_path / "whole")
    first = next(n for n, (_, words) in enumerate(whole.commands) if "--rollback" in words)
    for number in range(first, len(whole.commands)):
        hosts = failing()
        hosts.kills = lambda *_, hosts=hosts, number=number: len(hosts.commands) == number + 1
        out = tmp_path / str(number)
        out.mkdir()
        with pytest.raises(Killed):
            rolled(hosts, out)
        assert not rolled(hosts, out)
        assert hosts.releases() == {BEFORE}


def test_failed_rollback_says_so_and_continues(
    manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """A host that is gone: the same command continues once it is back."""
    hosts = FakeHosts(manifests, BEFORE)
    hosts.broken = {("forge-trainer@1.service", TO)}
    hosts.fails = lambda host, words: "--rollback" in words and host == "beta"
    with pytest.raises(StepFailed, match=r"beta: .*planted"):
        rolled(hosts, tmp_path)
    hosts.fails = lambda host, words: False
    assert not rolled(hosts, tmp_path)
    assert hosts.releases() == {BEFORE}


def test_rollback_at_will_undoes_what_began(manifests: dict[str, Manifest], tmp_path: Path) -> None:
    """Also drains whose restart did not come."""
    hosts = FakeHosts(manifests, BEFORE)
    hosts.kills = lambda host, words: "inference-alpha-decode-1" in words
    with pytest.raises(Killed):
        rolled(hosts, tmp_path)
    assert hosts.drained == {"inference-alpha-prefill-1", "inference-alpha-decode-1"}
    hosts.kills = lambda host, words: False
    upgrade = Upgrade(hosts.cluster(tmp_path), lambda _: None)
    assert not upgrade.run(upgrade.roll_back(upgrade.begun(), "by --rollback"))
    assert hosts.releases() == {BEFORE} and hosts.drained == set()
    with pytest.raises(FailedPrecondition, match="no upgrade is open"):
        upgrade.begun()


def test_workers_that_restart_together_are_rolled_back_together(
    manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """Prefill and decode of a host, of which one fails: one command restarts both again."""
    hosts = FakeHosts(manifests, BEFORE)
    hosts.broken = {("forge-inference@decode-1.service", TO)}
    assert not rolled(hosts, tmp_path)
    assert hosts.releases() == {BEFORE} and hosts.drained == set()
    together = (
        "systemctl restart forge-inference@prefill-1.service forge-inference@decode-1.service"
    )
    assert [words for _, words in hosts.commands].count(together) == 2


def test_failed_drain_stops_nothing(manifests: dict[str, Manifest], tmp_path: Path) -> None:
    """The stop of an instance drains too; the fault is noted."""
    hosts = FakeHosts(manifests, BEFORE, fails=lambda host, words: "drain" in words)
    cluster = hosts.cluster(tmp_path)
    upgrade = Upgrade(cluster, lambda _: None)
    assert upgrade.run(upgrade.plan())
    assert len(cluster.notes) == 4


def test_units_that_left_the_inventory_are_noted(
    small: dict[str, Manifest], tmp_path: Path
) -> None:
    """The swap of an upgrade stops them, or leaves those with data."""
    hosts = FakeHosts(small, BEFORE)
    pool, router = "forge-pool@1.service", "forge-inference@router-1.service"
    hosts.needs = {"beta": {"stopped": [router], "kept": [pool]}}
    cluster = hosts.cluster(tmp_path)
    upgrade = Upgrade(cluster, lambda _: None)
    assert upgrade.run(upgrade.plan())
    assert cluster.notes == [
        f"beta: {router} left the inventory: stopped",
        f"beta: {pool} left the inventory and still runs; move its data, then: "
        f"systemctl disable --now {pool}",
    ]


def test_host_without_the_release_stops_the_upgrade_before_its_begin(
    manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """The line names the host and what to install; no journal is written."""
    hosts = FakeHosts(manifests, BEFORE)
    hosts.fails = lambda host, words: host == "beta" and words[-1] == "--version"
    with pytest.raises(Unavailable, match=r"beta: .*install forge 0\.2\.0 there"):
        rolled(hosts, tmp_path)
    assert not (tmp_path / JOURNAL).exists() and hosts.releases() == {BEFORE}


def test_open_upgrade_refuses_another_release(
    manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """It is finished or undone first."""
    hosts = FakeHosts(manifests, BEFORE, kills=lambda host, words: words[-1] == "--json")
    with pytest.raises(Killed):
        rolled(hosts, tmp_path)
    newer = {host: replace(one, release="0.3.0") for host, one in manifests.items()}
    with pytest.raises(FailedPrecondition, match=r"the upgrade to 0\.2\.0 is not finished"):
        rolled(FakeHosts(newer, BEFORE), tmp_path)


def test_rollback_of_the_first_steps_restarts_nothing(manifests: dict[str, Manifest]) -> None:
    """Copies are no change of a host."""
    assert rollback_steps(steps_of(manifests), 2) == []
    assert [one.action for one in rollback_steps(steps_of(manifests), 3)] == ["back"]


def test_ranks_of_a_trainer_restart_together(tmp_path: Path) -> None:
    """Rank 0 stops first, since its checkpoint is that of all; none starts before all have stopped.
    All of their hosts have the release before, also in a rollback."""
    ranks = manifests_of(RANKS, tmp_path)
    steps = upgrade_steps(ranks, LEADERS)
    together = [str(one) for one in steps if one.kind == "trainer-rank"]
    assert together == [
        "beta: stop forge-trainer-rank@0.service",
        "gamma: stop forge-trainer-rank@1.service",
        "gamma: restart forge-trainer-rank@1.service",
        "beta: restart forge-trainer-rank@0.service",
        "gamma: wait until forge-trainer-rank@1.service is healthy",
        "beta: wait until forge-trainer-rank@0.service is healthy",
    ]
    first = next(at for at, one in enumerate(steps) if one.action == "stop")
    swapped = [one.host for one in steps[:first] if one.action == "swap"]
    assert {"beta", "gamma"} <= {*swapped}
    for begun in range(first + 1, first + 7):
        back = [str(one) for one in rollback_steps(steps, begun)]
        assert [one for one in back if "trainer-rank" in one] == together


def test_failing_ranks_are_rolled_back_together(tmp_path: Path) -> None:
    """No host is left stopped, or with another release."""
    ranks = manifests_of(RANKS, tmp_path)
    hosts = FakeHosts(ranks, BEFORE)
    hosts.broken = {("forge-trainer-rank@0.service", TO)}
    assert not rolled(hosts, tmp_path)
    assert hosts.releases() == {BEFORE}
    hosts.broken = set()
    assert rolled(hosts, tmp_path) and hosts.releases() == {TO}


def test_unhealthy_instances_have_a_reason() -> None:
    """Absent, not serving, of another release, and a shard with one copy."""
    step = Step(
        action="check",
        host="alpha",
        unit="forge-gateway@1.service",
        kind="gateway",
        instance_id="gateway-alpha-1",
    )
    service = {
        "kind": "gateway",
        "instance": "gateway-alpha-1",
        "state": "ready",
        "version": TO,
        "error": "",
        "metadata": {},
    }
    assert fault([service], step, TO) == ""
    assert "not in discovery" in fault([], step, TO)
    assert "no answer" in fault([service | {"state": "no answer"}], step, TO)
    assert "has release 0.2.0, not 0.1.0" in fault([service], step, BEFORE)
    replica = replace(step, unit="forge-pool-replica@s0.service", kind="pool-replica")
    pool = service | {"kind": "pool", "metadata": {"shard": "s0", "copies": "1"}}
    assert "two copies" in fault([pool], replica, TO)
    assert fault([pool | {"metadata": {"shard": "s0", "copies": "2"}}], replica, TO) == ""
