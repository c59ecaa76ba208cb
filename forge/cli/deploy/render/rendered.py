"""The files and units of one host, and their manifest, with which the host is compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from forge.core.errors import InvalidArgument
from forge.runtime.security.issued_tokens import TokenRecord

MANIFEST = "manifest.json"
TREE = "root"
"""Directory beside the manifest with the files, by their paths on the host."""
PLAIN, SECRET = 0o644, 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFile:
    """A file of a host. root owns it."""

    path: str
    """Absolute, on the host."""
    content: bytes
    mode: int = PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file without its content."""

    path: str
    sha256: str
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitEntry:
    """A unit that runs and starts with the host."""

    name: str
    kind: str
    """Kind in the inventory; `etcd` for a member."""
    instance_id: str = ""
    """Id in discovery; empty for a unit that is not there."""
    inputs: tuple[str, ...] = ()
    """Files that it reads at its start: after a change of one it needs a restart."""
    ports: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Fixed ports by purpose: grpc, metrics, http, client, peer."""

    @property
    def service(self) -> str:
        """The unit with the process: of a timer, the service that it starts."""
        return self.name.replace(".timer", ".service")

    @property
    def is_timer(self) -> bool:
        """Whether it only starts a service, at times."""
        return self.name != self.service


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry(TokenRecord):
    """The record of a token that etcd does not have yet."""

    token_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Files of one host."""

    cluster: str
    host: str
    address: str
    release: str
    """Directory under /opt/forge to which the link .venv leads."""
    etcd: str
    """Endpoints of the cluster."""
    has_key: bool
    """Whether commands on this host reach the cluster."""
    is_admin: bool
    """Whether this host applies the users and roles of etcd."""
    users: tuple[str, ...]
    model: str
    """Model directory that its services read; empty: none does."""
    files: tuple[FileEntry, ...]
    units: tuple[UnitEntry, ...]
    runner_hosts: tuple[str, ...] = ()
    """On the admin's host: hosts whose runners have a user in etcd."""
    tokens: tuple[TokenEntry, ...] = ()
    """On the admin's host: issued tokens, to be recorded in etcd."""
    data: tuple[str, ...] = ()
    """Files that its units read, and that an operator brings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedHost:
    """All of one host."""

    manifest: Manifest
    files: tuple[HostFile, ...]


def entries(files: Sequence[HostFile]) -> tuple[FileEntry, ...]:
    """Return the entries of files, by path."""
    return tuple(
        FileEntry(path=one.path, sha256=digest(one.content), mode=one.mode)
        for one in sorted(files, key=lambda one: one.path)
    )


def digest(content: bytes) -> str:
    """Return the SHA-256 of a content."""
    return hashlib.sha256(content).hexdigest()


def manifest_text(manifest: Manifest) -> bytes:
    """Return a manifest as JSON."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def read_manifest(text: bytes, *, source: str) -> Manifest:
    """Return the manifest in a JSON text. Raises `InvalidArgument`."""
    try:
        return msgspec.json.decode(text, type=Manifest)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(
            f"{source} is not a manifest of this release: {error}; render it again"
        ) from None
