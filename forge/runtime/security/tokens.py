"""Signed tokens: their claims, and the cluster's keys.

A token is `v1.<claims>.<mac>`: claims as JSON, mac = HMAC-SHA256 under the cluster's key, both
base64url. Every service has the key file and verifies tokens by itself. Its holder can narrow a
token without the key: `v1.<claims>.<narrowing>.<mac>`, mac = HMAC-SHA256 under the token's own mac.
Not here: the tokens of a process's own calls (`credentials`), issued tokens and
revocations (`issued_tokens`).

The clocks of the token's issuer and verifier differ. A verifier therefore accepts an expired token
for `clock_tolerance_s` more, so that one wrong clock does not stop a cluster; a captured token can
be replayed for that time. docs/runtime.md has the reasons.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.core.clocks import time_text
from forge.core.errors import ConfigError, Unauthenticated
from forge.runtime.files.changes import FileChanges
from forge.runtime.files.private import write_private_file

_VERSION = "v1"
_MIN_KEY_BYTES = 32
_MAC_BYTES = 32
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors of the decoding of a text that is no token."""
_CACHED_TOKENS = 8192
_PERSON_TOLERANCE_S = 300.0
"""Clock tolerance for tokens of people: a short life must stay short."""
PERSONS = frozenset({"admin", "operator", "viewer"})
_INCLUDED = {
    "service": PERSONS | {"runner", "rank"},
    "admin": frozenset({"operator", "viewer", "rank"}),
    "operator": frozenset({"viewer"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """The claims of a verified token."""

    subject: str
    """An instance id, an operator's name, or a session's trajectory."""
    scopes: frozenset[str]
    """Any of "service", "admin", "operator", "viewer", "runner", "rank", "session", "grader"."""
    token_id: str = ""
    """Revokes this token; "" in tokens of an earlier release."""
    audience: frozenset[str] = frozenset()
    """Proto services that accept the token; empty: all (tokens of an earlier release)."""
    trajectory_id: str = ""
    task_id: str = ""
    domain: str = ""
    tenant: str = ""
    """User of the task: all sessions of a user share the limits of a tenant at a gateway."""
    pool_shard: str = ""
    context_tokens: int = 0
    """Longest context of the session, prompt and answer; 0: the model's."""
    agent_rewards: bool = False
    """The agent of the session may report rewards of itself."""
    chat_template_kwargs: str = ""
    """Variables of the chat template for the session, as a JSON object; "" for none."""
    sampling: str = ""
    """Sampling policy of the session: "agent", "override" or "bound"; "": agent."""
    models: tuple[str, ...] = ()
    """Models beside the policy that the session may call; empty: those that are open to all."""
    issued_unix_s: float = 0.0
    expires_unix_s: float = 0.0
    """0: never."""

    def context_limit(self, model_tokens: int) -> int:
        """Return the longest context of this session; `model_tokens` is the model's."""
        return min(model_tokens, self.context_tokens or model_tokens)

    def allows(self, scope: str) -> bool:
        """Whether the scopes include `scope` ("a|b": either; "": no scope is needed).

        "service" includes every scope but "session" and "grader"; "admin" > "operator" > "viewer",
        and "admin" > "rank".
        """
        if not scope:
            return True
        granted = self.scopes.union(*(_INCLUDED.get(one, ()) for one in self.scopes))
        return any(one in granted for one in scope.split("|"))


ANONYMOUS = Claims(subject="", scopes=frozenset())


def new_token_id() -> str:
    """Return a random id for a token."""
    return secrets.token_hex(8)


class Keyring:
    """The cluster's keys: the first signs, all verify; so a rotation needs no pause."""

    def __init__(
        self, keys: tuple[bytes, ...], *, file: str | Path = "", changes: FileChanges | None = None
    ) -> None:
        if not keys or any(len(key) < _MIN_KEY_BYTES for key in keys):
            raise ConfigError(f"a signing key needs at least {_MIN_KEY_BYTES} bytes")
        self._keys = keys
        self._file = file
        self._changes = changes or FileChanges(file)
        self._verified: dict[str, Claims] = {}

    @classmethod
    def from_bytes(cls, *keys: bytes) -> Keyring:
        """Return the ring of these keys; the first signs."""
        return cls(keys)

    @classmethod
    def from_file(cls, path: str | Path) -> Keyring:
        """Read one key a line, at least 32 characters each; the first signs."""
        # The changes first: one during the read is then seen.
        changes = FileChanges(path)
        return cls(_read_keys(path), file=path, changes=changes)

    def reload(self) -> bool:
        """Read a changed file; return whether it changed. Raises ConfigError, once for each change,
        for an invalid file; the keys before stay in use."""
        if not self._changes.settled():
            return False
        self._keys = _read_keys(self._file)
        self._verified.clear()
        return True

    @classmethod
    def generate(cls, path: str | Path) -> Keyring:
        """Write a new key to a file for its owner alone; an existing file stays.

        Raises ConfigError for an unwritable path.
        """
        try:
            write_private_file(path, secrets.token_hex(_MIN_KEY_BYTES) + "\n")
        except FileExistsError:
            pass
        except OSError as error:
            raise ConfigError(f"key_file = {str(path)!r}: {error.strerror}") from None
        return cls.from_file(path)

    def sign(self, claims: Claims) -> str:
        """Return a signed token with these claims."""
        payload = {
            "sub": claims.subject,
            "scopes": sorted(claims.scopes),
            "jti": claims.token_id,
            "aud": sorted(claims.audience),
            "iat": claims.issued_unix_s,
            "trajectory": claims.trajectory_id,
            "task": claims.task_id,
            "domain": claims.domain,
            "tenant": claims.tenant,
            "shard": claims.pool_shard,
            "context": claims.context_tokens,
            "agent_rewards": claims.agent_rewards,
            "template": claims.chat_template_kwargs,
            "sampling": claims.sampling,
            "models": list(claims.models),
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
        if claims.scopes & PERSONS:
            tolerance_s = min(tolerance_s, _PERSON_TOLERANCE_S)
        if claims.expires_unix_s and now_s >= claims.expires_unix_s + tolerance_s:
            raise Unauthenticated(
                f"the token of {claims.subject} has expired at "
                f"{time_text(claims.expires_unix_s)}, the clock of {socket.gethostname()} shows "
                f"{time_text(now_s)}, and {tolerance_s:g} s are tolerated; `forge doctor` compares "
                "the clocks"
            )
        return claims

    def _verify_mac(self, token: str) -> Claims:
        body, _, mac = token.rpartition(".")
        return self._signed_claims(body, mac, lambda own: own)

    def verify_signature(self, signer: str, text: str, signature: str) -> Claims:
        """Return the claims of the token, without its mac, that signed a text; its expiry does not
        count. Raises Unauthenticated."""
        return self._signed_claims(signer, signature, lambda own: _mac(own, text))

    def _signed_claims(self, body: str, mac: str, derived: Callable[[bytes], bytes]) -> Claims:
        """`derived`: the expected mac, from the token's own."""
        version, *parts = body.split(".")
        if version != _VERSION or not 1 <= len(parts) <= 2:
            raise Unauthenticated("the token is not one of this cluster's")
        try:
            given = _decode(mac)
            # Constant time: tries every key.
            genuine = [hmac.compare_digest(derived(own), given) for own in self._macs(*parts)]
            if not any(genuine):
                raise Unauthenticated("the token was not signed by this cluster's key")
            return _claims(*(json.loads(_decode(part)) for part in parts))
        except _MALFORMED:
            raise Unauthenticated("the token is malformed") from None

    def _macs(self, payload: str, *narrowings: str) -> Iterator[bytes]:
        """Yield the mac of a token under each key."""
        for key in self._keys:
            mac = _mac(key, f"{_VERSION}.{payload}")
            for narrowing in narrowings:
                mac = _mac(mac, narrowing)
            yield mac


def _read_keys(path: str | Path) -> tuple[bytes, ...]:
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
    return keys


def audience_of(method: str) -> str:
    """Return the audience of tokens for "/package.Service/Method": its service's simple name."""
    return method.rpartition("/")[0].rpartition(".")[2]


def unverified_claims(token: str) -> Claims:
    """Return the claims of a token without a check of who signed it: for its holder alone. Raises
    Unauthenticated for a malformed one."""
    signer, _ = _parts(token)
    try:
        version, payload, *_ = signer.split(".")
        if version == _VERSION:
            return _claims(json.loads(_decode(payload)))
    except _MALFORMED:
        pass
    raise Unauthenticated("the token is malformed")


def narrow(token: str, audience: str) -> str:
    """Return a token of the same claims for one audience alone; needs no key. Raises
    Unauthenticated for a malformed one."""
    body, mac = _parts(token)
    narrowing = _encode(json.dumps({"aud": [audience]}, separators=(",", ":")).encode())
    return f"{body}.{narrowing}.{_encode(_mac(mac, narrowing))}"


def sign_text(token: str, text: str) -> Mapping[str, str]:
    """Return the fields `signer` and `signature` of a text signed by a token's holder. Raises
    Unauthenticated for a malformed token."""
    signer, mac = _parts(token)
    return {"signer": signer, "signature": _encode(_mac(mac, text))}


def _parts(token: str) -> tuple[str, bytes]:
    """The token without its mac, and the mac."""
    signer, _, mac = token.rpartition(".")
    try:
        decoded = _decode(mac)
    except ValueError:
        decoded = b""
    if len(decoded) != _MAC_BYTES:
        raise Unauthenticated("the token is malformed")
    return signer, decoded


def _claims(fields: dict[str, Any], narrowing: dict[str, Any] | None = None) -> Claims:
    audience = frozenset(fields.get("aud", ()))
    if narrowing is not None:
        narrowed = frozenset(narrowing["aud"])
        audience = audience & narrowed if audience else narrowed
        if not audience:
            raise Unauthenticated("the token is not for this service")
    return Claims(
        subject=fields.get("sub", ""),
        scopes=frozenset(fields.get("scopes", ())),
        token_id=fields.get("jti", ""),
        audience=audience,
        trajectory_id=fields.get("trajectory", ""),
        task_id=fields.get("task", ""),
        domain=fields.get("domain", ""),
        tenant=fields.get("tenant", ""),
        pool_shard=fields.get("shard", ""),
        context_tokens=int(fields.get("context", 0)),
        agent_rewards=bool(fields.get("agent_rewards", False)),
        chat_template_kwargs=str(fields.get("template", "")),
        sampling=fields.get("sampling", ""),
        models=tuple(fields.get("models", ())),
        issued_unix_s=float(fields.get("iat", 0.0)),
        expires_unix_s=float(fields.get("exp", 0.0)),
    )


def _mac(key: bytes, body: str) -> bytes:
    return hmac.digest(key, body.encode(), hashlib.sha256)


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
