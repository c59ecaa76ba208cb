"""Connections of commands to a running system: a run directory, or etcd and a key or token."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge.cli.rundir import RunDirectory
from forge.core.errors import ConfigError, FailedPrecondition, InvalidArgument, NotFound
from forge.runtime.security.bearer import Bearer
from forge.runtime.security.tokens import Keyring

if TYPE_CHECKING:
    from forge.runtime.coordination import Coordinator
    from forge.runtime.rpc import Channels

CONNECT_S = 3.0
"""Wait for etcd. A person waits for a command, and etcd runs before it; services wait longer, since
they may start beside etcd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The etcd endpoints and the credentials of a system."""

    etcd: str
    cluster: str
    key_file: Path | None = None
    bearer: Bearer | None = None
    """Token in place of the key."""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    insecure: bool = False
    accept_unsigned: bool = False
    etcd_user: str = ""
    etcd_password_file: str = ""
    run_dir: Path | None = None
    """Directory of the run, if the system is one."""

    def keyring(self) -> Keyring:
        """Returns the cluster's keys. Raises `ConfigError`."""
        if self.key_file is None:
            raise ConfigError("this command needs --key-file: the key of the cluster")
        return Keyring.from_file(self.key_file)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Coordinator, Channels]]:
        """Connects for the length of a block. Raises `Unavailable` when etcd does not answer,
        `ConfigError` for an invalid key."""
        # Late imports: `--help` needs neither gRPC nor the etcd client.
        from forge.runtime.coordination import Coordinator, Login
        from forge.runtime.coordination.etcd_roles import etcd_user
        from forge.runtime.rpc import Channels
        from forge.runtime.security.credentials import Security

        security = Security(
            self.bearer or self.keyring(),
            subject=person(),
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
            insecure=self.insecure,
        )
        security.accept_unsigned = self.accept_unsigned
        coordinator = await Coordinator.connect(
            self.etcd,
            cluster=self.cluster,
            timeout_s=CONNECT_S,
            credentials=security.etcd_credentials(self.etcd),
            login=Login.of(
                self.etcd_user,
                self.etcd_password_file,
                default_user=etcd_user(self.cluster, "operator"),
            ),
            signatures=security,
        )
        channels = Channels(security)
        try:
            yield coordinator, channels
        finally:
            await channels.close()
            await coordinator.close()


def person() -> str:
    """Returns "user@host" for the audit log: the user who called sudo, else the process's."""
    try:
        user = os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        # No entry in /etc/passwd.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def of_run(path: Path) -> Connection:
    """Returns the connection to a running run. Raises `NotFound` for another directory, and
    `FailedPrecondition` for a run that is stopped or has not started etcd yet."""
    directory = RunDirectory(path.resolve())
    endpoints_file = directory.etcd_endpoints
    if not endpoints_file.exists():
        if (directory.path / "lock").exists() and directory.in_use():
            raise FailedPrecondition(f"{path} is being started: it has no etcd yet; try again soon")
        raise NotFound(f"{path} is not a run directory: {endpoints_file.name} is missing")
    if not directory.in_use():
        state = directory.load()
        resumes = f"`forge run --run-dir {path}` resumes its training, "
        raise FailedPrecondition(
            f"{path} is not running: {resumes if state is None or state.campaign else ''}"
            f"`forge up --run-dir {path}` starts its services alone"
        )
    return Connection(
        etcd=endpoints_file.read_text().strip(),
        cluster=directory.path.name,
        key_file=directory.key_file,
        run_dir=directory.path,
    )


def newest_run_directory(root: Path) -> Path:
    """Returns the newest run under `root`, running or not. Raises `InvalidArgument` for none."""
    started = [(file.stat().st_mtime, file.parent) for file in root.glob("runs/*/etcd.endpoints")]
    if not started:
        raise InvalidArgument(
            f"{root} has no run: name a system by --run-dir, or by --etcd and --key-file"
        )
    return max(started)[1]
