"""The members of etcd: a new cluster, and members that join a running one.

Owns the order. A member joins as a learner, which has no vote until it has the log; one at a time,
and only while all others are well. Each step can be repeated. Not here: the start on a host
(`etcd_start`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forge.cli.deploy.cluster.cluster import Cluster, StepFailed
from forge.cli.deploy.host.etcd_start import DATA, DROP_IN, UNIT, VARIABLES
from forge.cli.deploy.inventory.inventory import bracketed
from forge.core.errors import FailedPrecondition

STATE = (
    f"[ ! -e {DATA} ] || echo data; [ ! -e {DROP_IN} ] || echo prepared; "
    f"! grep -qs STATE=new {VARIABLES} || echo new"
)
"""Prints what a host has: data of a member, a prepared start, that of a new cluster."""
ETCDCTL = 'ETCDCTL_USER="root:$(cat /etc/forge/etcd-users/root)" exec etcdctl "$@"'
"""Runs etcdctl as root; no list of processes shows the password."""
_ENDS_BY_ITSELF = (
    *("unhealthy cluster", "in sync with leader", "context deadline exceeded"),
    *("request timed out", "leader changed", "no leader"),
)
"""Errors of etcd: of a member that was connected just now, of an election, of a busy host."""
_TLS = tuple(
    f"ETCDCTL_{name}=/etc/forge/tls/tls_{file}.pem"
    for name, file in (("CACERT", "ca"), ("CERT", "cert"), ("KEY", "key"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A member as etcd lists it."""

    id: str
    """Hexadecimal."""
    name: str
    """Empty: it was announced, and has not started yet."""
    peer_urls: tuple[str, ...]
    client_urls: tuple[str, ...]
    is_learner: bool


