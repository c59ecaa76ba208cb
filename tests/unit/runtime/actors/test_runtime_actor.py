"""The life of an actor: messages, crashes and restarts."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest

from forge.core.errors import (
    ActorStopped,
    DeadlineExceeded,
    FailedPrecondition,
    MailboxFull,
    NotFound,
)
from forge.runtime.actors.actor import Actor, ThreadActor
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.actors.supervision import Restart
from tests.support.runtime.actors import Crash, Double, Doubler, Gate, Refuse, ThreadDoubler
from tests.support.runtime.waiting import until

AT_ONCE = Restart(max_restarts=3, backoff_s=0.0)


both = pytest.mark.parametrize("kind", [Doubler, ThreadDoubler])


@both
async def test_ask_returns_the_value_of_receive(
    system: ActorSystem, kind: Callable[[], Actor | ThreadActor]
) -> None:
    """The return value of receive is the answer."""
    ref = await system.spawn(kind, name="a")
    assert await ref.ask(Double(21), timeout_s=30) == 42


class Large:
    """A message whose end is seen."""


@pytest.mark.parametrize("refuses", [False, True])
@both
async def test_a_message_ends_with_its_answer(
    system: ActorSystem,
    kind: Callable[[], Actor | ThreadActor],
    refuses: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a garbage collection, while its actor waits for the next one, also if refused."""

    def receive(self: Any, message: Any) -> None:
        if refuses:
            raise NotFound("refused")

    async def receive_later(self: Any, message: Any) -> None:
        receive(self, message)

    on_thread = kind is ThreadDoubler
    monkeypatch.setattr(kind, "receive", receive if on_thread else receive_later)
    ref = await system.spawn(kind, name="a")
    gc.disable()
    try:
        message = Large()
        ended = weakref.ref(message)
        with suppress(NotFound):
            await ref.ask(message, timeout_s=30)
        del message
        await until(lambda: ended() is None)
    finally:
        gc.enable()


@both
async def test_refusal_is_raised_to_the_caller_and_the_actor_continues(
    system: ActorSystem, kind: Callable[[], Actor | ThreadActor]
) -> None:
    """A ForgeError is an answer, not a crash: the same incarnation handles the next messages."""
    ref = await system.spawn(kind, name="a")
    with pytest.raises(NotFound, match="no such thing"):
        await ref.ask(Refuse(), timeout_s=30)
    assert await ref.ask("handled", timeout_s=30) == 2


@both
async def test_crash_is_raised_to_the_caller_and_the_actor_restarts(
    system: ActorSystem, kind: Callable[[], Actor | ThreadActor]
) -> None:
    """Any other exception ends the incarnation; waiting messages are handled by the next."""
    ref = await system.spawn(kind, name="a", restart=AT_ONCE)
    crash = asyncio.create_task(ref.ask(Crash(), timeout_s=30))
    after = asyncio.create_task(ref.ask("handled", timeout_s=30))
    with pytest.raises(KeyError, match="a bug"):
        await crash
    assert await after == 1
    assert ref.alive


@both
async def test_too_many_crashes_stop_the_actor_and_escalate(
    kind: Callable[[], Actor | ThreadActor],
) -> None:
    """After max_restarts the actor is stopped; its name and last error are escalated."""
    escalated: list[tuple[str, BaseException]] = []
    system = ActorSystem("test", on_escalate=lambda name, error: escalated.append((name, error)))
    ref = await system.spawn(kind, name="a", restart=Restart(max_restarts=2, backoff_s=0))
    for _ in range(3):
        with pytest.raises(KeyError):
            await ref.ask(Crash(), timeout_s=30)
    with pytest.raises(ActorStopped):
        await ref.ask(Double(1), timeout_s=30)
    ((name, error),) = escalated
    assert (name, type(error)) == ("a", KeyError)
    assert not ref.alive


@both
async def test_unknown_message_is_a_bug_that_names_actor_and_message(
    system: ActorSystem, kind: Callable[[], Actor | ThreadActor]
) -> None:
    """It crashes the actor."""
    ref = await system.spawn(kind, name="a", restart=AT_ONCE)
    with pytest.raises(NotImplementedError, match=r"Doubler handles no float"):
        await ref.ask(1.5, timeout_s=30)


