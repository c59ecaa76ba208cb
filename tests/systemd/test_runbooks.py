"""The run-books of docs/runbooks, run as they stand on three hosts: `make test-systemd`.

Each host is a Debian 12 with its own systemd; a bridge connects them, with TLS between all services
and in etcd. Hosts lose their power and their disks. The tests use the same hosts, one after the
other, and no group that was once counted is ever missing.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import count

import pytest

from tests.support.systemd.bare_host import missing
from tests.support.systemd.installed import ROOT, Installed
from tests.support.systemd.runbook import RunBook
from tests.support.systemd.three_hosts import NEXT_RELEASE, ThreeHosts
from tests.support.systemd.work import until

PAGES = ROOT / "docs/runbooks"
GROUPS = 8
"""Of one submission."""
Book = Callable[[str], RunBook]

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "possible here")


@pytest.fixture(scope="module")
def three(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeHosts]:
    """The booted hosts, without a service of Forge."""
    three = ThreeHosts(installed, tmp_path_factory.mktemp("three"))
    yield three
    three.close()


class Work:
    """Tasks that are submitted and trained while the pages run."""

    def __init__(self, three: ThreeHosts) -> None:
        self._three = three
        self._firsts = count(step=GROUPS)
        self.submitted = 0
        self.without_trajectories = 0
        """Trained groups whose shard was declared lost: they cannot be trained again."""

    def submit(self) -> None:
        """A submission is acknowledged when the command returns."""
        first = next(self._firsts)
        self._three.submit(first, first + GROUPS)
        self.submitted += GROUPS

    def all_trained(self, *, tombstoned: int = 0) -> None:
        """Wait; then accepted = trained + tombstoned + pending, with nothing pending."""
        trained = self.submitted - tombstoned
        until(lambda: self._counted().get("trained") == trained)
        expected = {"trained": trained, "tombstoned": tombstoned}
        assert self._counted() == {state: groups for state, groups in expected.items() if groups}

    def _counted(self) -> Mapping[str, int]:
        counted = self._three.groups()
        # An outage of the pool counts nothing.
        assert not counted or sum(counted.values()) == self.submitted
        return counted


@pytest.fixture(scope="module")
def work(three: ThreeHosts) -> Work:
    return Work(three)


@pytest.fixture(scope="module")
def book(three: ThreeHosts) -> Book:
    """A page by its name; it remembers the blocks that ran."""
    return functools.cache(lambda name: RunBook(PAGES / f"{name}.md", three.hosts))


def until_well(three: ThreeHosts, *, services: int) -> None:
    """Wait until so many processes are ready and no problem is listed."""

    def well() -> bool:
        status = three.status()
        ready = [one for one in status["services"] if one["state"] in ("ready", "standby")]
        return not status["problems"] and len(ready) == len(status["services"]) == services

    until(well)


def leads(three: ThreeHosts, kind: str, host: str) -> bool:
    """Whether this host's instance of a kind is the leader."""
    address = f"10.0.0.{host.rpartition('-')[2]}:"
    return any(
        (one["kind"], one["role"]) == (kind, "leader") and one["address"].startswith(address)
        for one in three.status()["services"]
    )


def test_three_hosts_get_an_etcd_with_tls(three: ThreeHosts, work: Work, book: Book) -> None:
    """From three installed hosts to a cluster that trains."""
    page = book("etcd_cluster")
    page.run("Set it up", 0, 1, 2)
    until(lambda: page.run("Set it up", 3, check=False).count(" is healthy") == 3)
    page.run("Set it up", *range(4, 9))
    until_well(three, services=10)
    assert "trainer" in page.run("Set it up", 9)
    work.submit()
    work.all_trained()


def test_an_upgrade_rolls_through_and_back(three: ThreeHosts, work: Work, book: Book) -> None:
    """Every process changes its release while tasks are trained, and changes it back."""
    page = book("upgrade")
    versions = lambda: {one["version"] for one in three.status()["services"]}  # noqa: E731
    (before,) = versions()
    for number in range(1, 9):
        work.submit()
        page.run("Upgrade", number)
    until_well(three, services=10)
    assert versions() == {NEXT_RELEASE}
    assert NEXT_RELEASE in page.run("Upgrade", 9)
    work.submit()
    page.run("Rollback")
    until_well(three, services=10)
    assert versions() == {before}
    work.submit()
    work.all_trained()


