"""Authorization by signed tokens, and TLS between hosts.

A token is `v1.<claims>.<mac>`: claims as JSON, mac = HMAC-SHA256 under the cluster's key, both
base64url. Every process of a cluster has the key file and verifies tokens by itself. Without TLS,
Forge listens on the loopback interface only, unless `insecure` is set.

The clocks of the token's issuer and verifier differ. A verifier therefore accepts an expired token
for `clock_tolerance_s` more, so that one wrong clock does not stop a cluster; a captured token can
be replayed for that time. docs/runtime.md has the reasons.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path

import grpc

from forge.core.errors import ConfigError, Unauthenticated
from forge.runtime.config import CLOCK_TOLERANCE_S, ServiceConfig

_VERSION = "v1"
_MIN_KEY_BYTES = 32
_CACHED_TOKENS = 8192
_SERVICE_TOKEN_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """The claims of a verified token."""

    subject: str
    """An instance id, an operator's name, or a session's trajectory."""
    scopes: frozenset[str]
    """Any of "service", "operator", "runner", "session"."""
    trajectory_id: str = ""
    task_id: str = ""
    domain: str = ""
    pool_shard: str = ""
    context_tokens: int = 0
    """Longest context of the session, prompt and answer; 0: the model's."""
    expires_unix_s: float = 0.0
    """0: never."""

    def context_limit(self, model_tokens: int) -> int:
        """Return the longest context of this session; `model_tokens` is the model's."""
        return min(model_tokens, self.context_tokens or model_tokens)

    def allows(self, scope: str) -> bool:
        """Whether the scopes include `scope` ("a|b": either; "": no scope is needed).

        "service" includes every scope but "session".
        """
        if not scope:
            return True
        held = self.scopes
        return any(
            one in held or (one != "session" and "service" in held) for one in scope.split("|")
        )


ANONYMOUS = Claims(subject="", scopes=frozenset())


class Keyring:
    """The cluster's keys: the first signs, all verify; so a rotation needs no pause."""

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        if not keys or any(len(key) < _MIN_KEY_BYTES for key in keys):
            raise ConfigError(f"a signing key needs at least {_MIN_KEY_BYTES} bytes")
        self._keys = keys
        self._verified: dict[str, Claims] = {}

    @classmethod
    def from_bytes(cls, *keys: bytes) -> Keyring:
        """Return the ring of these keys; the first signs."""
        return cls(keys)

    @classmethod
    def from_file(cls, path: str | Path) -> Keyring:
        """Read one key a line, at least 32 characters each; the first signs."""
        try:
            mode = Path(path).stat().st_mode
            lines = Path(path).read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"key_file = {str(path)!r}: {error.strerror}") from None
        if mode & 0o007:
            raise ConfigError(f"key_file = {str(path)!r} is open to every user: chmod o= {path}")
        keys = tuple(line.strip() for line in lines if line.strip())
        if not keys or any(len(key) < _MIN_KEY_BYTES for key in keys):
            raise ConfigError(
                f"key_file = {str(path)!r}: each line must be a key of at least "
                f"{_MIN_KEY_BYTES} characters"
            )
        return cls(keys)

    @classmethod
    def generate(cls, path: str | Path) -> Keyring:
        """Write a new key to a file for its owner alone; an existing file stays.

        Raises ConfigError for an unwritable path.
        """
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return cls.from_file(path)
        except OSError as error:
            raise ConfigError(f"key_file = {str(path)!r}: {error.strerror}") from None
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(_MIN_KEY_BYTES) + "\n")
            file.flush()
            os.fsync(descriptor)
        return cls.from_file(path)

    def sign(self, claims: Claims) -> str:
        """Return a signed token with these claims."""
        payload = {
            "sub": claims.subject,
            "scopes": sorted(claims.scopes),
            "trajectory": claims.trajectory_id,
            "task": claims.task_id,
            "domain": claims.domain,
            "shard": claims.pool_shard,
            "context": claims.context_tokens,
            "exp": claims.expires_unix_s,
        }
        compact = {name: value for name, value in payload.items() if value}
        body = f"{_VERSION}.{_encode(json.dumps(compact, separators=(',', ':')).encode())}"
        return f"{body}.{_encode(_mac(self._keys[0], body))}"

    def verify(self, token: str, *, now_s: float, tolerance_s: float = 0.0) -> Claims:
        """Return the claims of a token. Raises Unauthenticated for a forged or expired one.

        `now_s`: Unix time; `tolerance_s`: time after its expiry in which a token is accepted.
        """
        claims = self._verified.get(token)
        if claims is None:
            claims = self._verify_mac(token)
            if len(self._verified) >= _CACHED_TOKENS:
                # A dropped token costs one HMAC; no LRU needed.
                self._verified.clear()
            self._verified[token] = claims
        if claims.expires_unix_s and now_s >= claims.expires_unix_s + tolerance_s:
            raise Unauthenticated(
                f"the token of {claims.subject} has expired: {now_s - claims.expires_unix_s:.0f} s "
                f"ago by the clock of {socket.gethostname()}, and {tolerance_s:g} s are tolerated; "
                "`forge doctor` compares the clocks"
            )
        return claims

    def _verify_mac(self, token: str) -> Claims:
        body, _, mac_text = token.rpartition(".")
        version, _, payload = body.partition(".")
        if version != _VERSION:
            raise Unauthenticated("the token is not one of this cluster's")
        try:
            mac = _decode(mac_text)
            # Constant time: tries every key.
            genuine = [hmac.compare_digest(_mac(key, body), mac) for key in self._keys]
            if not any(genuine):
                raise Unauthenticated("the token was not signed by this cluster's key")
            fields = json.loads(_decode(payload))
        except (binascii.Error, ValueError):
            raise Unauthenticated("the token is malformed") from None
        return Claims(
            subject=fields.get("sub", ""),
            scopes=frozenset(fields.get("scopes", ())),
            trajectory_id=fields.get("trajectory", ""),
            task_id=fields.get("task", ""),
            domain=fields.get("domain", ""),
            pool_shard=fields.get("shard", ""),
            context_tokens=int(fields.get("context", 0)),
            expires_unix_s=float(fields.get("exp", 0.0)),
        )


