"""Inventories of `forge deploy`: defaults, and one clear line for each mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import forge.cli.deploy
from forge.cli.deploy.inventory.inventory import Inventory
from forge.cli.deploy.inventory.inventory_file import read_inventory
from forge.core.errors import InvalidArgument
from tests.support.deploy.inventories import RELEASE, TWO_HOSTS

HOST = '[hosts.alpha]\naddress = "10.0.0.1"\n'
SERVICES = "[hosts.alpha.services]\netcd = 1\n"
SHARED = "checkpoints = '/mnt/checkpoints'\n" + HOST + SERVICES
RANKS_OF_B = """
[hosts.b]
address = '10.0.0.2'
gpus = {gpus}
services = {{ trainer-rank = {ranks} }}
"""
PUBLISHING_RANKS = "\n[settings.trainer]\npublish_from = 'ranks'\n"
EXAMPLE = Path(forge.cli.deploy.__file__).with_name("example.toml")


def read(text: str) -> Inventory:
    return read_inventory(text, source="cluster.toml", release=RELEASE)


def errors_of(text: str) -> list[str]:
    with pytest.raises(InvalidArgument) as refused:
        read(text)
    return str(refused.value).splitlines()


def test_inventory_counts_become_units() -> None:
    """Numbered instances, roles of inference, and replicas by shard."""
    alpha, beta = read(TWO_HOSTS).hosts
    assert alpha.units == [
        "forge-etcd.service",
        "forge-pool-replica@s0.service",
        "forge-scheduler@1.service",
        "forge-inference@prefill-1.service",
        "forge-inference@decode-1.service",
        "forge-inference@decode-2.service",
        "forge-inference@router-1.service",
        "forge-gateway@1.service",
        "forge-gateway@2.service",
        "forge-console@1.service",
        "forge-pool-backup@pool-replica-s0.timer",
    ]
    # A replicated shard has its timer on its first host.
    assert beta.units[-2:] == ["forge-feed@math.service", "forge-pool-backup@pool-1.timer"]
    assert beta.login == "root@10.0.0.2"
    assert read(TWO_HOSTS).missing() == []


def test_example_inventory_is_complete_and_shows_every_key() -> None:
    """As `forge deploy init` writes it, and with all comments removed from its keys."""
    text = EXAMPLE.read_text()
    assert read(text).missing() == []
    keys = [line.removeprefix("# ") for line in text.splitlines()]
    shown = "\n".join(line for line in keys if "=" in line or line.startswith("["))
    top, _, tables = shown.partition("[hosts.forge-1]")
    everything = tomllib.loads(
        "\n".join(line for line in top.splitlines() if "`" not in line)
        + "\n[hosts.forge-1]"
        + tables.replace("or `both = 1`", "")
    )
    assert set(everything) == {
        *("cluster", "model", "checkpoints", "min_trainer_hosts", "certificate_days"),
        *("backup", "hosts", "settings"),
    }
    keys_of_host = {"address", "login", "names", "gpus", "services", "env", "settings"}
    assert set(everything["hosts"]["forge-1"]) == keys_of_host


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("hosts", "cluster.toml is not TOML: "),
        ("", "no host is named; add [hosts.NAME]"),
        ("clutser = 'a'\n" + HOST + SERVICES, "no key clutser; did you mean cluster?"),
        ("cluster = 7\n" + HOST + SERVICES, "cluster = 7 is not allowed"),
        ("hosts = 3", "hosts = 3 is not allowed: a table [hosts]"),
        ("[hosts]\na = 3", "hosts.a = 3 is not allowed: a table [hosts.a]"),
        (
            "[hosts.'a.b']\naddress = 'x'\nservices = {etcd = 1}",
            "'a.b' is not allowed: a host name",
        ),
        ("[hosts.a]\nservices = {etcd = 1}", "hosts.a.address = '' is not allowed: an IP address"),
        ("[hosts.a]\naddress = '10.0.0'\nservices = {etcd = 1}", "'10.0.0' is not allowed"),
        (HOST + SERVICES + "decoder = 1", "no key hosts.alpha.services.decoder; did you mean"),
        (HOST + SERVICES + "decode = 10", "decode = 10 is not allowed: a whole number from 0 to 9"),
        (HOST + SERVICES + "decode = true", "decode = True is not allowed"),
        (HOST + SERVICES + "pool-replica = 's0'", "is not allowed: a list of texts"),
        (
            HOST + SERVICES + "pool-replica = ['s0']",
            "'s0' is on alpha; a replicated shard is on two",
        ),
        (HOST + SERVICES + "pool-replica = ['1']", "'1' is not allowed: names that begin with"),
        (HOST + "[hosts.alpha.services]\npool = 1", "no host has services.etcd = 1"),
        (
            HOST + SERVICES + "[hosts.b]\naddress = '10.0.0.2'\nservices = {etcd = 1}",
            "2 hosts have services.etcd = 1; an even number",
        ),
        (
            HOST + SERVICES + "[hosts.b]\naddress = '10.0.0.1'\nservices = {pool = 1}",
            "hosts.b.address = '10.0.0.1' is not allowed: it is that of hosts.alpha",
        ),
        (
            HOST.replace("10.0.0.1", "127.0.0.1")
            + SERVICES
            + "[hosts.b]\naddress = '10.0.0.2'\nservices = {pool = 1}",
            "hosts.alpha.address = '127.0.0.1' is not allowed: other hosts do not reach it",
        ),
        (HOST + SERVICES + "[hosts.b]\naddress = 'b'", "hosts.b.services is empty"),
        (
            HOST + "gpus = 1\n" + SERVICES + "decode = 2",
            "hosts.alpha.gpus = 1 is not allowed: 2 workers, trainers and ranks take one each",
        ),
        (
            HOST + SERVICES + "[hosts.alpha.env.decode-1]\nA = '1'",
            "no key hosts.alpha.env.decode-1; no instance takes variables",
        ),
        (
            HOST + SERVICES + "decode = 1\n[hosts.alpha.env.decode-1]\nA = 1",
            "hosts.alpha.env.decode-1.A = 1 is not allowed: a text of one line",
        ),
        ("backup = true\n" + HOST + SERVICES, "backup = True is not allowed: a table [backup]"),
        ("[backup]\non = 1\n" + HOST + SERVICES, "no key backup.on; did you mean"),
        (
            "[backup]\nat = 'hourly; reboot'\n" + HOST + SERVICES,
            "backup.at = 'hourly; reboot' is not allowed: a time of systemd, like",
        ),
        (
            "[backup]\nfull_every = 'weekly'\n" + HOST + SERVICES,
            "backup.full_every = 'weekly' is not allowed: a time like 12h or 7d",
        ),
        (
            "[backup]\nkeep = 0\n" + HOST + SERVICES,
            "backup.keep = 0 is not allowed: a whole number from 1 to 1000",
        ),
        (HOST + SERVICES + "feed = 1", "hosts.alpha.services.feed = 1 is not allowed: a list"),
        (HOST + SERVICES + "feed = ['../a']", "'../a' is not allowed: names that begin with"),
        (
            HOST + SERVICES + "feed = ['a', 'a']",
            "hosts.alpha.services.feed = ['a', 'a'] is not allowed: each name once",
        ),
        (HOST + SERVICES + "pool-backup = ['s0']", "no key hosts.alpha.services.pool-backup"),
        (
            HOST + SERVICES + "trainer-rank = 65",
            "hosts.alpha.services.trainer-rank = 65 is not allowed: a whole number from 0 to 64",
        ),
        (
            HOST + SERVICES + "trainer-rank = 2\ntrainer = 1",
            "hosts.alpha.services.trainer is not allowed beside hosts.alpha.services.trainer-rank",
        ),
        (
            HOST + "gpus = 1\n" + SERVICES + "trainer-rank = 2",
            "hosts.alpha.gpus = 1 is not allowed: 2 workers, trainers and ranks take one each",
        ),
        (
            HOST + SERVICES + "trainer-rank = 12\nagents = 1" + PUBLISHING_RANKS,
            "trainer-rank = 12 is not allowed with publish_from = 'ranks': its ports from 7250 on "
            "reach 7261 of forge-agents@1.service; set FORGE_PORT to the first of 12 free ones in "
            "[hosts.alpha.env.trainer-rank]",
        ),
        (
            HOST + SERVICES + "trainer-rank = 2\n[settings.trainer]\nranks = 2",
            "settings.trainer.ranks is not allowed with trainer-rank: it follows from the hosts",
        ),
        (
            SHARED + "trainer-rank = 2\n" + RANKS_OF_B.format(ranks=1, gpus=0),
            "hosts.b.services.trainer-rank = 1 is not allowed: hosts.alpha has 2, and each host",
        ),
        (
            SHARED + "trainer-rank = 2\n" + RANKS_OF_B.format(ranks=2, gpus=2),
            "hosts.b.gpus = 2 is not allowed: all ranks of the trainer have GPUs, or none",
        ),
        (
            HOST + SERVICES + "trainer-rank = 2\n" + RANKS_OF_B.format(ranks=2, gpus=0),
            "checkpoints = '' is not allowed with trainer-rank on several hosts",
        ),
        (
            HOST + SERVICES + "trainer-rank = 2\n[hosts.alpha.env.trainer-rank-0]\nA = '1'",
            "no key hosts.alpha.env.trainer-rank-0; did you mean trainer-rank?",
        ),
        (
            "min_trainer_hosts = 2\n" + HOST + SERVICES + "trainer-rank = 2",
            "min_trainer_hosts = 2 is not allowed: 1 of the hosts have services.trainer-rank",
        ),
        (
            "min_trainer_hosts = 1\n"
            + SHARED.replace("10.0.0.1", "10.0.0.9")
            + "trainer-rank = 2\n"
            + RANKS_OF_B.format(ranks=2, gpus=0).replace("10.0.0.2", "10.0.0.10"),
            "hosts.alpha must not be the first host with trainer-rank: with min_trainer_hosts rank "
            "0 is on the host whose address is the first as a text; put hosts.b (10.0.0.10) before",
        ),
        (HOST + SERVICES + "[settings.engine]\na = 1", "no key settings.engine; did you mean"),
        (
            HOST + SERVICES + "[settings.pool]\netcd = 'x'",
            "settings.pool.etcd = 'x' is not allowed: it follows from the hosts",
        ),
        (
            HOST + SERVICES + "[settings.pool]\nmetrics_port = 9",
            "settings.pool.metrics_port = 9 is not allowed: each instance has its own; set "
            "FORGE_METRICS_PORT in [hosts.NAME.env.INSTANCE]",
        ),
        (
            HOST + "names = ['a.example', 'bad name']\n" + SERVICES,
            "hosts.alpha.names = 'bad name' is not allowed: an IP address or DNS name",
        ),
        (
            "model = 'models/policy'\n" + HOST + SERVICES,
            "model = 'models/policy' is not allowed: an absolute path, the same on every host",
        ),
    ],
)
def test_wrong_inventory_is_one_line(text: str, line: str) -> None:
    """It names the file, the key, the value and what to do."""
    (found,) = errors_of(text)
    assert found.startswith("cluster.toml") and line in found


def test_ports_of_ranks_that_reach_no_other_service_are_right() -> None:
    """Few ranks, ranks elsewhere, a runner elsewhere, or weights from rank 0 alone."""
    many = HOST + SERVICES + "trainer-rank = 12\nagents = 1"
    moved = "[hosts.alpha.env.{name}]\nFORGE_PORT = '{port}'\n"
    for text in (
        HOST + SERVICES + "trainer-rank = 11\nagents = 1" + PUBLISHING_RANKS,
        many + PUBLISHING_RANKS + moved.format(name="trainer-rank", port=17250),
        many + PUBLISHING_RANKS + moved.format(name="agents-1", port=7200),
        many,
    ):
        assert read(text).rank_hosts[0].ranks > 10


def test_every_mistake_of_an_inventory_has_its_line() -> None:
    """All are named at once."""
    text = "clutser = 1\n" + HOST + "gpus = -1\n" + SERVICES + "decode = 'x'"
    assert len(errors_of(text)) == 3
