"""The output of `forge deploy check`: findings of one host, or a table of all."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from forge.cli.command_exit import console
from forge.cli.deploy.cluster.check_all import CheckedHost, check_hosts, shared_findings
from forge.cli.deploy.cluster.cluster import Cluster
from forge.cli.deploy.host.check import as_json as json_of
from forge.cli.deploy.host.check import check_host
from forge.cli.deploy.host.host import HostDirectory
from forge.cli.finding import report


def check_here(folder: Path, *, as_json: bool) -> bool:
    """Print the findings of this host; return whether all are well."""
    findings = []
    for finding in check_host(folder):
        findings.append(finding)
        if not as_json:
            report(finding)
    if as_json:
        sys.stdout.write(json_of(HostDirectory(folder=folder), findings) + "\n")
    return all(one.ok for one in findings)


def check_all(cluster: Cluster, *, as_json: bool) -> bool:
    """Print the findings of all hosts; return whether all are well."""
    checked = check_hosts(cluster)
    is_well = not any(one.problems for one in checked)
    if as_json:
        hosts = [
            {
                "host": one.host,
                "ok": not one.problems,
                "was_checked": one.was_checked,
                "findings": [asdict(finding) for finding in one.findings],
            }
            for one in checked
        ]
        sys.stdout.write(json.dumps({"ok": is_well, "hosts": hosts}) + "\n")
        return is_well
    console.print(_table(cluster, checked))
    for finding in shared_findings(checked):
        report(finding)
    return is_well


def _table(cluster: Cluster, checked: Sequence[CheckedHost]) -> Table:
    table = Table("host", "address", "release", "units", "state", box=None, pad_edge=False)
    for one in checked:
        manifest = cluster.manifests[one.host]
        count = len(one.problems)
        state = f"{count} difference{'s' * (count > 1)}" if count else "as rendered"
        state = state if one.was_checked else "not checked"
        units = str(len(manifest.units))
        table.add_row(one.host, manifest.address, manifest.release, units, state)
    return table
