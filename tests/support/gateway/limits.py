"""Limits of a gateway for tests: none, unless a test sets them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypedDict

from services.gateway.admission import CallAdmission
from services.gateway.config import TenantSettings
from services.gateway.http.bodies import Bodies
from services.gateway.tenants import Tenants


class EdgeLimits(TypedDict):
    """The limits of an `Edge`."""

    bodies: Bodies
    tenants: Tenants


def tenants_of(
    settings: TenantSettings | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Tenants:
    return Tenants(settings or TenantSettings(), clock=clock)


def edge_limits(
    settings: TenantSettings | None = None,
    *,
    most_bytes: int = 1 << 30,
    most_of_session_bytes: int = 1 << 30,
) -> EdgeLimits:
    bodies = Bodies(most_bytes=most_bytes, most_of_session_bytes=most_of_session_bytes)
    return {"bodies": bodies, "tenants": tenants_of(settings)}


def admission_of(*, calls: int = 100, calls_per_session: int = 4) -> CallAdmission:
    return CallAdmission(calls=calls, calls_per_session=calls_per_session, tenants=tenants_of())
