"""`forge deploy check --out`: all hosts held against the render, by the check of each host.

Owns the calls of the hosts and their answers. Not here: the check itself (`check`), output.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forge.cli.deploy.cluster.cluster import Cluster
from forge.cli.deploy.cluster.transport import Ended
from forge.cli.deploy.host.host import HostDirectory
from forge.cli.finding import Finding

_LIMIT_S = 180.0
_NO_FORGE = 127
_CHECK = (
    'for python in "$@"; do [ ! -x "$python" ] || exec "$python" -m forge.cli.main deploy check '
    f"--json; done; exit {_NO_FORGE}"
)
"""By the rendered release, or else by the one in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedHost:
    """The answer of one host."""

    host: str
    findings: tuple[Finding, ...]
    was_checked: bool = True
    """False: the one finding says why it gave no answer."""

    @property
    def problems(self) -> list[Finding]:
        """The findings that are not ok."""
        return [one for one in self.findings if not one.ok]


def check_hosts(cluster: Cluster) -> list[CheckedHost]:
    """Return the answers of all hosts, in the order of the render; each checks itself."""
    return list(cluster.on_hosts(lambda host: _check_host(cluster, host)).values())


def shared_findings(checked: Sequence[CheckedHost]) -> list[Finding]:
    """Return the problems, each once, with the hosts that found it."""
    hosts: dict[Finding, list[str]] = {}
    for one in checked:
        for finding in one.findings:
            if not (finding.ok and finding.was_run):
                hosts.setdefault(finding, []).append(one.host)
    return [
        replace(finding, text=f"{', '.join(names)}: {finding.text}")
        for finding, names in hosts.items()
    ]


def _check_host(cluster: Cluster, host: str) -> CheckedHost:
    release = cluster.manifests[host].release
    programs = [f"/opt/forge/{release}/bin/python", "/opt/forge/.venv/bin/python"]
    ended = cluster.transports[host].run(["sh", "-c", _CHECK, "sh", *programs], limit_s=_LIMIT_S)
    answer = _answer(ended)
    if answer is None:
        found = _unchecked(ended, release)
        return CheckedHost(host=host, findings=(found,), was_checked=False)
    findings = [Finding(**one) for one in answer["findings"]]
    rendered = HostDirectory(folder=cluster.out / "hosts" / host).manifest_digest()
    # Releases before this command do not name their manifest.
    if answer.get("manifest", rendered) != rendered:
        findings.append(
            Finding(
                ok=False,
                text="the last render is not installed",
                remedy="forge deploy apply, or forge deploy upgrade if its release is another one.",
            )
        )
    return CheckedHost(host=host, findings=tuple(findings))


def _answer(ended: Ended) -> dict[str, Any] | None:
    try:
        answer = json.loads(ended.output.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and "findings" in answer else None


def _unchecked(ended: Ended, release: str) -> Finding:
    if ended.code == _NO_FORGE:
        return Finding(
            ok=False,
            text="no release of forge is installed",
            remedy=f"Install {release} in /opt/forge/{release}, as docs/deploy.md shows.",
        )
    return Finding(
        ok=False,
        text=f"not checked: {ended.reason}",
        remedy="Start the host, correct its login, or run forge deploy check on it.",
    )
