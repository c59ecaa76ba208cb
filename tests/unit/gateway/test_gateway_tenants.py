"""Limits of tenants: each tenant has its own, and its end or the time makes room."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from prometheus_client import REGISTRY

from forge.core.errors import ResourceExhausted
from forge.runtime.security.tokens import Claims
from services.gateway.config import TenantSettings
from services.gateway.errors import RequestTooLarge
from services.gateway.tenants import MAX_QUIET, Tenants
from tests.support.gateway.limits import admission_of, tenants_of


class Clock:
    """Seconds, set by a test."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def refused(limit: str) -> float:
    return REGISTRY.get_sample_value("forge_gateway_refused_total", {"limit": limit}) or 0.0


def session_claims(trajectory_id: str) -> Claims:
    return Claims(subject=trajectory_id, scopes=frozenset({"session"}), trajectory_id=trajectory_id)


def begin(tenants: Tenants, name: str) -> None:
    """A call that ends at once."""
    with tenants.admit(name):
        pass


def test_calls_in_flight_are_limited_per_tenant() -> None:
    """Of the limited user and of all tasks without a user; a named limit replaces the general."""
    tenants = tenants_of(TenantSettings(max_calls=1, max_calls_of={"eve": 2}))
    before = refused("tenant_calls")
    with ExitStack() as calls:
        for name in ("ada", "", "eve", "eve"):
            calls.enter_context(tenants.admit(name))
        for name, shown in (("ada", "this user has 1"), ("", "without a user has 1"), ("eve", "2")):
            with pytest.raises(ResourceExhausted, match=shown) as error:
                begin(tenants, name)
            assert error.value.retry_after_s == 1.0
            assert "ada" not in str(error.value) and "eve" not in str(error.value)
    begin(tenants, "ada")
    assert refused("tenant_calls") - before == 3


def test_calls_per_second_are_limited_per_tenant() -> None:
    """A burst, then the rate; the hint is the time to the next call, and another tenant has its
    own."""
    clock = Clock()
    settings = TenantSettings(calls_per_s_of={"ada": 4.0}, burst_calls=3)
    tenants = tenants_of(settings, clock=clock)
    for _ in range(3):
        begin(tenants, "ada")
    with pytest.raises(ResourceExhausted, match="more than 4 calls per second") as error:
        begin(tenants, "ada")
    assert error.value.retry_after_s == pytest.approx(0.25)
    for _ in range(9):
        begin(tenants, "eve")
    clock.now_s += 0.25
    begin(tenants, "ada")
    with pytest.raises(ResourceExhausted):
        begin(tenants, "ada")
    clock.now_s += 100.0
    for _ in range(3):
        begin(tenants, "ada")
    with pytest.raises(ResourceExhausted):
        begin(tenants, "ada")


def test_refused_calls_use_no_rate() -> None:
    """A call beyond the calls in flight leaves the rate to the next one."""
    settings = TenantSettings(max_calls=1, calls_per_s=1.0, burst_calls=2)
    tenants = tenants_of(settings, clock=Clock())
    with tenants.admit("ada"):
        for _ in range(5):
            with pytest.raises(ResourceExhausted, match="in flight"):
                begin(tenants, "ada")
    begin(tenants, "ada")


def test_size_of_a_request_is_limited_per_tenant() -> None:
    """Such a request is refused for good, as 413 and INVALID_ARGUMENT."""
    tenants = tenants_of(TenantSettings(max_request_mib=1.0, max_request_mib_of={"eve": 2.0}))
    tenants.check_size("ada", 1 << 20)
    tenants.check_size("eve", 2 << 20)
    with pytest.raises(RequestTooLarge, match="has at most 1 MiB") as error:
        tenants.check_size("ada", 2 << 20)
    assert (error.value.http_status, error.value.code) == (413, "INVALID_ARGUMENT")
    assert not error.value.retryable
    tenants_of().check_size("ada", 1 << 40)


def test_quiet_tenants_take_no_memory() -> None:
    """Tenants with calls in flight or with a used rate stay, all others are dropped."""
    clock = Clock()
    settings = TenantSettings(max_calls=1, calls_per_s=1.0, burst_calls=1)
    tenants = tenants_of(settings, clock=clock)
    with tenants.admit("busy"):
        for number in range(2 * MAX_QUIET):
            clock.now_s += 1.0
            begin(tenants, f"user-{number}")
        assert len(tenants._tenants) <= MAX_QUIET
        with pytest.raises(ResourceExhausted, match="in flight"):
            begin(tenants, "busy")
        with pytest.raises(ResourceExhausted, match="per second"):
            begin(tenants, f"user-{2 * MAX_QUIET - 1}")


async def test_one_session_does_not_fill_the_calls_of_a_gateway() -> None:
    """It has its own bound, and an ended session leaves no count."""
    admission = admission_of(calls=5, calls_per_session=3)
    one, other = session_claims("t:0:0"), session_claims("u:0:0")
    with ExitStack() as calls:
        for claims in (one, one, one, other):
            calls.enter_context(admission.admit(claims))
        with pytest.raises(ResourceExhausted, match="session t:0:0 has 3 calls in flight"):
            calls.enter_context(admission.admit(one))
        calls.enter_context(admission.admit(other))
        with pytest.raises(ResourceExhausted, match="5 calls are in flight"):
            calls.enter_context(admission.admit(other))
    assert not admission._by_session
