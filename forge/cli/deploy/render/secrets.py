"""The secrets of a cluster in a directory of the computer that renders it.

Owns their files: an existing secret stays, an expiring certificate or token is replaced. Not here:
X.509 (`forge.cli.credentials.certs_authority`), signatures of tokens (`forge.runtime.security`).
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from cryptography import x509

from forge.cli.certificate_doctor import RENEW, is_issued_by, names_of
from forge.cli.credentials.certs_authority import CA_CERT, HOST_CERT, HOST_KEY, Authority
from forge.cli.deploy.inventory.inventory import Host, Inventory
from forge.cli.deploy.render.host_files import HostSecrets, Secrets
from forge.cli.deploy.render.rendered import TokenEntry
from forge.core.errors import ConfigError, ForgeError, InvalidArgument
from forge.runtime.coordination.etcd_roles import ROLES, ROOT, runner_service
from forge.runtime.files.private import replace_private_file, write_private_file
from forge.runtime.security import issued_tokens
from forge.runtime.security.tokens import Keyring

ROTATED = ("certificates", "tokens")
"""Secrets that `--rotate` replaces before they expire."""
_CA_DAYS = 3650
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenKind:
    """The tokens of one file below /etc/forge."""

    role: str
    users: str
    """For people."""
    prefix: str = ""
    """Prefix of the subject, before the host."""
    life_s: float | None = None
    """None: that of the role."""
    audience: frozenset[str] | None = None
    renew_s: float = _DAY_S
    """Left life at which the token is replaced."""


TOKENS = {
    "agents-token": _TokenKind(role="runner", users="runners"),
    # Nothing renews it: a render of each month replaces it in time.
    "feed-token": _TokenKind(
        role="operator",
        users="feeds",
        prefix="feed@",
        life_s=90 * _DAY_S,
        audience=frozenset({"SchedulerService", "PoolService"}),
        renew_s=45 * _DAY_S,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredToken:
    token: str
    entry: TokenEntry


@dataclass(slots=True, kw_only=True)
class SecretStore:
    """The directory; `changes` has a line for each secret that `load` made or replaced."""

    folder: Path
    rotate: Collection[str] = ()
    changes: list[str] = field(default_factory=list)

    def load(self, inventory: Inventory) -> Secrets:
        """Return the secrets of an inventory; make absent ones. Raises `InvalidArgument`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            for name in ("tls", "etcd", "tokens"):
                (self.folder / name).mkdir(exist_ok=True)
            return self._load(inventory)
        except OSError as error:
            raise InvalidArgument(f"{error.filename}: {error.strerror}") from None

    def _load(self, inventory: Inventory) -> Secrets:
        keyring = self._keyring()
        authority = self._authority()
        passwords = {
            service: self._password(service)
            for service in (ROOT, *ROLES, *map(runner_service, inventory.runner_hosts))
        }
        hosts, tokens = {}, []
        for host in inventory.hosts:
            folder = self._certificate(authority, host, days=inventory.certificate_days)
            stored = {
                name: self._token(keyring, host, TOKENS[name])
                for name in sorted(host.credentials & TOKENS.keys())
            }
            tokens += [one.entry for one in stored.values()]
            hosts[host.name] = HostSecrets(
                cert=(folder / HOST_CERT).read_bytes(),
                key=(folder / HOST_KEY).read_bytes(),
                tokens={name: one.token for name, one in stored.items()},
            )
        return Secrets(
            key=(self.folder / "key").read_bytes(),
            ca=(authority.folder / CA_CERT).read_bytes(),
            passwords=passwords,
            hosts=hosts,
            tokens=tuple(tokens),
        )

    def _keyring(self) -> Keyring:
        file = self.folder / "key"
        if not file.exists():
            self.changes.append("new key of the cluster")
        return Keyring.generate(file)

    def _authority(self) -> Authority:
        folder = self.folder / "ca"
        if (folder / CA_CERT).exists():
            return Authority.load(folder)
        # Without its certificate the key of an interrupted start signed nothing.
        (folder / "ca-key.pem").unlink(missing_ok=True)
        self.changes.append("new CA")
        return Authority.init(folder, days=_CA_DAYS)

    def _password(self, service: str) -> str:
        file = self.folder / "etcd" / service
        if not file.exists():
            write_private_file(file, secrets.token_hex(32) + "\n")
            self.changes.append(f"new password of {service} in etcd")
        password = file.read_text().strip()
        if not password:
            raise ConfigError(f"{file} is empty; remove it to get a new password")
        return password

    def _certificate(self, authority: Authority, host: Host, *, days: int) -> Path:
        folder = self.folder / "tls" / host.name
        names = list(dict.fromkeys([host.name, host.address, *host.names, "localhost"]))
        names = list(dict.fromkeys([*names, "127.0.0.1"]))
        reason = "" if "certificates" in self.rotate else _fault(folder, authority, names)
        if "certificates" in self.rotate or reason:
            authority.issue(names, folder, days=days, common_name=host.name, replace=True)
            self.changes.append(
                f"new certificate of {host.name}{f': the one before {reason}' * bool(reason)}"
            )
        return folder

    def _token(self, keyring: Keyring, host: Host, kind: _TokenKind) -> _StoredToken:
        subject = f"{kind.prefix}{host.name}"
        file = self.folder / "tokens" / subject
        stored = _stored_token(file, keyring, renew_s=kind.renew_s)
        if stored is not None and "tokens" not in self.rotate:
            return stored
        claims = issued_tokens.claims_for(
            kind.role, subject, life_s=kind.life_s, audience=kind.audience
        )
        renewable_s = issued_tokens.ROLES[kind.role].renewable_s
        entry = TokenEntry.of(claims, renewable_s=renewable_s, token_id=claims.token_id)
        stored = _StoredToken(token=keyring.sign(claims), entry=entry)
        replace_private_file(file, msgspec.json.encode(stored).decode() + "\n")
        self.changes.append(f"new token of the {kind.users} on {host.name}")
        return stored


def _fault(folder: Path, authority: Authority, names: Sequence[str]) -> str:
    """Return why a host needs a new certificate; "" for a sound one. The trusted CAs beside it are
    not used: hosts get those of the authority."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / HOST_CERT).read_bytes())
        (folder / HOST_KEY).read_bytes()
    except FileNotFoundError:
        return "is missing"
    except ValueError:
        return "is damaged"
    present = names_of(certificate)
    if set(present) != set(names):
        return f"is for {', '.join(present) or 'no name'}"
    if not any(is_issued_by(certificate, one) for one in authority.trusted):
        return "is signed by another CA"
    ends = certificate.not_valid_after_utc
    if ends - datetime.now(UTC) < RENEW < authority.signer.not_valid_after_utc - datetime.now(UTC):
        return f"expires on {ends:%Y-%m-%d}"
    return ""


def _stored_token(file: Path, keyring: Keyring, *, renew_s: float) -> _StoredToken | None:
    """Return a token that a new host can use; None if a new one is needed. Running runners renew
    theirs by themselves."""
    try:
        stored = msgspec.json.decode(file.read_bytes(), type=_StoredToken)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    entry = stored.entry
    now_s = datetime.now(UTC).timestamp()
    renewable_s = entry.renewable_until_unix_s - now_s
    ends = bool(entry.renewable_until_unix_s) and renewable_s < RENEW.total_seconds()
    if entry.expires_unix_s - now_s < renew_s or ends:
        return None
    try:
        # A token of a replaced key is refused.
        keyring.verify(stored.token, now_s=now_s)
    except ForgeError:
        return None
    return stored
