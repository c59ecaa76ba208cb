"""Which version the stand-in plays, and which faults it has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class Misuse(AssertionError):
    """A use that the real library answers with wrong tokens, a leak or a hang."""


@dataclass(slots=True, kw_only=True)
class Behaviour:
    """Set by a test before it starts an engine, or while it runs."""

    is_old: bool = False
    """Plays 1.2.1: no pause, no drain argument, no hooks, raw log-probs alone."""
    failing_reload: int | None = None
    """Rank whose next reload of weights fails."""
    raising: dict[str, int] = field(default_factory=dict)
    """Rank whose next call of this method ends with the collective call, by method."""
    transfer_steps: int = 3
    """Steps that the keys and values of a hand-off take."""
    lost_events: int = 0
    """Cache events to lose from now on."""
    reassigns_ids: bool = False
    """Prefill returns another id than the caller's, as after a retry."""
    capacity_blocks: int = 512
    """Blocks that can be reused later."""
    logprob_error: float = 0.0
    """Added to each log-prob."""
    misuses: list[str] = field(default_factory=list)
    leaks: int = 0
    """Transfers that were aborted."""


current = Behaviour()


@contextmanager
def behaving(behaviour: Behaviour) -> Iterator[Behaviour]:
    """Play `behaviour` until the end; raises what misuses it has met."""
    global current
    before, current = current, behaviour
    try:
        yield behaviour
    finally:
        current = before
    assert not behaviour.misuses, behaviour.misuses
    assert not behaviour.leaks, f"{behaviour.leaks} transfers were aborted"


def behaviour() -> Behaviour:
    """Return the behaviour that is played now."""
    return current


def misuse(text: str) -> Misuse:
    """Note a misuse, and return it to be raised."""
    current.misuses.append(text)
    return Misuse(text)
