"""A trainer on two bare hosts by `forge deploy` with `min_trainer_hosts`: `make test-systemd`.

The hosts mount one directory, as from a file server, and meet in it. The tests use the same hosts,
one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.systemd.bare_host import missing
from tests.support.systemd.installed import Installed
from tests.support.systemd.two_hosts import NEXT, TwoHosts
from tests.support.systemd.work import until

INVENTORY = """
checkpoints = "/mnt/checkpoints"
min_trainer_hosts = 1

[hosts.forge-1]
address = "10.0.0.1"
login = "local"
[hosts.forge-1.services]
etcd = 1
pool = 1
scheduler = 1
router = 1
prefill = 1
decode = 1
gateway = 1
agents = 1

[hosts.forge-2]
address = "10.0.0.2"
services = { trainer-rank = 1 }

[hosts.forge-3]
address = "10.0.0.3"
services = { trainer-rank = 1 }

[settings.scheduler.queue]
concurrency = 16
batch_groups = 4
"""
GROUPS = 8
"""Of one submission."""
OUT = ("--out", "/root/rendered")
RENDER = ("render", "--inventory", "/root/cluster.toml", *OUT)
UNITS = {"forge-2": "forge-trainer-rank@0", "forge-3": "forge-trainer-rank@1"}

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "possible here")


@pytest.fixture(scope="module")
def two(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """A host for all other services, and two for ranks."""
    two = TwoHosts(installed, tmp_path_factory.mktemp("ranks"))
    two.boot("forge-3")
    yield two
    two.close()


def joint_starts(two: TwoHosts, *names: str) -> int:
    """Number of starts of both ranks together, as rank 0 logs them, since the last boot of each of
    these hosts (all that have ranks)."""
    lines = [
        json.loads(line)
        for name in names or UNITS
        for line in two.hosts[name].journal(f"--unit={UNITS[name]}").splitlines()
        if '"event": "ranks_started"' in line
    ]
    return sum(line["dp_shard"] == 2 for line in lines)


def differences(two: TwoHosts) -> list[str]:
    """What `forge deploy check` finds on all hosts."""
    return [
        f"{host['host']}: {one['text']}"
        for host in two.check()["hosts"]
        for one in host["findings"]
        if not one["ok"]
    ]


def train(two: TwoHosts, first: int) -> None:
    """Train the tasks of one submission."""
    before = two.trained()
    two.submit(first, first + GROUPS)
    until(lambda: two.trained() == before + GROUPS)


def test_ranks_of_two_hosts_meet_in_the_shared_directory(two: TwoHosts) -> None:
    """They are one trainer with a shard on each host, and each host is as rendered."""
    (two.first.root / "root/cluster.toml").write_text(INVENTORY)
    two.deploy(*RENDER)
    two.deploy("apply", *OUT)
    until(lambda: joint_starts(two) > 0)
    until(lambda: not two.status()["problems"])
    train(two, 0)
    assert differences(two) == []


def test_survivor_trains_until_the_host_of_rank_0_returns(two: TwoHosts) -> None:
    """Its power fails, and the other host continues from the newest checkpoint as rank 0. When the
    lost one has booted, both are one trainer again and no step is lost."""
    two.hosts["forge-2"].kill()
    train(two, 100)
    step = two.status()["trainer"]["step"]
    before = joint_starts(two, "forge-3")
    two.hosts["forge-2"].boot()
    until(lambda: joint_starts(two) > before)
    train(two, 200)
    assert two.status()["trainer"]["step"] > step
    assert differences(two) == []


def test_upgrade_restarts_both_hosts_of_ranks(two: TwoHosts) -> None:
    """All ranks stop before one starts, and both hosts meet again with the new release."""
    before = joint_starts(two)
    two.deploy(*RENDER, release=NEXT)
    shown = two.deploy("upgrade", *OUT, release=NEXT)
    assert f"every instance has release {NEXT}" in shown
    until(lambda: joint_starts(two) > before)
    train(two, 300)
    assert differences(two) == []