class Members:
    """The members of a rendered cluster."""

    def __init__(self, cluster: Cluster, report: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._report = report
        self._hosts = [
            host
            for host, one in cluster.manifests.items()
            if any(unit.name == UNIT for unit in one.units)
        ]

    def start(self, needs: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Start the members that do not run, and restart those whose files have changed. Return
        the hosts of members that must join.

        Members of a new cluster start at once: one is ready when most are. Raises `StepFailed`, and
        `FailedPrecondition` if all members of before left the inventory.
        """
        run = self._cluster.run
        states = self._cluster.on_hosts(lambda host: run(host, "sh", "-c", STATE).split())
        with_data = [host for host, state in states.items() if "data" in state]
        # A member that was ever ready has no such variables any more: no quorum was there yet.
        is_new = all("new" in states[one] for one in with_data)
        if with_data and not {*with_data} & {*self._hosts}:
            raise FailedPrecondition(
                f"{with_data[0]} has a member of etcd, and no host with services.etcd = 1 has: "
                f"keep it in the inventory, or remove {DATA} there if it is of another cluster"
            )
        waiting = [host for host in self._hosts if UNIT in needs[host]["start"]]
        # Of an interrupted start of a new cluster, some have data.
        new = [one for one in waiting if "data" not in states[one]]
        new = [one for one in new if is_new or "new" in states[one]]
        old = [one for one in waiting if "data" in states[one]]
        for host in new:
            # Before the first start: an interrupted one continues as that of a new cluster.
            self._cluster.forge(host, "prepare-etcd", "--new")
        for host in (*new, *old):
            self._report(f"{host}: start {UNIT}")
            run(host, "systemctl", "start", "--no-block", UNIT)
        for host in (*new, *old):
            self._cluster.wait_active(host, UNIT)
        prepared = [one for one in self._hosts if {"data", "prepared"} <= {*states[one]}]
        for host in dict.fromkeys((*new, *prepared)):
            self._cluster.forge(host, "prepare-etcd", "--finish")
        for host in self._hosts:
            if UNIT in needs[host]["restart"]:
                self._report(f"{host}: restart {UNIT}")
                run(host, "systemctl", "restart", UNIT, limit_s=120.0)
                self._cluster.wait_active(host, UNIT)
        return [host for host in waiting if host not in (*new, *old)]

    def join(self, hosts: Sequence[str], *, lost: Collection[str]) -> None:
        """Let members without data join, one after another, and give learners their vote.

        `lost`: hosts whose member is replaced, since its data is gone. Raises
        `FailedPrecondition` for a lost one that is not named there, and while another member is
        not well; `StepFailed`.
        """
        for host in lost:
            if host not in hosts:
                raise FailedPrecondition(
                    f"--replace-etcd {host}: its member of etcd is not lost; nothing is replaced"
                )
        within = [host for host in self._hosts if host not in hosts]
        if len(self._hosts) == 1:
            return
        members = self._list(within)
        for host in within:
            found = self._of(host, members)
            # An apply before this one ended between the start of a learner and its vote.
            if found is not None and found.is_learner:
                self._promote(host, within)
        for host in hosts:
            self._join(host, within, is_lost=host in lost)
            within.append(host)

    def _join(self, host: str, within: Sequence[str], *, is_lost: bool) -> None:
        members = self._list(within)
        present = self._of(host, members)
        others = [one for one in members if one is not present]
        self._require_well(host, others)
        if present is not None and present.name:
            if not is_lost:
                raise FailedPrecondition(
                    f"{host}: its member of etcd has run, and {DATA} is gone; bring the disk back, "
                    f"or replace the member: forge deploy apply --replace-etcd {host}"
                )
            self._report(f"{host}: remove its lost member {present.id} from etcd")
            lost = present.id
            gone = lambda: all(one.id != lost for one in self._list(within))  # noqa: E731
            self._change(within, gone, "member", "remove", lost)
            present = None
        if present is None:
            self._report(f"{host}: announce it as a learner of etcd")
            url = f"--peer-urls={self._peer_url(host)}"
            listed = lambda: self._of(host, self._list(within)) is not None  # noqa: E731
            self._change(within, listed, "member", "add", host, "--learner", url)
        # etcd compares it with its own list.
        named = [f"{one.name or host}={url}" for one in self._list(within) for url in one.peer_urls]
        self._report(f"{host}: start {UNIT}")
        self._cluster.forge(host, "prepare-etcd", "--join", ",".join(named))
        self._cluster.run(host, "systemctl", "start", "--no-block", UNIT)
        self._cluster.wait_active(host, UNIT)
        self._promote(host, within)
        self._cluster.forge(host, "prepare-etcd", "--finish")

    def _promote(self, host: str, within: Sequence[str]) -> None:
        """Give a learner its vote, once it has the log. Raises `StepFailed`."""

        def learner() -> Member | None:
            found = self._of(host, self._list(within))
            return found if found is not None and found.is_learner else None

        found = learner()
        if found is None:
            return
        self._report(f"{host}: promote its member of etcd")
        self._change(within, lambda: learner() is None, "member", "promote", found.id)

    def _change(self, within: Sequence[str], is_done: Callable[[], bool], *words: str) -> None:
        """Change the members, once etcd does: it refuses a learner that lags, and any change until
        each voter was connected for some seconds. An answer that came too late says nothing: a
        repetition first looks whether it `is_done`. Raises `StepFailed`."""
        deadline_s = self._cluster.now_s() + self._cluster.healthy_s
        while True:
            try:
                if not is_done():
                    self._etcdctl(self._clients(within), *words)
                return
            except StepFailed as error:
                ends = any(text in str(error) for text in _ENDS_BY_ITSELF)
                if not ends or self._cluster.now_s() >= deadline_s:
                    raise
                self._cluster.pause(1.0)

    def _require_well(self, host: str, others: Sequence[Member]) -> None:
        """Raise `FailedPrecondition` unless all other members run, vote and answer: with one more
        of them away, etcd would have no quorum."""
        for one in others:
            if one.is_learner or not one.name:
                raise FailedPrecondition(
                    f"{host}: {one.name or one.peer_urls[0]} is about to join etcd; one at a time"
                )
        urls = [url for one in others for url in one.client_urls]
        try:
            self._etcdctl(urls, "endpoint", "health")
        except StepFailed as error:
            raise FailedPrecondition(
                f"{host}: no member joins etcd while another one is not well ({error}): "
                "docs/runbooks/etcd_cluster.md"
            ) from None

    def _list(self, within: Sequence[str]) -> list[Member]:
        shown = self._etcdctl(self._clients(within), "member", "list", "--write-out=json")
        return read_members(shown)

    def _of(self, host: str, members: Sequence[Member]) -> Member | None:
        url = self._peer_url(host)
        return next((one for one in members if url in one.peer_urls), None)

    def _peer_url(self, host: str) -> str:
        return f"https://{bracketed(self._cluster.manifests[host].address)}:2380"

    def _clients(self, hosts: Sequence[str]) -> list[str]:
        addresses = (bracketed(self._cluster.manifests[host].address) for host in hosts)
        return [f"https://{one}:2379" for one in addresses]

    def _etcdctl(self, endpoints: Sequence[str], *words: str) -> str:
        """Run etcdctl on the admin's host. Raises `StepFailed`."""
        admin = self._cluster.admin
        # etcdctl refuses a flag beside its variable.
        environment = ("ETCDCTL_API=3", f"ETCDCTL_ENDPOINTS={','.join(endpoints)}", *_TLS)
        program = ("env", *environment, "sh", "-c", ETCDCTL, "etcdctl")
        ended = self._cluster.transports[admin].run([*program, *words])
        if ended.code:
            raise StepFailed(f"{admin}: etcdctl {' '.join(words)}: {ended.reason}")
        return ended.output


def read_members(shown: str) -> list[Member]:
    """Return the members in what `etcdctl member list` prints as JSON."""
    return [
        Member(
            id=format(one["ID"], "x"),
            name=one.get("name", ""),
            peer_urls=tuple(one["peerURLs"]),
            client_urls=tuple(one.get("clientURLs", ())),
            is_learner=one.get("isLearner", False),
        )
        for one in json.loads(shown.strip().rpartition("\n")[2])["members"]
    ]
