"""`forge deploy` on two bare hosts, and a third, from one inventory: `make test-systemd`.

Each host is a Debian 12 with its own systemd; the first reaches the others by ssh. The tests use
the same hosts, one after the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.support.systemd.bare_host import missing
from tests.support.systemd.installed import SOFTWARE, Installed
from tests.support.systemd.two_hosts import BROKEN, NEXT, RELEASE, TwoHosts
from tests.support.systemd.work import until

INVENTORY = """
checkpoints = "/mnt/checkpoints"

[hosts.forge-1]
address = "10.0.0.1"
login = "local"
[hosts.forge-1.services]
etcd = 1
pool-replica = ["s0"]
scheduler = 1
router = 1
prefill = 1
decode = 1
gateway = 1

[hosts.forge-2]
address = "10.0.0.2"
[hosts.forge-2.services]
pool-replica = ["s0"]
scheduler = 1
trainer = 1
agents = 1
feed = ["lessons"]
[hosts.forge-2.env.feed-lessons]
FORGE_FEED = "--epochs 1 --group-size 2"

[backup]
at = "*:*:0/20"

[settings.scheduler.queue]
concurrency = 16
batch_groups = 4
"""
THIRD = """
[hosts.forge-3]
address = "10.0.0.3"
services = { etcd = 1 }
"""
GROUPS = 8
"""Of one submission."""
OUT = ("--out", "/root/rendered")
RENDER = ("render", "--inventory", "/root/cluster.toml", *OUT)
BACKUPS = "/var/backups/forge"
JOURNAL = "root/rendered/upgrade.json"

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "possible here")


@pytest.fixture(scope="module")
def two(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """The booted hosts, without a file of Forge's in /etc."""
    two = TwoHosts(installed, tmp_path_factory.mktemp("two"))
    yield two
    two.close()


def problems(two: TwoHosts) -> list[str]:
    """What both hosts find, by one command on the first."""
    return [
        f"{host['host']}: {one['text']}"
        for host in two.check()["hosts"]
        for one in host["findings"]
        if not one["ok"]
    ]


def versions(two: TwoHosts) -> set[str]:
    return {one["version"] for one in two.status()["services"]}


def members(two: TwoHosts) -> str:
    """The members of etcd; the last column of a learner is true."""
    root = 'ETCDCTL_USER="root:$(cat /etc/forge/etcd-users/root)" etcdctl member list'
    return two.first.run("bash", "-lc", f"ETCDCTL_API=3 {root}")


def until_well(two: TwoHosts) -> None:
    """Nine processes: of the replicated shard discovery has the leader alone."""
    until(lambda: not two.status()["problems"] and len(two.status()["services"]) == 9)


def test_two_bare_hosts_become_a_cluster(two: TwoHosts) -> None:
    """One inventory, two commands; the cluster trains the tasks of its feed, and each host is as
    rendered."""
    (two.first.root / "root/cluster.toml").write_text(INVENTORY)
    two.write_tasks("forge-2", "/var/lib/forge/feed/lessons.jsonl", 0, GROUPS)
    two.deploy(*RENDER)
    two.deploy("apply", *OUT)
    until_well(two)
    until(lambda: two.trained() == GROUPS)
    # The feed has ended with its only epoch, which is no difference.
    assert two.hosts["forge-2"].show("forge-feed@lessons", "ActiveState") == "inactive"
    assert problems(two) == []
    doctor = two.first.run("bash", "-lc", "forge doctor --settings /etc/forge", check=False)
    found = [line for line in doctor.splitlines() if line.startswith("BAD")]
    # Those are of the machine that runs the test, and of its load.
    machine = ("memory", "sandbox", "no end within", "fsync")
    assert [line for line in found if not any(word in line for word in machine)] == []


def test_timer_makes_backups_that_restore(two: TwoHosts) -> None:
    """A full one, then increments; a restored increment has every trained step."""
    step = two.status()["trainer"]["step"]
    follows = rf"^(\S+): shard s0, .*newest step {step}, follows s0-"

    def newest() -> re.Match[str] | None:
        shown = two.first.run("bash", "-lc", f"forge pool watermark {BACKUPS}", check=False)
        return re.search(follows, shown, re.M)

    until(lambda: newest() is not None)
    found = newest()
    assert found is not None and step > 0
    restore = ("runuser", "-u", "forge-pool", "--", f"{SOFTWARE}/.venv/bin/forge", "pool")
    shown = two.first.run(*restore, "restore", found[1], f"{BACKUPS}/restored")
    assert "is restored and whole" in shown and f"its newest step is {step};" in shown
    assert "is whole" in two.first.run(*restore, "check", f"{BACKUPS}/restored")
    assert two.first.show("forge-pool-backup@pool-replica-s0", "Result") == "success"


