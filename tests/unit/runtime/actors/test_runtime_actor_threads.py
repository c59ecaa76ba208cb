"""Actors on threads: batches, idle work and the way back to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from forge.core.errors import ActorStopped, NotFound, ResourceExhausted
from forge.runtime.actors.actor import ThreadActor
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.actors.supervision import Restart
from tests.support.runtime.waiting import until


class Batcher(ThreadActor):
    """Shows the batches it gets; the first message holds it until the gate opens."""

    batch_size = 4

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.batches: list[list[Any]] = []

    def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
        self.entered.set()
        if not self.batches:
            self.gate.wait(30)
        self.batches.append(list(messages))
        return [NotFound(message) if message == "bad" else message for message in messages]


async def test_waiting_messages_form_batches_of_at_most_batch_size(system: ActorSystem) -> None:
    """Messages of one batch time form the next, in order, each once."""
    batcher = Batcher()
    ref = await system.spawn(lambda: batcher, name="batcher")
    asks = [asyncio.create_task(ref.ask(number, timeout_s=30)) for number in range(11)]
    await asyncio.sleep(0)
    batcher.gate.set()
    assert await asyncio.gather(*asks) == list(range(11))
    assert [number for batch in batcher.batches for number in batch] == list(range(11))
    assert max(map(len, batcher.batches)) == 4


async def test_messages_of_one_turn_of_the_loop_form_a_batch(system: ActorSystem) -> None:
    """The thread wakes after the turn, so that requests that come together are handled together."""
    batcher = Batcher()
    batcher.gate.set()
    ref = await system.spawn(lambda: batcher, name="batcher")
    ref.tell(0)
    assert not batcher.entered.wait(0.05)
    ref.tell(1)
    assert await ref.ask(2, timeout_s=30) == 2
    assert batcher.batches == [[0, 1, 2]]


async def test_tell_wakes_no_loop(system: ActorSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch without an ask has no answer to bring back."""
    batcher = Batcher()
    batcher.gate.set()
    ref = await system.spawn(lambda: batcher, name="batcher")
    posted: list[Any] = []
    loop = asyncio.get_running_loop()
    post = loop.call_soon_threadsafe

    def observed(callback: Any, *args: Any) -> Any:
        posted.append(callback)
        return post(callback, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", observed)
    ref.tell(0)
    await until(lambda: batcher.batches == [[0]])
    assert await ref.ask(1, timeout_s=30) == 1
    assert len(posted) == 1


async def test_exception_as_outcome_fails_one_ask(system: ActorSystem) -> None:
    """One bad record of a group commit does not spoil the others."""
    batcher = Batcher()
    batcher.gate.set()
    ref = await system.spawn(lambda: batcher, name="batcher")
    outcomes = await asyncio.gather(
        *(ref.ask(message, timeout_s=30) for message in ("a", "bad", "b")), return_exceptions=True
    )
    assert [outcomes[0], outcomes[2]] == ["a", "b"]
    assert isinstance(outcomes[1], NotFound)


async def test_refused_batch_refuses_each_ask_and_the_actor_continues(system: ActorSystem) -> None:
    """A ForgeError of the whole batch, for example a full disk, answers all of it without a
    restart."""

    class Disk(ThreadActor):
        batch_size = 8
        full = True

        def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
            if self.full:
                self.full = False
                raise ResourceExhausted("disk full")
            return messages

    ref = await system.spawn(Disk, name="disk")
    with pytest.raises(ResourceExhausted, match="disk full"):
        await ref.ask(1, timeout_s=30)
    assert await ref.ask(2, timeout_s=30) == 2


async def test_wrong_number_of_outcomes_fails_every_ask(system: ActorSystem) -> None:
    """No caller gets the answer of another."""

    class Short(ThreadActor):
        def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
            return []

    ref = await system.spawn(Short, name="short", restart=Restart(backoff_s=0))
    with pytest.raises(RuntimeError, match="0 outcomes for 1 messages"):
        await ref.ask(1, timeout_s=30)


async def test_first_message_of_a_batch_waits_for_more(system: ActorSystem) -> None:
    """With batch_wait_s, messages that arrive one after another share a batch."""

    class Patient(ThreadActor):
        batch_size = 2
        batch_wait_s = 30.0

        def weigh(self, message: Any) -> int:
            taken.append(message)
            return 1

        def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
            return [list(messages)] * len(messages)

    taken: list[Any] = []
    ref = await system.spawn(Patient, name="patient")
    first = asyncio.create_task(ref.ask(1, timeout_s=60))
    await until(lambda: taken == [1])
    second = asyncio.create_task(ref.ask(2, timeout_s=60))
    assert list(await asyncio.gather(first, second)) == [[1, 2], [1, 2]]


async def test_message_with_the_weight_of_a_batch_is_handled_at_once(system: ActorSystem) -> None:
    """It does not wait for others."""

    class Weighing(ThreadActor):
        batch_size = 3
        batch_wait_s = 3600.0

        def weigh(self, message: Any) -> int:
            taken.append(message)
            return int(message)

        def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
            return [list(messages)] * len(messages)

    taken: list[int] = []
    ref = await system.spawn(Weighing, name="weighing")
    assert await ref.ask(3, timeout_s=60) == [3]
    first = asyncio.create_task(ref.ask(1, timeout_s=60))
    await until(lambda: taken == [3, 1])
    assert await ref.ask(2, timeout_s=60) == await first == [1, 2]


async def test_work_runs_between_messages(system: ActorSystem) -> None:
    """While work returns True it is called again, but a message comes first; then it sleeps."""
    done = asyncio.Event()

    class Engine(ThreadActor):
        steps = 0
        left = 3

        def receive(self, message: Any) -> Any:
            self.left += message
            return self.steps

        def work(self) -> bool:
            if not self.left:
                self.loop.call_soon_threadsafe(done.set)
                return False
            self.left -= 1
            self.steps += 1
            return True

    ref = await system.spawn(Engine, name="engine")
    await asyncio.wait_for(done.wait(), 30)
    done.clear()
    assert await ref.ask(2, timeout_s=30) == 3
    await asyncio.wait_for(done.wait(), 30)
    assert await ref.ask(0, timeout_s=30) == 5


async def test_crash_in_work_restarts_the_actor(system: ActorSystem) -> None:
    """Work has no caller; its failure is a crash like any other."""
    incarnations: list[int] = []

    class Engine(ThreadActor):
        def started(self) -> None:
            incarnations.append(threading.get_ident())

        def receive(self, message: Any) -> Any:
            return len(incarnations)

        def work(self) -> bool:
            if len(incarnations) == 1:
                raise RuntimeError("out of memory")
            return False

    ref = await system.spawn(Engine, name="engine", restart=Restart(backoff_s=0))
    while await ref.ask("which?", timeout_s=30) != 2:
        pass
    assert len(incarnations) == 2


async def test_every_method_runs_on_the_actors_own_thread(system: ActorSystem) -> None:
    """LMDB transactions and CUDA contexts belong to a thread."""
    threads: set[int] = set()

    class Tracer(ThreadActor):
        def started(self) -> None:
            threads.add(threading.get_ident())

        def receive(self, message: Any) -> Any:
            threads.add(threading.get_ident())

        def work(self) -> bool:
            threads.add(threading.get_ident())
            return False

        def stopped(self) -> None:
            threads.add(threading.get_ident())

    ref = await system.spawn(Tracer, name="tracer")
    await ref.ask(1, timeout_s=30)
    await ref.stop()
    assert len(threads) == 1
    assert threading.get_ident() not in threads


async def test_stop_answers_messages_behind_a_busy_thread(system: ActorSystem) -> None:
    """A thread that cannot be interrupted finishes its batch; the other messages are answered at
    once."""
    batcher = Batcher()
    ref = await system.spawn(lambda: batcher, name="batcher")
    in_hand = asyncio.create_task(ref.ask("in hand", timeout_s=30))
    await asyncio.to_thread(batcher.entered.wait, 30)
    waiting = asyncio.create_task(ref.ask("waiting", timeout_s=30))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(ref.stop())
    with pytest.raises(ActorStopped):
        await waiting
    batcher.gate.set()
    await stopping
    assert await in_hand == "in hand"
    assert batcher.batches == [["in hand"]]
