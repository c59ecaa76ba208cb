"""`forge deploy apply`: installs the rendered files on all hosts, starts what does not run, and
restarts one after another what changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from forge.cli.deploy.cluster.cluster import Cluster, StepFailed, left_lines, reachable
from forge.cli.deploy.cluster.members import Members
from forge.cli.deploy.cluster.plan import needed, restart_steps, roll_order
from forge.core.errors import FailedPrecondition, InvalidArgument, raise_all


def apply(cluster: Cluster, report: Callable[[str], None], *, lost: Collection[str] = ()) -> None:
    """Bring all hosts to their rendered files. A repetition changes nothing more. `lost`: hosts
    whose member of etcd is replaced.

    Raises `FailedPrecondition` for hosts with another release, `StepFailed` for the first fault.
    """
    for host in lost:
        if host not in cluster.manifests:
            raise InvalidArgument(f"--replace-etcd {host}: no rendered host has this name")
    raise_all(list(reachable(cluster)))
    _require_release(cluster)
    needs = cluster.on_hosts(partial(_install, cluster))
    for host, found in needs.items():
        report(f"{host}: {len(found['changed'])} files changed")
        for line in left_lines(host, found):
            report(line)
    members = Members(cluster, report)
    joining = members.start(needs)
    report(f"{cluster.admin}: users, roles and tokens of etcd")
    _bootstrap(cluster, joining)
    members.join(joining, lost=lost)
    _start(cluster, needs, report)
    _restart(cluster, needs, report)


def _install(cluster: Cluster, host: str) -> dict[str, Any]:
    cluster.copy(host)
    return cluster.install(host)


def _require_release(cluster: Cluster) -> None:
    read = ("readlink", "/opt/forge/.venv")
    links = cluster.on_hosts(lambda host: cluster.transports[host].run(read))
    for host, ended in links.items():
        manifest = cluster.manifests[host]
        link = ended.output.strip()
        if link and link != manifest.release:
            raise FailedPrecondition(
                f"{host} has release {link}, and {manifest.release} is rendered: "
                "forge deploy upgrade changes releases"
            )


def _bootstrap(cluster: Cluster, joining: Collection[str]) -> None:
    try:
        cluster.bootstrap()
    except StepFailed as error:
        raise (_without_quorum(error, joining) if joining else error) from None


def _without_quorum(error: StepFailed, joining: Collection[str]) -> StepFailed:
    """The error of an etcd that does not answer while hosts without data wait to join it."""
    return StepFailed(
        f"{error}; {', '.join(joining)}: no data of etcd there, and no member joins before etcd "
        "answers. Start its other members; if most members have lost their data: "
        "docs/runbooks/etcd_cluster.md, Most members are lost"
    )


def _start(
    cluster: Cluster, needs: Mapping[str, Mapping[str, Any]], report: Callable[[str], None]
) -> None:
    """Start all units at once: some are ready only when others are."""
    chosen = {
        host: [unit for unit in one["start"] if unit != "forge-etcd.service"]
        for host, one in needs.items()
    }
    for host, units in chosen.items():
        if units:
            report(f"{host}: start {', '.join(units)}")
            cluster.run(host, "systemctl", "start", "--no-block", *units)
    for host, units in chosen.items():
        for unit in units:
            cluster.wait_active(host, unit)


def _restart(
    cluster: Cluster, needs: Mapping[str, Mapping[str, Any]], report: Callable[[str], None]
) -> None:
    if not any(one["restart"] for one in needs.values()):
        return
    restarts = {host: one["restart"] for host, one in needs.items()}
    leaders = cluster.leaders()
    for together in roll_order(cluster.manifests, leaders):
        if chosen := needed(together, restarts):
            for step in restart_steps(chosen):
                report(str(step))
                cluster.perform(step, release=cluster.manifests[step.host].release)