def test_a_lost_trainer_host_is_replaced(three: ThreeHosts, work: Work, book: Book) -> None:
    """Its power is cut while it trains, its disk is gone, and a member of etcd with it."""
    page, etcd = book("trainer_host_lost"), book("etcd_cluster")
    three.hosts["forge-2"].run("systemctl", "restart", "forge-trainer@1")
    until(lambda: leads(three, "trainer", "forge-3"))
    work.submit()
    three.hosts["forge-3"].kill()
    work.submit()
    until(lambda: leads(three, "trainer", "forge-2"))
    assert "steps trained" in page.run("With a standby and a shared directory", 0)
    work.all_trained()
    three.replace("forge-3")
    etcd.run("A member is lost", 0)
    etcd.run("Set it up", 0)
    assert etcd.run("A member is lost", 1, 2, 3).count(" is healthy") == 3
    page.run("With a standby and a shared directory", 1)
    until_well(three, services=10)


def test_backups_are_restored(three: ThreeHosts, work: Work, book: Book) -> None:
    """All copies of the shard are lost, and the checkpoints, and all members of etcd. What the
    backup has is there, and what was trained after the checkpoint is trained again."""
    page, etcd = book("backup_restore"), book("etcd_cluster")
    page.run("Checkpoints")
    work.submit()
    work.all_trained()
    assert "is whole" in page.run("Pool")
    assert "shard s0" in page.run("From a timer")
    step = three.status()["trainer"]["step"]
    page.run("Restore a shard", *range(4))
    until(lambda: "trajectories" in page.run("Restore a shard", 4, check=False))
    page.run("Restore a shard", 5, 6)
    until(lambda: "copies in sync: 2" in page.run("Restore a shard", 7, check=False))
    page.run("Restore the checkpoints")
    until(lambda: (three.status()["trainer"] or {}).get("step") == step)
    work.all_trained()
    page.run("etcd")
    page.run("Restore etcd", 0, 1)
    until(lambda: etcd.run("Set it up", 3, check=False).count(" is healthy") == 3)
    page.run("Restore etcd", 2)
    until_well(three, services=10)
    work.submit()
    work.all_trained()


def test_a_lost_pool_host_is_replaced(three: ThreeHosts, work: Work, book: Book) -> None:
    """The survivor continues alone if it must, and has two copies again on another host."""
    page = book("pool_host_lost")
    work.submit()
    three.hosts["forge-2"].kill()
    page.run("A replicated shard", 3)
    work.submit()
    work.all_trained()
    page.run("A replicated shard", 4)
    page.run("A replicated shard", 0)
    until(lambda: "copies in sync: 2" in page.run("A replicated shard", 1, check=False))
    page.run("A replicated shard", 2)
    until_well(three, services=10 - 1)
    work.submit()
    work.all_trained()


def test_a_shard_is_retired_and_one_is_declared_lost(
    three: ThreeHosts, work: Work, book: Book
) -> None:
    """The groups of a second shard move while the cluster trains; another one loses its disk."""
    page = book("retired_shard")
    host, services = three.hosts["forge-3"], len(three.status()["services"])
    start = ("systemctl", "enable", "--now", "forge-pool@1")
    host.run(*start)
    until_well(three, services=services + 1)
    work.submit()
    work.all_trained()
    work.submit()
    assert "is retired" in page.run("Retire a shard", 0)
    page.run("Retire a shard", 1)
    until_well(three, services=services)
    assert "forge-3-1" not in page.run("Retire a shard", 2)
    work.all_trained()

    # The name is free for an empty store.
    host.run("rm", "-rf", "/var/lib/forge/pool-1")
    host.run(*start)
    until_well(three, services=services + 1)
    work.submit()
    work.all_trained()
    host.run("systemctl", "kill", "--signal=KILL", "forge-pool@1")
    host.run("systemctl", "disable", "--now", "forge-pool@1")
    host.run("rm", "-rf", "/var/lib/forge/pool-1")
    until(lambda: len(three.status()["services"]) == services)
    declared = page.run("Declare a shard lost", check=False)
    (settled,) = re.findall(r"is declared lost: 0 .*tombstoned, (\d+) settled groups", declared)
    work.without_trajectories += int(settled)
    work.submit()
    work.all_trained()


def test_a_run_without_any_checkpoint_starts_over(
    three: ThreeHosts, work: Work, book: Book
) -> None:
    """The refusal names the lineage, and the setting ends it: every group is trained again, except
    those whose trajectories a lost shard had: they are tombstoned."""
    host = three.hosts["forge-3"]
    host.run("systemctl", "stop", "forge-trainer@1")
    host.run("bash", "-c", "rm -rf /mnt/checkpoints/*")
    host.run("systemctl", "start", "forge-trainer@1", check=False)
    until(lambda: host.show("forge-trainer@1", "ActiveState") == "failed")
    book("trainer_host_lost").run("Without any checkpoint")
    until(lambda: three.status()["trainer"] is not None)
    work.all_trained(tombstoned=work.without_trajectories)


def test_every_block_of_the_pages_was_run(book: Book) -> None:
    """The next release is installed before the hosts boot: they reach no package index."""
    for page in sorted(PAGES.glob("*.md")):
        missed = [text for text in book(page.stem).missed if "pip install" not in text]
        assert not missed, page
