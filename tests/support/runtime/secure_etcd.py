"""An etcd with TLS and authentication, and the users of one cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from forge.runtime.coordination import Coordinator, Login
from forge.runtime.coordination.etcd_roles import etcd_user
from forge.runtime.coordination.etcd_users import apply_roles, password_file
from forge.runtime.security.credentials import Security
from forge.runtime.security.tls import Tls
from tests.support.runtime.etcd import Certificates, EtcdServer


class SecureEtcd:
    """Its files are under `folder`."""

    def __init__(self, folder: Path, *, cluster: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster = cluster
        self.passwords = folder / "passwords"
        self.tls = Certificates.issue(folder)
        self.server = EtcdServer(folder / "etcd", tls=self.tls)
        self.endpoint = f"https://{self.server.endpoint}"
        self.credentials = Tls(
            cert=self.tls.cert, key=self.tls.key, ca=self.tls.ca
        ).etcd_credentials(self.endpoint)

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)
        await self.apply()

    async def restore(self) -> None:
        """Replace it by a new etcd from a snapshot of this moment."""
        snapshot = self.passwords.parent / "snapshot.db"
        root = f"root:{password_file(self.passwords, 'root').read_text().strip()}"
        await asyncio.to_thread(self.server.save, snapshot, user=root)
        await asyncio.to_thread(self.server.restore, snapshot)

    async def apply(
        self, directory: Path | None = None, *, runners: Sequence[str] = ()
    ) -> list[str]:
        """The changes."""
        return await apply_roles(
            self.endpoint,
            cluster=self.cluster,
            credentials=self.credentials,
            directory=directory or self.passwords,
            runners=runners,
        )

    def login(self, service: str) -> Login:
        """Of a service, or "root"."""
        user = service if service == "root" else etcd_user(self.cluster, service)
        return Login(user=user, password_file=str(password_file(self.passwords, service)))

    async def connect(
        self, service: str | None, *, signatures: Security | None = None
    ) -> Coordinator:
        """As a service; None: with the certificate alone."""
        return await Coordinator.connect(
            self.endpoint,
            cluster=self.cluster,
            timeout_s=30.0,
            credentials=self.credentials,
            login=self.login(service) if service else None,
            signatures=signatures,
        )

    def options(self, service: str) -> list[str]:
        """Of a process or a command: certificates, and the password of a service."""
        return [
            *("--etcd", self.endpoint, "--cluster", self.cluster),
            *("--tls-cert", self.tls.cert, "--tls-key", self.tls.key, "--tls-ca", self.tls.ca),
            *("--etcd-user", self.login(service).user),
            *("--etcd-password-file", self.login(service).password_file),
        ]