class Security:
    """Credentials of a process: key ring, TLS files, and the token of its own calls."""

    def __init__(
        self,
        keyring: Keyring,
        *,
        subject: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        tls_ca: str = "",
        tls_client_auth: bool = True,
        insecure: bool = False,
        clock_tolerance_s: float = CLOCK_TOLERANCE_S,
    ) -> None:
        if bool(tls_cert) != bool(tls_key):
            raise ConfigError("tls_cert and tls_key must be set together")
        self.keyring = keyring
        self._subject = subject
        self._cert = read_pem("tls_cert", tls_cert)
        self._key = read_pem("tls_key", tls_key)
        self._ca = read_pem("tls_ca", tls_ca)
        self._client_auth = tls_client_auth
        self._insecure = insecure
        self._clock_tolerance_s = clock_tolerance_s
        self._token = ""
        self._token_made_s = -inf

    @classmethod
    def from_config(cls, config: ServiceConfig) -> Security:
        """Read the key file and the TLS files. Raises ConfigError."""
        if not config.key_file:
            raise ConfigError(
                "key_file is not set: all processes of a cluster share one signing key "
                "(make one: forge key FILE)"
            )
        return cls(
            Keyring.from_file(config.key_file),
            subject=config.instance_id,
            tls_cert=config.tls_cert,
            tls_key=config.tls_key,
            tls_ca=config.tls_ca,
            tls_client_auth=config.tls_client_auth,
            insecure=config.insecure,
            clock_tolerance_s=config.clock_tolerance_s,
        )

    def service_token(self) -> str:
        """Return a token with scope "service", renewed at half its life."""
        # Age by the monotonic clock: an operator may set the wall clock back.
        now_s = time.monotonic()
        if now_s > self._token_made_s + _SERVICE_TOKEN_S / 2:
            self._token_made_s = now_s
            self._token = self.keyring.sign(
                Claims(
                    subject=self._subject,
                    scopes=frozenset({"service"}),
                    expires_unix_s=time.time() + _SERVICE_TOKEN_S,
                )
            )
        return self._token

    def verify(self, token: str) -> Claims:
        """Return the claims of a caller's token. Raises Unauthenticated."""
        return self.keyring.verify(token, now_s=time.time(), tolerance_s=self._clock_tolerance_s)

    def server_credentials(self, host: str) -> grpc.ServerCredentials | None:
        """TLS with a certificate, else None (plain TCP). Raises ConfigError where TLS is needed."""
        if self._cert is None or self._key is None:
            self.require_plain_allowed(host)
            return None
        mutual = self._client_auth and self._ca is not None
        return grpc.ssl_server_credentials(
            [(self._key, self._cert)],
            root_certificates=self._ca if mutual else None,
            require_client_auth=mutual,
        )

    def channel_credentials(self, address: str) -> grpc.ChannelCredentials | None:
        """TLS with a `tls_ca`, else None (plain TCP). Raises ConfigError where TLS is needed."""
        if self._ca is None:
            self.require_plain_allowed(address.rpartition(":")[0])
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=self._ca, private_key=self._key, certificate_chain=self._cert
        )

    def etcd_credentials(self, endpoints: str) -> grpc.ChannelCredentials | None:
        """TLS for https:// endpoints, with this host's certificate if it has one; else None."""
        if "https://" not in endpoints or self._ca is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=self._ca, private_key=self._key, certificate_chain=self._cert
        )

    def require_plain_allowed(self, host: str) -> None:
        """Raises ConfigError where plain TCP to `host` is not allowed."""
        if not self._insecure and not is_loopback(host):
            raise ConfigError(
                f"host = {host!r} is not a loopback address, so TLS is needed: set tls_cert, "
                f"tls_key and tls_ca (or insecure = true on a network you trust)"
            )


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_pem(name: str, path: str) -> bytes | None:
    """Read a PEM file, None for "". Raises `ConfigError` with the setting `name` and the path."""
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} = {path!r}: {error.strerror}") from None


def _mac(key: bytes, body: str) -> bytes:
    return hmac.digest(key, body.encode(), hashlib.sha256)


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
