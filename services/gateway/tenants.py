"""Limits of tenants: model calls in flight and per second, and the size of a request.

A tenant is the user of a task, by the session token; all tasks without a user are one tenant. Each
gateway counts for itself. Owns the counts of tenants with calls; a quiet tenant costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from forge.core.errors import ResourceExhausted
from services.gateway.config import TenantSettings
from services.gateway.errors import RequestTooLarge
from services.gateway.metrics import REFUSED

MAX_QUIET = 1024
"""Tenants above which the quiet ones are dropped."""


@dataclass(slots=True)
class _Tenant:
    """The calls of one tenant."""

    calls: int = 0
    paid_s: float = 0.0
    """Time up to which the begun calls use the rate."""


class Tenants:
    """All tenants with calls at this gateway."""

    def __init__(self, settings: TenantSettings, *, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}

    def check_size(self, name: str, size_bytes: int) -> None:
        """Raises `RequestTooLarge` for a request of so many bytes."""
        settings = self._settings
        limit_mib = _limit(name, settings.max_request_mib, settings.max_request_mib_of)
        if limit_mib and size_bytes > limit_mib * (1 << 20):
            REFUSED.labels("tenant_size").inc()
            raise RequestTooLarge(
                f"the request has {size_bytes} bytes; a request of {_shown(name)} has at most "
                f"{limit_mib:g} MiB"
            )

    @contextmanager
    def admit(self, name: str) -> Iterator[None]:
        """Counts one model call for the length of a block. Raises `ResourceExhausted`."""
        tenant = self._tenants.get(name) or self._new(name)
        self._check_calls(name, tenant)
        self._pay(name, tenant)
        tenant.calls += 1
        try:
            yield
        finally:
            tenant.calls -= 1

    def _check_calls(self, name: str, tenant: _Tenant) -> None:
        limit = _limit(name, self._settings.max_calls, self._settings.max_calls_of)
        if limit and tenant.calls >= limit:
            REFUSED.labels("tenant_calls").inc()
            raise ResourceExhausted(
                f"{_shown(name)} has {tenant.calls} calls in flight, its maximum", retry_after_s=1.0
            )

    def _pay(self, name: str, tenant: _Tenant) -> None:
        rate = _limit(name, self._settings.calls_per_s, self._settings.calls_per_s_of)
        if not rate:
            return
        now_s = self._clock()
        paid_s = max(tenant.paid_s, now_s)
        # Equivalent to a bucket that holds `burst_calls` and fills by `rate`.
        wait_s = paid_s - now_s - (self._settings.burst_calls - 1) / rate
        if wait_s > 0:
            REFUSED.labels("tenant_rate").inc()
            raise ResourceExhausted(
                f"{_shown(name)} begins more than {rate:g} calls per second, its maximum",
                retry_after_s=wait_s,
            )
        tenant.paid_s = paid_s + 1 / rate

    def _new(self, name: str) -> _Tenant:
        if len(self._tenants) >= MAX_QUIET:
            now_s = self._clock()
            busy = {
                known: one
                for known, one in self._tenants.items()
                if one.calls or one.paid_s > now_s
            }
            self._tenants = busy
        tenant = self._tenants[name] = _Tenant()
        return tenant


def _limit(name: str, general: float, single: Mapping[str, float]) -> float:
    return single.get(name, general)


def _shown(name: str) -> str:
    return "this user" if name else "all tasks without a user"
