"""Properties of every actor, under any messages and crashes."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from forge.core.errors import ActorStopped, MailboxFull, NotFound
from forge.runtime.actors.actor import Actor, ThreadActor
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.actors.mailbox import Envelope, KindMetrics, Mailbox
from forge.runtime.actors.supervision import Restart, RestartBudget

MAILBOX_SIZE = 3


class LoopSubject(Actor):
    """Handles (what, number): writes the number down, then does as told."""

    mailbox_size = MAILBOX_SIZE

    def __init__(self, handled: list[int]) -> None:
        self.handled = handled

    async def receive(self, message: Any) -> Any:
        what, number = message
        self.handled.append(number)
        if what == "suspend":
            await asyncio.sleep(0)
        return _outcome(what, number)


class ThreadSubject(ThreadActor):
    """The same on a thread, in batches."""

    mailbox_size = MAILBOX_SIZE
    batch_size = 2

    def __init__(self, handled: list[int]) -> None:
        self.handled = handled

    def receive(self, message: Any) -> Any:
        what, number = message
        self.handled.append(number)
        return _outcome(what, number)


def _outcome(what: str, number: int) -> int:
    if what == "refuse":
        raise NotFound(str(number))
    if what == "crash":
        raise KeyError(number)
    return number


steps = st.lists(
    st.sampled_from(["answer", "suspend", "refuse", "crash", "tell", "breathe", "stop"]),
    max_size=25,
)


@pytest.mark.parametrize("subject", [LoopSubject, ThreadSubject])
@given(steps=steps)
@settings(max_examples=60, deadline=None)
async def test_no_message_is_lost_or_answered_twice(subject: Any, steps: list[str]) -> None:
    """Every ask has one outcome; a handled message was handled once, an unhandled one has an
    error."""
    handled: list[int] = []
    system = ActorSystem("property")
    ref = await system.spawn(
        lambda: subject(handled), name="a", restart=Restart(max_restarts=3, backoff_s=0)
    )
    asks: dict[int, asyncio.Task[Any]] = {}
    told: set[int] = set()
    for number, what in enumerate(steps):
        if what == "breathe":
            await asyncio.sleep(0.001)
        elif what == "stop":
            await ref.stop()
        elif what == "tell":
            try:
                ref.tell(("answer", number))
                told.add(number)
            except (MailboxFull, ActorStopped):
                pass
        else:
            asks[number] = asyncio.create_task(ref.ask((what, number), timeout_s=60))
            await asyncio.sleep(0)
        assert len(ref._mailbox) <= MAILBOX_SIZE
    done, pending = await asyncio.wait(asks.values(), timeout=60) if asks else (set(), set())
    await system.stop()
    assert not pending
    assert len(done) == len(asks)
    times = Counter(handled)
    assert not [number for number, count in times.items() if count > 1]
    for number, ask in asks.items():
        error = ask.exception()
        if error is None:
            assert ask.result() == number
        # In a batch, a crash takes the others along: their outcome is unknown, never a silence.
        assert isinstance(error, MailboxFull | ActorStopped | NotFound | KeyError | None)
        if isinstance(error, MailboxFull | ActorStopped):
            assert times[number] == 0
        elif not isinstance(error, KeyError):
            assert times[number] == 1
    assert set(handled) <= told | set(asks)


@given(
    crashes=st.lists(st.floats(0, 10), max_size=40),
    max_restarts=st.integers(0, 6),
    within_s=st.floats(0.5, 20),
)
def test_restart_budget_never_allows_more_than_its_policy(
    crashes: list[float], max_restarts: int, within_s: float
) -> None:
    """In any window of within_s there are at most max_restarts restarts, each within bounds."""
    policy = Restart(max_restarts=max_restarts, within_s=within_s, backoff_s=0.1, max_backoff_s=1.0)
    budget = RestartBudget(policy)
    restarts: list[Any] = []
    now_s = 0.0
    for gap_s in crashes:
        now_s += gap_s
        delay_s = budget.backoff_s(now_s)
        if delay_s is None:
            assert sum(at > now_s - within_s for at in restarts) >= max_restarts
            break
        assert 0.1 <= delay_s <= 1.0
        restarts.append(now_s)
        assert sum(at > now_s - within_s for at in restarts) <= max_restarts


def test_back_off_doubles_up_to_its_bound_and_resets() -> None:
    """Consecutive crashes wait longer; after a quiet window the pause is short again."""
    budget = RestartBudget(
        Restart(max_restarts=9, within_s=10, backoff_s=1, max_backoff_s=5),
    )
    assert [budget.backoff_s(now_s) for now_s in (0, 0, 0, 0)] == [1, 2, 4, 5]
    assert budget.backoff_s(100) == 1


@given(operations=st.lists(st.one_of(st.just("put"), st.integers(1, 5)), max_size=60))
def test_mailbox_is_first_in_first_out_and_bounded(operations: list[Any]) -> None:
    """For any order of puts and takes."""
    mailbox = Mailbox("a", KindMetrics.of("Probe"), size=4, wake=lambda: None)
    model: list[int] = []
    for number, operation in enumerate(operations):
        if operation == "put":
            if len(model) < 4:
                mailbox.put(Envelope(number, None))
                model.append(number)
            else:
                with pytest.raises(MailboxFull):
                    mailbox.put(Envelope(number, None))
        else:
            taken = [envelope.message for envelope in mailbox.take_envelopes(operation)]
            assert taken == model[:operation]
            del model[:operation]
        assert len(mailbox) == len(model)
    assert [envelope.message for envelope in mailbox.close()] == model
    with pytest.raises(ActorStopped):
        mailbox.put(Envelope(0, None))


async def test_metrics_are_kept_by_kind_of_actor() -> None:
    """Depth, handled and failures are labelled with the class, never with a name."""

    class Metered(Actor):
        async def receive(self, message: Any) -> Any:
            if message == "crash":
                raise KeyError(message)

    def value(name: str) -> float | None:
        found: float | None = REGISTRY.get_sample_value(name, {"actor": "Metered"})
        return found

    system = ActorSystem("metrics")
    refs = [
        await system.spawn(Metered, name=f"session-{index}", restart=Restart(backoff_s=0))
        for index in range(2)
    ]
    for ref in refs:
        await ref.ask("fine", timeout_s=30)
    with pytest.raises(KeyError):
        await refs[0].ask("crash", timeout_s=30)
    await refs[0].ask("fine", timeout_s=30)
    assert value("forge_actor_messages_total") == 4
    assert value("forge_actor_failures_total") == 1
    assert value("forge_actor_mailbox_depth") == 0
    refs[1].tell("one")
    refs[1].tell("two")
    assert value("forge_actor_mailbox_depth") == 2
    await system.stop()
