"""Issued tokens of people and runners: their record in etcd, and revocation.

One value in etcd has every issued and every revoked token until it has expired; no secret is in it.
Every service follows it, and keeps its last view while etcd is unreachable or has lost its data.
Not here: signatures (`tokens`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from forge.core.errors import FailedPrecondition, InvalidArgument, StaleFence
from forge.runtime.coordination import Coordinator, Versioned
from forge.runtime.security.credentials import Security
from forge.runtime.security.tokens import Claims, Keyring, new_token_id
from forge.runtime.telemetry import log

KEY = "tokens"
MAX_LIFE_S = 366 * 86_400.0
KEPT_S = 604_800.0
"""A record outlives its token by the largest `clock_tolerance_s`."""
_READ = frozenset(
    {"SchedulerService", "PoolService", "InferenceService", "TrainerService", "DrainService"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDefaults:
    """Default lifetime and audience of a role's tokens."""

    life_s: float
    audience: frozenset[str]
    renewable_s: float = 0.0
    """Time from the issue in which a token can be renewed."""


ROLES: Mapping[str, RoleDefaults] = {
    "viewer": RoleDefaults(life_s=30 * 86_400.0, audience=_READ),
    "operator": RoleDefaults(life_s=12 * 3600.0, audience=_READ),
    "admin": RoleDefaults(life_s=3600.0, audience=_READ),
    "runner": RoleDefaults(
        life_s=30 * 86_400.0,
        audience=frozenset({"SchedulerService"}),
        renewable_s=MAX_LIFE_S,
    ),
    "rank": RoleDefaults(life_s=30 * 86_400.0, audience=frozenset({"PoolService"})),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """One issued token, without its signature."""

    subject: str
    scopes: tuple[str, ...]
    audience: tuple[str, ...]
    issued_unix_s: float
    expires_unix_s: float
    renewable_until_unix_s: float = 0.0
    """Latest expiry of a renewal; 0: it cannot be renewed."""
    revoked_unix_s: float = 0.0
    """0: not revoked."""
    issued_by: str = ""
    """user@host."""
    revoked_by: str = ""

    @classmethod
    def of(cls, claims: Claims, *, renewable_s: float, **more: str) -> Self:
        """Describe a new token; `renewable_s`: time from its issue in which it can be renewed,
        `more`: further fields."""
        return cls(
            subject=claims.subject,
            scopes=tuple(sorted(claims.scopes)),
            audience=tuple(sorted(claims.audience)),
            issued_unix_s=claims.issued_unix_s,
            expires_unix_s=claims.expires_unix_s,
            renewable_until_unix_s=claims.issued_unix_s + renewable_s if renewable_s else 0.0,
            **more,  # type: ignore[arg-type]
        )

    @property
    def last_expiry_unix_s(self) -> float:
        """Returns the latest expiry of the token and of its renewals."""
        return max(self.expires_unix_s, self.renewable_until_unix_s)


def claims_for(
    role: str, subject: str, *, life_s: float | None = None, audience: frozenset[str] | None = None
) -> Claims:
    """Return the claims of a new token. Raises InvalidArgument."""
    if role not in ROLES:
        raise InvalidArgument(f"role {role!r} must be one of {', '.join(ROLES)}")
    life_s = ROLES[role].life_s if life_s is None else life_s
    if not 0 < life_s <= MAX_LIFE_S:
        raise InvalidArgument(f"a token lives for at most {MAX_LIFE_S / 86_400:g} days")
    now_s = time.time()
    return Claims(
        subject=subject,
        scopes=frozenset({role}),
        token_id=new_token_id(),
        audience=audience or ROLES[role].audience,
        issued_unix_s=now_s,
        expires_unix_s=now_s + life_s,
    )


async def issue(
    coordinator: Coordinator,
    keyring: Keyring,
    claims: Claims,
    *,
    by: str,
    renewable_s: float = 0.0,
) -> str:
    """Record a token, then return it; `renewable_s`: time from now in which it can be renewed.
    Raises InvalidArgument, Unavailable."""
    if renewable_s > MAX_LIFE_S:
        raise InvalidArgument(f"a token is renewable for at most {MAX_LIFE_S / 86_400:g} days")
    record = TokenRecord.of(claims, renewable_s=renewable_s, issued_by=by)
    await _change(coordinator, claims.token_id, lambda _: record)
    return keyring.sign(claims)


async def record_once(coordinator: Coordinator, token_id: str, record: TokenRecord) -> bool:
    """Record a token that was signed before etcd ran; return False for a token that has a record,
    which stays: it may be revoked. Raises Unavailable."""
    if token_id in await records(coordinator):
        return False
    await _change(coordinator, token_id, lambda present: present or record)
    return True


async def renew(
    coordinator: Coordinator, keyring: Keyring, claims: Claims, *, now_s: float
) -> tuple[str, Claims]:
    """Return a token with the same id and lifetime, from now, for the verified claims of a valid
    one, and its claims. The record is not changed.

    Raises FailedPrecondition if the token is not renewable (any more), and Unavailable.
    """
    record = (await records(coordinator)).get(claims.token_id)
    if record is None or record.revoked_unix_s or set(record.scopes) != claims.scopes:
        raise FailedPrecondition(f"the token of {claims.subject} was not issued as renewable")
    if now_s >= record.renewable_until_unix_s:
        raise FailedPrecondition(
            f"token {claims.token_id} of {claims.subject} is not renewable; issue a new one"
        )
    life_s = record.expires_unix_s - record.issued_unix_s
    renewed = replace(
        claims,
        # The call has a token that is narrowed to its service.
        audience=frozenset(record.audience),
        issued_unix_s=now_s,
        expires_unix_s=min(now_s + life_s, record.renewable_until_unix_s),
    )
    return keyring.sign(renewed), renewed


async def revoke(coordinator: Coordinator, token_id: str, *, by: str) -> TokenRecord:
    """Revoke a token: services refuse it from their next view on. Raises Unavailable.

    The id of an unrecorded token, e.g. of a session, is kept for the longest lifetime.
    """
    now_s = time.time()
    unrecorded = TokenRecord(
        subject="",
        scopes=(),
        audience=(),
        issued_unix_s=0.0,
        expires_unix_s=now_s + MAX_LIFE_S,
    )
    return await _change(
        coordinator,
        token_id,
        lambda record: replace(record or unrecorded, revoked_unix_s=now_s, revoked_by=by),
    )


async def records(coordinator: Coordinator) -> dict[str, TokenRecord]:
    """Return the issued and revoked tokens by id. Raises Unavailable."""
    return _read(await coordinator.get(KEY))


async def follow_revocations(coordinator: Coordinator, security: Security) -> None:
    """Keep `security.revoked` up to date, without end."""
    async with aclosing(coordinator.follow(KEY)) as values:
        async for value in values:
            apply_revocations(security, value)


async def read_revocations(coordinator: Coordinator, security: Security) -> None:
    """Apply the revocations of now. Raises Unavailable."""
    apply_revocations(security, await coordinator.get(KEY))


def apply_revocations(security: Security, value: Versioned | None) -> None:
    """Add the revocations of a value. A missing one stays: etcd may have lost its data."""
    try:
        issued = _read(value)
    except msgspec.MsgspecError as error:
        log.error("tokens_unreadable", key=KEY, error=str(error))
        return
    found = {one: r.last_expiry_unix_s for one, r in issued.items() if r.revoked_unix_s}
    for token_id in found.keys() - security.revoked.keys():
        log.info("token_revoked", token_id=token_id, by=issued[token_id].revoked_by)
    oldest_s = time.time() - KEPT_S
    merged = {**security.revoked, **found}
    security.revoked = {one: at_s for one, at_s in merged.items() if at_s > oldest_s}


async def _change(
    coordinator: Coordinator, token_id: str, change: Callable[[TokenRecord | None], TokenRecord]
) -> TokenRecord:
    while True:
        value = await coordinator.get(KEY)
        oldest_s = time.time() - KEPT_S
        kept = {one: r for one, r in _read(value).items() if r.last_expiry_unix_s > oldest_s}
        changed = kept[token_id] = change(kept.get(token_id))
        revision = 0 if value is None else value.mod_revision
        try:
            await coordinator.compare_and_swap(
                KEY, msgspec.json.encode(kept), expected_revision=revision
            )
        except StaleFence:
            continue
        return changed


def _read(value: Versioned | None) -> dict[str, TokenRecord]:
    return {} if value is None else msgspec.json.decode(value.value, type=dict[str, TokenRecord])