def test_check_finds_what_was_changed_and_apply_mends_it(two: TwoHosts) -> None:
    """A setting, a mode, a stopped unit, a unit that is not enabled; the exit code is 1."""
    host = two.hosts["forge-2"]
    host.run("sed", "-i", "s/batch_groups = 4/batch_groups = 5/", "/etc/forge/scheduler.toml")
    host.run("chmod", "0644", "/etc/forge/agents-token")
    host.run("systemctl", "stop", "forge-agents@1")
    host.run("systemctl", "disable", "forge-scheduler@1")
    two.first.run("systemctl", "stop", "forge-pool-backup@pool-replica-s0.timer")
    found = "\n".join(problems(two))
    for text in (
        "forge-1: forge-pool-backup@pool-replica-s0.timer is inactive",
        "forge-2: file /etc/forge/scheduler.toml differs: line ",
        "is 'batch_groups = 5', not 'batch_groups = 4'",
        "/etc/forge/agents-token has mode 0644, not 0600",
        "forge-agents@1.service is inactive",
        "forge-scheduler@1.service is not enabled",
        "forge-scheduler@1.service runs since before the change of /etc/forge/scheduler.toml",
    ):
        assert text in found
    with pytest.raises(AssertionError, match="BAD"):
        host.run("bash", "-lc", "forge deploy check")
    shown = two.deploy("check", *OUT, check=False).splitlines()
    assert shown[1].split()[0] == "forge-1" and shown[1].rstrip().endswith("1 difference")
    assert shown[2].split()[0] == "forge-2" and shown[2].rstrip().endswith("5 differences")
    two.deploy("apply", *OUT)
    until_well(two)
    assert problems(two) == []


def test_upgrade_rolls_while_tasks_are_trained(two: TwoHosts) -> None:
    """The rolling process is killed in the middle, and the same command continues. Nothing is
    lost."""
    before = two.trained()
    two.deploy(*RENDER, release=NEXT)
    plan = two.deploy("upgrade", *OUT, "--dry-run", release=NEXT)
    assert "restart forge-trainer@1.service" in plan and versions(two) == {RELEASE}
    two.submit(100, 100 + GROUPS)
    command = f"/opt/forge/{NEXT}/bin/python -m forge.cli.main deploy upgrade {' '.join(OUT)}"
    two.first.run("systemd-run", "--unit=roll", "bash", "-lc", command)

    def done() -> int:
        file = two.first.root / JOURNAL
        return int(json.loads(file.read_text())["done"]) if file.exists() else 0

    until(lambda: done() >= 6)
    two.first.run("systemctl", "kill", "--signal=KILL", "roll")
    assert versions(two) != {NEXT}
    two.submit(200, 200 + GROUPS)
    shown = two.deploy("upgrade", *OUT, release=NEXT)
    assert f"every instance has release {NEXT}" in shown and "not drained" not in shown
    assert versions(two) == {NEXT}
    until(lambda: two.trained() == before + 2 * GROUPS)
    until_well(two)
    assert problems(two) == []


def test_failing_upgrade_rolls_back(two: TwoHosts) -> None:
    """A scheduler of the release does not start: the pools that had it get the one of before. The
    units of the release differ, and units that ran through it all need no restart."""
    before, (release,) = two.trained(), versions(two)
    two.deploy(*RENDER, release=BROKEN)
    two.submit(300, 300 + GROUPS)
    shown = two.deploy("upgrade", *OUT, release=BROKEN, check=False)
    assert f"rolled back to release {release}" in shown
    assert "failed: forge-" in shown and "forge-scheduler@1.service" in shown
    until_well(two)
    assert versions(two) == {release}
    assert problems(two) == [f"{name}: the last render is not installed" for name in two.hosts]
    until(lambda: two.trained() == before + GROUPS)


def test_cluster_grows_by_its_inventory(two: TwoHosts) -> None:
    """The trainer gets two ranks, which meet and start from its checkpoint, and etcd two members
    more."""
    before, (release,) = two.trained(), versions(two)
    step = two.status()["trainer"]["step"]
    two.boot("forge-3")
    text = INVENTORY.replace("trainer = 1", "trainer-rank = 2\netcd = 1") + THIRD
    (two.first.root / "root/cluster.toml").write_text(text)
    two.deploy(*RENDER, release=release)
    shown = two.deploy("apply", *OUT, release=release)
    assert shown.index("forge-2: promote") < shown.index("forge-3: announce it as a learner")
    until_well(two)
    assert members(two).count(", started, ") == 3 and "true" not in members(two)
    journal = two.hosts["forge-2"].journal("--unit=forge-trainer-rank@0")
    assert '"event": "ranks_started"' in journal
    assert two.status()["trainer"]["step"] >= step > 0
    two.submit(400, 400 + GROUPS)
    until(lambda: two.trained() == before + GROUPS)
    assert problems(two) == []


def test_lost_member_of_etcd_is_replaced(two: TwoHosts) -> None:
    """Its host loses power and disk; the one of the same name joins only when it is named."""
    (release,) = versions(two)
    two.boot("forge-3")
    refused = two.deploy("apply", *OUT, release=release, check=False)
    assert "forge deploy apply --replace-etcd forge-3" in " ".join(refused.split())
    assert members(two).count(", started, ") == 3
    shown = two.deploy("apply", *OUT, "--replace-etcd", "forge-3", release=release)
    assert "remove its lost member" in shown and "restart forge-" not in shown
    assert members(two).count(", started, ") == 3 and "true" not in members(two)
    until_well(two)
    assert problems(two) == []
