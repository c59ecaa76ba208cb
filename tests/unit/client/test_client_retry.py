"""When a call is made again, by a clock that the test moves."""

from __future__ import annotations

import pytest

from forge.client.retry import retried
from forge.core.errors import (
    DeadlineExceeded,
    ForgeError,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s


async def attempt_against(
    clock: Clock, *errors: ForgeError, retry_for_s: float = 10.0, **options: object
) -> str:
    """Fails with each error in turn, then succeeds."""
    left = list(errors)

    async def attempt() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return await retried(
        attempt,
        retry_for_s=retry_for_s,
        clock=clock,
        sleep=clock.sleep,
        **options,  # type: ignore[arg-type]
    )


async def test_temporary_failure_is_retried_after_growing_pauses() -> None:
    """Each pause is about twice the one before, with jitter."""
    clock = Clock()
    assert await attempt_against(clock, *[Unavailable("away")] * 4) == "done"
    for pause_s, nominal_s in zip(clock.pauses_s, (0.05, 0.1, 0.2, 0.4), strict=True):
        assert 0.5 * nominal_s <= pause_s <= 1.5 * nominal_s


async def test_retry_pause_is_the_servers_hint() -> None:
    """If the server gives one."""
    clock = Clock()
    await attempt_against(clock, ResourceExhausted("full", retry_after_s=3.0))
    assert clock.pauses_s == [3.0]


async def test_permanent_error_is_not_retried() -> None:
    """An invalid field stays invalid."""
    clock = Clock()
    with pytest.raises(InvalidArgument):
        await attempt_against(clock, InvalidArgument("wrong"))
    assert clock.pauses_s == []


async def test_only_the_named_errors_are_retried() -> None:
    """A call that is not idempotent omits errors with an unknown outcome."""
    clock = Clock()
    with pytest.raises(DeadlineExceeded):
        await attempt_against(clock, DeadlineExceeded("late"), retry_on=(Unavailable,))
    assert clock.pauses_s == []


async def test_retry_ends_at_its_time_limit() -> None:
    """No attempt begins after the limit; the last error is raised."""
    clock = Clock()
    with pytest.raises(Unavailable):
        await attempt_against(clock, *[Unavailable("away")] * 100, retry_for_s=5.0)
    assert clock.now_s <= 5.0
