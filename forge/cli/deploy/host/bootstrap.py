"""`forge deploy bootstrap`: users, roles and tokens in etcd, from the admin's host. Repeatable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from forge.cli.connection import person
from forge.cli.deploy.host.check import connection
from forge.cli.deploy.host.host import DEPLOYED, HostDirectory
from forge.cli.deploy.render.host_files import ADMIN_PASSWORDS
from forge.core.errors import FailedPrecondition
from forge.runtime.coordination.etcd_users import apply_roles
from forge.runtime.security.issued_tokens import TokenRecord, record_once
from forge.runtime.security.tls import Tls


async def bootstrap() -> list[str]:
    """Apply what the manifest of this host names; return the changes. Raises `Unavailable` without
    etcd, `FailedPrecondition` on another host."""
    manifest = HostDirectory(folder=DEPLOYED).manifest()
    if not manifest.is_admin:
        raise FailedPrecondition(
            f"{manifest.host} has no password of etcd's root; the first host with etcd has it"
        )
    at = connection(manifest, user="admin")
    tls = Tls(cert=at.tls_cert, key=at.tls_key, ca=at.tls_ca, insecure=False)
    changes = await apply_roles(
        manifest.etcd,
        cluster=manifest.cluster,
        credentials=tls.etcd_credentials(manifest.etcd),
        directory=Path(ADMIN_PASSWORDS),
        runners=manifest.runner_hosts,
    )
    async with at.open() as (coordinator, _):
        for one in manifest.tokens:
            # Without the id, which is the key.
            record = msgspec.convert(one, TokenRecord, from_attributes=True)
            record = replace(record, issued_by=person())
            if await record_once(coordinator, one.token_id, record):
                changes.append(f"new token {one.token_id} of the runners on {one.subject}")
    return changes
