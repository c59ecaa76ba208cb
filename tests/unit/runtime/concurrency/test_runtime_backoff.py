"""Pauses between retries."""

from __future__ import annotations

from forge.runtime.concurrency.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    """Each pause is twice the last one, at most `max_s`; a reset starts again at `first_s`."""
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next_s() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next_s() == 0.5
