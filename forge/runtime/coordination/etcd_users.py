"""Users, roles and permissions of a cluster in etcd, and its authentication.

Applies `etcd_roles`; a repetition changes nothing. Each user has a random password in a file.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from etcd3aio.auth import AuthService, PermissionType
from etcd3aio.kv import prefix_range_end

from forge.core.errors import ConfigError, Unauthenticated
from forge.runtime.coordination.etcd import TIMEOUT_S, Etcd, Login
from forge.runtime.coordination.etcd_channel import open_channel
from forge.runtime.coordination.etcd_roles import (
    ROLES,
    ROOT,
    EtcdRole,
    etcd_user,
    runner_role,
    runner_service,
)
from forge.runtime.files.private import write_private_file

_READ, _WRITE = int(PermissionType.READ), int(PermissionType.READWRITE)
Permissions = dict[tuple[bytes, bytes], int]
"""Type by key and end of the range; the end is empty for a single key."""
_Administer = Callable[[AuthService], Awaitable[Any]]


def password_file(directory: Path, service: str) -> Path:
    """Return the file of a service's password."""
    return directory / (service if service == ROOT else f"forge-{service}")


async def apply_roles(
    endpoints: str,
    *,
    cluster: str,
    credentials: grpc.ChannelCredentials | None,
    directory: Path,
    runners: Sequence[str] = (),
) -> list[str]:
    """Make the users and roles of a cluster, and enable authentication. Returns the changes.
    `runners`: hosts whose runners get a user of their own.

    A password without a file in `directory` is made there. Raises ConfigError, Unavailable, and
    Unauthenticated for another password of root.
    """
    roles = {**ROLES, **{runner_service(host): runner_role(host) for host in runners}}
    passwords = {name: _password(password_file(directory, name)) for name in (ROOT, *roles)}
    root = Login(user=ROOT, password_file=str(password_file(directory, ROOT)))
    channel = await open_channel(endpoints, credentials)
    etcd = Etcd(channel, endpoints=endpoints, cluster=cluster, login=root)
    try:
        enabled = await etcd.demands_login()
        if enabled:
            await etcd.log_in()
        users = _Users(partial(Etcd, channel, endpoints=endpoints, cluster=cluster), etcd)
        await users.add_role(ROOT)
        await users.add(root, role=ROOT, password=passwords[ROOT])
        for service, role in roles.items():
            name = etcd_user(cluster, service)
            login = Login(user=name, password_file=str(password_file(directory, service)))
            await users.add_role(name)
            await users.permit(name, _permissions(cluster, role))
            await users.add(login, role=name, password=passwords[service])
        if not enabled:
            await etcd.administer(lambda auth: auth.auth_enable(timeout=TIMEOUT_S))
            users.changes.append("authentication is enabled")
        return users.changes
    finally:
        await etcd.close()


class _Users:
    """The users and roles of one etcd."""

    def __init__(self, connect: Callable[..., Etcd], etcd: Etcd) -> None:
        """`connect` returns a client of the same etcd for another login."""
        self.changes: list[str] = []
        self._connect = connect
        self._call = etcd.administer

    async def add_role(self, role: str) -> None:
        """Make a role that is absent."""
        if role not in (await self._call(lambda auth: auth.role_list(timeout=TIMEOUT_S))).roles:
            await self._call(lambda auth: auth.role_add(role, timeout=TIMEOUT_S))
            self.changes.append(f"new role {role}")

    async def permit(self, role: str, wanted: Permissions) -> None:
        """Give a role these permissions and no others."""
        found = await self._call(lambda auth: auth.role_get(role, timeout=TIMEOUT_S))
        present = {(one.key, one.range_end): int(one.permType) for one in found.perm}
        for range_, kind in sorted(wanted.items() - present.items()):
            await self._call(_grant(role, range_, PermissionType(kind)))
            self.changes.append(f"{role}: {_words(range_, kind)}")
        for range_ in sorted(present.keys() - wanted.keys()):
            await self._call(_revoke(role, range_))
            self.changes.append(f"{role}: no longer {_words(range_, present[range_])}")

    async def add(self, login: Login, *, role: str, password: str) -> None:
        """Give a user this role, and this password."""
        user = login.user
        if user not in (await self._call(lambda auth: auth.user_list(timeout=TIMEOUT_S))).users:
            await self._call(lambda auth: auth.user_add(user, password, timeout=TIMEOUT_S))
            self.changes.append(f"new user {user}")
        elif not await self._accepts(login):
            await self._call(
                lambda auth: auth.user_change_password(user, password, timeout=TIMEOUT_S)
            )
            self.changes.append(f"new password of user {user}")
        granted = (await self._call(lambda auth: auth.user_get(user, timeout=TIMEOUT_S))).roles
        if role not in granted:
            await self._call(lambda auth: auth.user_grant_role(user, role, timeout=TIMEOUT_S))
            self.changes.append(f"user {user} gets role {role}")

    async def _accepts(self, login: Login) -> bool:
        """Whether etcd certainly accepts the password; it verifies none before it demands them."""
        try:
            await self._connect(login=login).log_in()
        except Unauthenticated:
            return False
        return True


def _permissions(cluster: str, role: EtcdRole) -> Permissions:
    return {
        _range(f"/forge/{cluster}/{key}"): kind
        for keys, kind in ((role.reads, _READ), (role.writes, _WRITE))
        for key in keys
    }


def _range(path: str) -> tuple[bytes, bytes]:
    start = path.removesuffix("*")
    return start.encode(), prefix_range_end(start) if path.endswith(("/", "*")) else b""


def _words(range_: tuple[bytes, bytes], kind: int) -> str:
    key, end = range_
    return f"{'reads' if kind == _READ else 'writes'} {key.decode()}{'*' if end else ''}"


def _grant(role: str, range_: tuple[bytes, bytes], kind: PermissionType) -> _Administer:
    key, end = range_
    return lambda auth: auth.role_grant_permission(
        role, key, end or None, perm_type=kind, timeout=TIMEOUT_S
    )


def _revoke(role: str, range_: tuple[bytes, bytes]) -> _Administer:
    key, end = range_
    return lambda auth: auth.role_revoke_permission(role, key, end or None, timeout=TIMEOUT_S)


def _password(path: Path) -> str:
    """Read a password, or make one. Raises ConfigError."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_private_file(path, secrets.token_hex(32) + "\n")
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