async def test_full_mailbox_refuses_at_once(system: ActorSystem) -> None:
    """Overload is an error with a retry hint, not a longer queue."""
    gate = Gate()
    ref = await system.spawn(lambda: gate, name="gate")
    asks = [asyncio.create_task(ref.ask(number, timeout_s=30)) for number in range(1)]
    await gate.entered.wait()
    asks += [asyncio.create_task(ref.ask(number, timeout_s=30)) for number in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(MailboxFull, match="gate has 2 messages waiting") as caught:
        await ref.ask(3, timeout_s=30)
    assert caught.value.retry_after_s is not None
    with pytest.raises(MailboxFull):
        ref.tell(3)
    gate.open.set()
    assert await asyncio.gather(*asks) == [0, 1, 2]


async def test_late_answer_is_a_deadline_error_and_the_actor_continues(
    system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller learns that the outcome is unknown; the actor finishes its message."""
    gate = Gate()
    ref = await system.spawn(lambda: gate, name="gate")
    loop = asyncio.get_running_loop()
    timers = Mock(wraps=loop.call_later)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_later", timers)
        slow = asyncio.create_task(ref.ask("slow", timeout_s=3600))
        await gate.entered.wait()
    # Its deadline passes now that the actor has the message, and no sooner.
    ((_, expire, *asked),) = [one.args for one in timers.call_args_list if one.args[0] == 3600]
    expire(*asked)
    with pytest.raises(DeadlineExceeded, match=r"gate gave no answer to str within 3600 s"):
        await slow
    gate.open.set()
    assert await ref.ask("next", timeout_s=30) == "next"
    assert gate.seen == ["slow", "next"]


async def test_message_of_a_caller_that_gave_up_is_not_handled(system: ActorSystem) -> None:
    """Under overload no work goes into unread answers."""
    gate = Gate()
    ref = await system.spawn(lambda: gate, name="gate")
    first = asyncio.create_task(ref.ask("first", timeout_s=30))
    await gate.entered.wait()
    with pytest.raises(DeadlineExceeded):
        await ref.ask("abandoned", timeout_s=0.01)
    gate.open.set()
    assert await first == "first"
    assert await ref.ask("last", timeout_s=30) == "last"
    assert gate.seen == ["first", "last"]


async def test_cancelled_inner_task_is_a_crash(system: ActorSystem) -> None:
    """A CancelledError from within restarts the actor like any other bug."""

    class Inner(Actor):
        async def receive(self, message: Any) -> Any:
            if message == "cancel":
                raise asyncio.CancelledError
            return "alive"

    ref = await system.spawn(Inner, name="a", restart=AT_ONCE)
    with pytest.raises(asyncio.CancelledError):
        await ref.ask("cancel", timeout_s=30)
    assert await ref.ask("still there?", timeout_s=30) == "alive"


@pytest.mark.parametrize("base", [Actor, ThreadActor])
async def test_failed_start_is_raised_to_the_spawner(system: ActorSystem, base: type[Any]) -> None:
    """The first error of `started` is the spawner's to handle; no restart hides it."""
    if base is Actor:

        class Loop(Actor):
            async def started(self) -> None:
                raise OSError("disk full")

        factory: Callable[[], Actor | ThreadActor] = Loop
    else:

        class Thread(ThreadActor):
            def started(self) -> None:
                raise OSError("disk full")

        factory = Thread
    with pytest.raises(OSError, match="disk full"):
        await system.spawn(factory, name="a")
    await system.spawn(Doubler, name="a")


async def test_failing_factory_on_restart_is_escalated() -> None:
    """If no new actor can be made, the supervisor is notified, and every ask is answered."""
    escalated = asyncio.Event()
    system = ActorSystem("test", on_escalate=lambda *_: escalated.set())
    made: list[Doubler] = []

    def once() -> Doubler:
        if made:
            raise OSError("no more")
        made.append(Doubler())
        return made[0]

    ref = await system.spawn(once, name="a", restart=AT_ONCE)
    with pytest.raises(KeyError):
        await ref.ask(Crash(), timeout_s=30)
    await escalated.wait()
    with pytest.raises(ActorStopped):
        await ref.ask(Double(1), timeout_s=30)


async def test_two_actors_cannot_have_one_name(system: ActorSystem) -> None:
    """A name is free again once its actor has stopped."""
    first = await system.spawn(Doubler, name="a")
    with pytest.raises(FailedPrecondition, match="an actor a already"):
        await system.spawn(Doubler, name="a")
    await first.stop()
    await system.spawn(Doubler, name="a")


@pytest.mark.parametrize("threaded", [False, True])
async def test_started_and_stopped_frame_every_incarnation(
    system: ActorSystem, threaded: bool
) -> None:
    """Resources opened in started are closed in stopped, after a crash too."""
    events: list[str] = []

    class Loop(Actor):
        async def started(self) -> None:
            events.append("started")

        async def receive(self, message: Any) -> Any:
            raise KeyError(message)

        async def stopped(self) -> None:
            events.append("stopped")

    class Thread(ThreadActor):
        def started(self) -> None:
            events.append("started")

        def receive(self, message: Any) -> Any:
            raise KeyError(message)

        def stopped(self) -> None:
            events.append("stopped")

    factory: Callable[[], Actor | ThreadActor] = Thread if threaded else Loop
    ref = await system.spawn(factory, name="a", restart=AT_ONCE)
    with pytest.raises(KeyError):
        await ref.ask("boom", timeout_s=30)
    with pytest.raises(KeyError):
        await ref.ask("boom", timeout_s=30)
    await ref.stop()
    assert events == ["started", "stopped"] * (len(events) // 2)
    assert len(events) in (4, 6)


async def test_tell_is_safe_from_any_thread(system: ActorSystem) -> None:
    """Messages of other threads are all handled, each thread's in its order."""
    seen: list[tuple[int, int]] = []
    complete = asyncio.Event()

    class Sink(Actor):
        async def receive(self, message: Any) -> None:
            seen.append(message)
            if len(seen) == 400:
                complete.set()

    ref = await system.spawn(Sink, name="sink")

    def tell(thread: int) -> None:
        for number in range(100):
            ref.tell((thread, number))

    threads = [threading.Thread(target=tell, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    await asyncio.wait_for(complete.wait(), 30)
    for index in range(4):
        assert [number for owner, number in seen if owner == index] == list(range(100))
