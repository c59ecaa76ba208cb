"""Members of etcd that `forge deploy apply` starts, adds and replaces.

The stand-in refuses what etcd refuses, and a learner beside another one; see `fake_etcd`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from forge.cli.deploy.cluster.apply import apply
from forge.cli.deploy.cluster.cluster import StepFailed
from forge.cli.deploy.cluster.members import read_members
from forge.cli.deploy.render.render import rendered_hosts
from forge.cli.deploy.render.rendered import Manifest
from forge.core.errors import FailedPrecondition, InvalidArgument
from tests.support.deploy.fake_etcd import FakeEtcd
from tests.support.deploy.fake_hosts import FakeHosts, Killed
from tests.support.deploy.inventories import RELEASE, rendered

NAMES = ["a", "b", "c"]
THREE = "".join(
    f"[hosts.{name}]\naddress = '10.0.0.{number}'\nservices = {{ etcd = 1 }}\n"
    for number, name in enumerate(NAMES, start=1)
)
Prepare = Callable[[FakeEtcd], None]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    """Three hosts with a member each."""
    out = tmp_path_factory.mktemp("rendered")
    rendered(THREE, out)
    return rendered_hosts(out)


def hosts_with(manifests: dict[str, Manifest], prepare: Prepare) -> FakeHosts:
    hosts = FakeHosts(manifests, RELEASE)
    hosts.etcd = FakeEtcd(manifests)
    prepare(hosts.etcd)
    return hosts


def applied(hosts: FakeHosts, out: Path, *lost: str) -> list[str]:
    """The lines of one start of the command."""
    lines: list[str] = []
    apply(hosts.cluster(out), lines.append, lost=lost)
    return lines


def whole(hosts: FakeHosts) -> bool:
    """One cluster with three voters that run, and no variables of a start left."""
    etcd = hosts.etcd
    is_whole = etcd.voters() == NAMES and etcd.running == {*NAMES} and not etcd.variables
    return is_whole and etcd.clusters == 1


def grown(etcd: FakeEtcd) -> None:
    etcd.has("a")


def without_c(etcd: FakeEtcd) -> None:
    etcd.has(*NAMES)
    etcd.lose("c")


def test_new_cluster_starts_all_members_at_once(
    manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """None is ready before most are."""
    hosts = hosts_with(manifests, lambda etcd: None)
    lines = applied(hosts, tmp_path)
    assert whole(hosts) and not [line for line in lines if "learner" in line]
    assert [line for line in applied(hosts, tmp_path) if "start" in line or "promote" in line] == []


def test_members_join_one_after_another_as_learners(
    manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """From one to three: the second has its vote before the third is announced."""
    hosts = hosts_with(manifests, grown)
    lines = applied(hosts, tmp_path)
    assert whole(hosts)
    assert [line for line in lines if "etcd" in line and "files" not in line] == [
        "a: users, roles and tokens of etcd",
        "b: announce it as a learner of etcd",
        "b: start forge-etcd.service",
        "b: promote its member of etcd",
        "c: announce it as a learner of etcd",
        "c: start forge-etcd.service",
        "c: promote its member of etcd",
    ]


def test_lost_member_is_replaced_if_its_host_is_named(
    manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """Without the name nothing is removed: its disk may only not be mounted."""
    hosts = hosts_with(manifests, without_c)
    before = dict(hosts.etcd.members)
    with pytest.raises(FailedPrecondition, match=r"c: its member .* --replace-etcd c"):
        applied(hosts, tmp_path)
    assert hosts.etcd.members == before
    lines = applied(hosts, tmp_path, "c")
    assert whole(hosts) and any("remove its lost member" in line for line in lines)


@pytest.mark.parametrize(("prepare", "lost"), [(grown, ()), (without_c, ("c",))])
def test_change_of_members_whose_answer_is_late_is_done_once(
    manifests: dict[str, Manifest], tmp_path: Path, prepare: Prepare, lost: tuple[str, ...]
) -> None:
    """Of a busy host: the command looks before it repeats a change."""
    hosts = hosts_with(manifests, prepare)
    hosts.etcd.late = {"member add", "member promote", "member remove"}
    applied(hosts, tmp_path, *lost)
    assert whole(hosts) and len(hosts.etcd.members) == len(NAMES)


def test_nothing_is_replaced_that_is_not_lost(
    manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """A host whose member runs, and a name that is no host's."""
    hosts = hosts_with(manifests, lambda etcd: etcd.has(*NAMES))
    with pytest.raises(FailedPrecondition, match="b: its member of etcd is not lost"):
        applied(hosts, tmp_path, "b")
    with pytest.raises(InvalidArgument, match="--replace-etcd d: no rendered host"):
        applied(hosts, tmp_path, "d")


