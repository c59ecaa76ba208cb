"""Users, roles and permissions of a cluster in etcd, and its authentication.

Applies `etcd_roles`; a repetition changes nothing. Each user has a random password in a file.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from etcd3aio.auth import AuthService, PermissionType
from etcd3aio.kv import prefix_range_end

from forge.core.errors import ConfigError, Unauthenticated, Unavailable
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

REPEAT_S = 60.0
"""Under load, and while its members elect a leader, etcd leaves single calls without an answer."""
PAUSE_S = 0.5
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
    runners: Sequence[str],
) -> list[str]:
    """Make the users and roles of a cluster, and enable authentication. Returns the changes.
    `runners`: hosts whose runners get a user of their own.

    A password without a file in `directory` is made there. Calls without an answer are repeated for
    `REPEAT_S` once etcd has answered. Raises ConfigError, Unavailable, and Unauthenticated for
    another password of root.
    """
    roles = {**ROLES, **{runner_service(host): runner_role(host) for host in runners}}
    passwords = {name: _password(password_file(directory, name)) for name in (ROOT, *roles)}
    channel = await open_channel(endpoints, credentials)
    connect = partial(Etcd, channel, endpoints=endpoints, cluster=cluster)
    etcd = connect(login=_login(ROOT, directory, ROOT))
    users = _Users(connect, etcd, directory, passwords)
    try:
        enabled = await etcd.demands_login()
        deadline_s = time.monotonic() + REPEAT_S
        while True:
            try:
                await users.apply(cluster, roles, enabled=enabled)
                return users.changes
            except Unavailable:
                if time.monotonic() > deadline_s:
                    raise
                await asyncio.sleep(PAUSE_S)
    finally:
        await etcd.close()


class _Users:
    """The users and roles of one etcd."""

    def __init__(
        self,
        connect: Callable[..., Etcd],
        etcd: Etcd,
        directory: Path,
        passwords: Mapping[str, str],
    ) -> None:
        """`connect` returns a client of the same etcd for another login. Passwords by service."""
        self.changes: list[str] = []
        self._connect, self._etcd = connect, etcd
        self._call = etcd.administer
        self._directory, self._passwords = directory, passwords

    async def apply(self, cluster: str, roles: Mapping[str, EtcdRole], *, enabled: bool) -> None:
        """Make what differs. `enabled`: etcd demanded a login before the first change."""
        if enabled:
            await self._etcd.log_in()
        await self.add_role(ROOT)
        await self.add(ROOT, ROOT)
        for service, role in roles.items():
            name = etcd_user(cluster, service)
            await self.add_role(name)
            await self.permit(name, _permissions(cluster, role))
            await self.add(name, service)
        if not enabled:
            await self._call(lambda auth: auth.auth_enable(timeout=TIMEOUT_S))
            self.changes.append("authentication is enabled")

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

    async def add(self, user: str, service: str) -> None:
        """Give a user the role of the same name, and the password of the service."""
        password = self._passwords[service]
        if user not in (await self._call(lambda auth: auth.user_list(timeout=TIMEOUT_S))).users:
            await self._call(lambda auth: auth.user_add(user, password, timeout=TIMEOUT_S))
            self.changes.append(f"new user {user}")
        elif not await self._accepts(_login(user, self._directory, service)):
            await self._call(
                lambda auth: auth.user_change_password(user, password, timeout=TIMEOUT_S)
            )
            self.changes.append(f"new password of user {user}")
        granted = (await self._call(lambda auth: auth.user_get(user, timeout=TIMEOUT_S))).roles
        if user not in granted:
            await self._call(lambda auth: auth.user_grant_role(user, user, timeout=TIMEOUT_S))
            self.changes.append(f"user {user} gets role {user}")

    async def _accepts(self, login: Login) -> bool:
        """Whether etcd certainly accepts the password; it verifies none before it demands them."""
        try:
            await self._connect(login=login).log_in()
        except Unauthenticated:
            return False
        return True


def _login(user: str, directory: Path, service: str) -> Login:
    return Login(user=user, password_file=str(password_file(directory, service)))


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
