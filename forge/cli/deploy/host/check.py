"""`forge deploy check`: this host held against its rendered files, and its place in the cluster."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from forge.cli.certificate_doctor import CertificateFiles, certificate_findings
from forge.cli.connection import Connection
from forge.cli.deploy.host.comparison import differences
from forge.cli.deploy.host.host import HostDirectory, clock_is_synchronized, read_host
from forge.cli.deploy.render.host_files import KEY, SETTINGS
from forge.cli.deploy.render.rendered import Manifest
from forge.cli.doctor.cluster_doctor import cluster_findings
from forge.cli.finding import Finding
from forge.runtime.process.clock_watch import REMEDY

_TLS = CertificateFiles(*(f"{SETTINGS}/tls/tls_{name}.pem" for name in ("cert", "key", "ca")))


def check_host(folder: Path) -> Iterator[Finding]:
    """Yield a finding for each difference of this host, certificates, etcd and clocks included.

    Raises `InvalidArgument` without a manifest.
    """
    directory = HostDirectory(folder=folder)
    manifest = directory.manifest()
    yield from differences(manifest, read_host(directory, manifest))
    if Path(_TLS.cert).exists():
        yield from certificate_findings(_TLS, {manifest.address}, now_unix_s=time.time())
    if manifest.has_key and Path(KEY).exists():
        yield from asyncio.run(cluster_findings(connection(manifest)))
    else:
        yield _clock()


def connection(manifest: Manifest, *, user: str = "operator") -> Connection:
    """Return the connection of commands on a host with the cluster's key."""
    return Connection(
        etcd=manifest.etcd,
        cluster=manifest.cluster,
        key_file=Path(KEY),
        tls_cert=_TLS.cert,
        tls_key=_TLS.key,
        tls_ca=_TLS.ca,
        etcd_user=f"{manifest.cluster}.{user}",
        etcd_password_file=f"{SETTINGS}/etcd/forge-{user}",
    )


def as_json(directory: HostDirectory, findings: Sequence[Finding]) -> str:
    """Return one line of JSON: host, ok, the digest of the installed manifest, and findings."""
    answer = {
        "host": directory.manifest().host,
        "ok": all(one.ok for one in findings),
        "manifest": directory.manifest_digest(),
        "findings": [asdict(one) for one in findings],
    }
    return json.dumps(answer)


def _clock() -> Finding:
    """Finding about the clock of a host that cannot ask the others for theirs."""
    synchronized = clock_is_synchronized()
    if synchronized is None:
        return Finding(ok=True, was_run=False, text="clock: timedatectl gives no answer")
    text = f"clock {'is' if synchronized else 'is not'} kept by NTP"
    return Finding(ok=synchronized, text=text, remedy=f"On this host, {REMEDY}.")