def test_no_member_joins_while_another_is_not_well(
    manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """The loss of one more would be an outage. A stopped member with its data is started first."""

    def silent(etcd: FakeEtcd) -> None:
        without_c(etcd)
        etcd.silent.add("b")

    hosts = hosts_with(manifests, silent)
    with pytest.raises(StepFailed, match="etcd: no answer; c: no data of etcd there"):
        applied(hosts, tmp_path, "c")
    hosts = hosts_with(manifests, lambda etcd: etcd.has("a", "b"))
    hosts.fails = lambda host, words: "health" in words
    with pytest.raises(FailedPrecondition, match="c: no member joins etcd while another"):
        applied(hosts, tmp_path)
    assert hosts.etcd.voters() == ["a", "b"]
    hosts = hosts_with(manifests, lambda etcd: etcd.has("a", "b"))
    hosts.etcd.running.discard("b")
    applied(hosts, tmp_path)
    assert whole(hosts)


def test_apply_without_a_quorum_says_what_brings_one(
    manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """Two of three members have lost their data: the line names them and the page."""

    def without_most(etcd: FakeEtcd) -> None:
        without_c(etcd)
        etcd.lose("b")

    hosts = hosts_with(manifests, without_most)
    with pytest.raises(StepFailed, match=r"no answer; b, c: no data of etcd .*Most members are"):
        applied(hosts, tmp_path)


def test_second_learner_waits_for_the_first(manifests: dict[str, Manifest], tmp_path: Path) -> None:
    """An administrator announced the member by hand."""
    hosts = hosts_with(manifests, grown)
    words = ["env", "ETCDCTL_API=3", "ETCDCTL_ENDPOINTS=", "etcdctl", "member", "add", "c"]
    hosts.etcd.answer("a", [*words, "--learner", ""])
    with pytest.raises(FailedPrecondition, match=r"b: .* is about to join etcd; one at a time"):
        applied(hosts, tmp_path)


def test_members_of_another_host_make_no_second_cluster(
    manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """All members of before left the inventory: the services would follow an empty etcd."""
    hosts = hosts_with(manifests, lambda etcd: etcd.has("a"))
    without = manifests | {"a": replace(manifests["a"], units=())}
    hosts.manifests = hosts.etcd.manifests = without
    with pytest.raises(FailedPrecondition, match="a has a member of etcd, and no host with"):
        applied(hosts, tmp_path)
    assert hosts.etcd.clusters == 1


@pytest.mark.parametrize("is_reboot", [False, True])
@pytest.mark.parametrize(
    ("prepare", "lost"), [(lambda etcd: None, ()), (grown, ()), (without_c, ("c",))]
)
def test_members_are_whole_after_a_kill_at_any_command(
    manifests: dict[str, Manifest],
    tmp_path: Path,
    prepare: Prepare,
    lost: tuple[str, ...],
    is_reboot: bool,
) -> None:
    """The same command continues: a new cluster, one that grows, and a lost member. So it does if
    all hosts lose their power then."""
    hosts = hosts_with(manifests, prepare)
    applied(hosts, tmp_path, *lost)
    for number in range(len(hosts.commands)):
        hosts = hosts_with(manifests, prepare)
        hosts.kills = lambda *_, hosts=hosts, number=number: len(hosts.commands) == number + 1
        with pytest.raises(Killed):
            applied(hosts, tmp_path, *lost)
        command = hosts.commands[-1]
        if is_reboot:
            hosts.etcd.reboot()
        # A replaced member with data is no longer lost.
        left = [host for host in lost if host not in hosts.etcd.data]
        applied(hosts, tmp_path, *left)
        assert whole(hosts), command


def test_members_are_read_as_etcdctl_prints_them() -> None:
    """Of etcd 3.4; ids are hexadecimal in its other commands."""
    shown = (
        '{"header":{"member_id":1},"members":[{"ID":17578932713436209278,"name":"a","peerURLs":'
        '["https://10.0.0.1:2380"],"clientURLs":["https://10.0.0.1:2379"]},'
        '{"ID":255,"peerURLs":["https://10.0.0.2:2380"],"isLearner":true}]}\n'
    )
    first, second = read_members(shown)
    assert first.id == "f3f4ea2a6adbe07e" and first.name == "a" and not first.is_learner
    assert second.id == "ff" and second.name == "" and second.is_learner
