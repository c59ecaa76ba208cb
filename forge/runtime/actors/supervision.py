"""Supervision: runs actors, restarts them after crashes, escalates when they crash too often.

A cell has the mailbox of an actor and the task that runs it through all its restarts. Owns
back-off, escalation and the answer to every ask. Not here: the actor (`actors.actor`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forge.core.errors import ActorStopped, ForgeError
from forge.runtime.actors.actor import Actor, ThreadActor
from forge.runtime.actors.mailbox import Envelope, KindMetrics, Mailbox, answer_all
from forge.runtime.concurrency.futures import settle
from forge.runtime.telemetry import log


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Limit on crashes; beyond it the supervisor escalates."""

    max_restarts: int = 5
    within_s: float = 60.0
    backoff_s: float = 0.1
    """Wait before the first restart; doubles with each crash in `within_s`."""
    max_backoff_s: float = 5.0


DEFAULT_RESTART = Restart()


class RestartBudget:
    """Counts crashes against a `Restart` policy. Pure."""

    def __init__(self, policy: Restart) -> None:
        self._policy = policy
        # A list, not a deque, which takes 600 bytes empty: most actors never crash.
        self._crashes: list[float] = []

    def backoff_s(self, now_s: float) -> float | None:
        """Record a crash; return the pause before the restart, None for no restart."""
        self._crashes.append(now_s)
        while self._crashes[0] <= now_s - self._policy.within_s:
            self._crashes.pop(0)
        if len(self._crashes) > self._policy.max_restarts:
            return None
        doubled = self._policy.backoff_s * 2.0 ** (len(self._crashes) - 1)
        return min(doubled, self._policy.max_backoff_s)


class Cell(ABC):
    """The mailbox and the supervising task of one actor; both outlive its crashes."""

    def __init__(
        self,
        name: str,
        first: Any,
        factory: Callable[[], Any],
        restart: Restart,
        escalate: Callable[[str, BaseException], None],
    ) -> None:
        self.name = name
        self.loop = asyncio.get_running_loop()
        self.loop_thread = threading.get_ident()
        self.metrics = KindMetrics.of(type(first).__name__)
        self.mailbox = Mailbox(name, self.metrics, size=first.mailbox_size, wake=self._wake)
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self._factory = factory
        self._restart = RestartBudget(restart)
        self._escalate = escalate
        self._pause: asyncio.Future[None] | None = None
        self.task = self.loop.create_task(self._run(first), name=f"actor-{name}")

    async def _run(self, actor: Any) -> None:
        try:
            crash = await self._live(actor)
            while crash is not None and await self._back_off(crash):
                crash = await self._live(self._factory())
        except Exception as error:
            # The factory failed.
            self._close()
            self._escalate(self.name, error)
        finally:
            self._close()
            settle(self.ready, ActorStopped(f"actor {self.name} was stopped in its start"))

    @abstractmethod
    async def _live(self, actor: Any) -> BaseException | None:
        """Run the actor once, from `started` to `stopped`; return the cause of a crash."""

    @abstractmethod
    def _wake(self) -> None:
        """Called from any thread after a message, and when the mailbox closes."""

    async def _back_off(self, crash: BaseException) -> bool:
        """Wait before a restart; return False for no restart."""
        self.metrics.failures.inc()
        if not self.ready.done():
            self.ready.set_exception(crash)
            return False
        delay_s = self._restart.backoff_s(time.monotonic())
        if delay_s is None:
            self._close()
            self._escalate(self.name, crash)
            return False
        log.warning("actor_restarts", actor=self.name, in_s=delay_s, exc_info=crash)
        self._pause = self.loop.create_future()
        await asyncio.wait({self._pause}, timeout=delay_s)
        return not self.mailbox.closed

    async def stop(self, timeout_s: float) -> None:
        """Close the mailbox and wait for the actor's end; cancel it after `timeout_s`."""
        self._close()
        settle(self._pause, None)
        # An actor may stop itself; it cannot wait for its own end.
        if asyncio.current_task() is self.task:
            return
        done, _ = await asyncio.wait({self.task}, timeout=timeout_s)
        if not done:
            log.warning("actor_stop_timed_out", actor=self.name, timeout_s=timeout_s)
            self.task.cancel()
            await asyncio.wait({self.task}, timeout=1.0)

    def _close(self) -> None:
        for envelope in self.mailbox.close():
            envelope.answer(ActorStopped(f"actor {self.name} has stopped"))

    def _set_ready(self) -> None:
        settle(self.ready, None)


class LoopCell(Cell):
    """Runs an `Actor` on the event loop."""

    def __init__(self, *args: Any) -> None:
        # No Event: a hundred thousand sessions are actors; a future exists only in a sleep.
        self._sleeper: asyncio.Future[None] | None = None
        super().__init__(*args)

    def _wake(self) -> None:
        if threading.get_ident() == self.loop_thread:
            self._rouse()
        else:
            self.loop.call_soon_threadsafe(self._rouse)

    def _rouse(self) -> None:
        settle(self._sleeper, None)

    async def _live(self, actor: Actor) -> BaseException | None:
        crash: BaseException | None = None
        try:
            await actor.started()
            self._set_ready()
            try:
                while crash is None and (envelope := await self._next()) is not None:
                    crash = await self._handle(actor, envelope)
                    # Not kept while the actor waits: a hundred thousand sessions do.
                    del envelope
            finally:
                await actor.stopped()
        except Exception as error:
            crash = crash or error
        return crash

    async def _next(self) -> Envelope | None:
        while not self.mailbox.closed:
            for envelope in self.mailbox.take_envelopes():
                return envelope
            self._sleeper = self.loop.create_future()
            await self._sleeper
        return None

    async def _handle(self, actor: Actor, envelope: Envelope) -> BaseException | None:
        crash: BaseException | None = None
        try:
            outcome = await actor.receive(envelope.message)
        except ForgeError as error:
            outcome = error
        except asyncio.CancelledError as error:
            if self.task.cancelling():
                envelope.answer(ActorStopped(f"actor {self.name} was stopped in mid-message"))
                raise
            outcome = crash = error
        except Exception as error:
            outcome = crash = error
        envelope.answer(outcome)
        self.metrics.handled.inc()
        # An error's traceback has this frame: no cycle, as in `ActorRef.ask`.
        del envelope, outcome
        return crash


class ThreadCell(Cell):
    """Runs a `ThreadActor`, each incarnation on a fresh thread."""

    def __init__(self, *args: Any) -> None:
        self._mail = threading.Event()
        self._will_rouse = False
        super().__init__(*args)

    def _wake(self) -> None:
        if threading.get_ident() != self.loop_thread:
            self._mail.set()
        elif not self._will_rouse:
            # At the loop's next turn: the messages of one turn form one batch, without a wait.
            self._will_rouse = True
            self.loop.call_soon(self._rouse)

    def _rouse(self) -> None:
        self._will_rouse = False
        self._mail.set()

    async def _live(self, actor: ThreadActor) -> BaseException | None:
        actor.loop = self.loop
        ended: asyncio.Future[BaseException | None] = self.loop.create_future()
        threading.Thread(
            target=self._thread, args=(actor, ended), name=self.name, daemon=True
        ).start()
        return await ended

    def _thread(self, actor: ThreadActor, ended: asyncio.Future[BaseException | None]) -> None:
        crash: BaseException | None = None
        try:
            actor.started()
            self._post(self._set_ready)
            try:
                crash = self._serve(actor)
            finally:
                actor.stopped()
        except BaseException as error:
            crash = crash or error
        self._post(lambda: None if ended.done() else ended.set_result(crash))

    def _serve(self, actor: ThreadActor) -> BaseException | None:
        idle = False
        while not self.mailbox.closed:
            batch = self._next_batch(actor, wait=idle)
            if batch:
                crash = self._handle(actor, batch)
                if crash is not None:
                    return crash
                idle = False
            elif not self.mailbox.closed:
                idle = not actor.work()
        return None

    def _next_batch(self, actor: ThreadActor, *, wait: bool) -> list[Envelope]:
        if wait:
            self._mail.wait()
        self._mail.clear()
        batch = new = self.mailbox.take_envelopes(actor.batch_size)
        deadline = time.monotonic() + actor.batch_wait_s
        weight = _weight(actor, new)
        while batch and weight < actor.batch_size and not self.mailbox.closed:
            if not self._mail.wait(max(0.0, deadline - time.monotonic())):
                break
            self._mail.clear()
            new = self.mailbox.take_envelopes(actor.batch_size - len(batch))
            batch = batch + new
            weight += _weight(actor, new)
        return batch

    def _handle(self, actor: ThreadActor, batch: list[Envelope]) -> BaseException | None:
        crash: BaseException | None = None
        try:
            outcomes = actor.receive_batch([envelope.message for envelope in batch])
            if len(outcomes) != len(batch):
                raise RuntimeError(f"{len(outcomes)} outcomes for {len(batch)} messages")
        except BaseException as error:
            crash = None if isinstance(error, ForgeError) else error
            outcomes = [error] * len(batch)
        if any(envelope.reply is not None for envelope in batch):
            # One wake-up of the loop answers the whole batch.
            self._post(answer_all, batch, outcomes)
        self.metrics.handled.inc(len(batch))
        del batch, outcomes
        return crash

    def _post(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            # The loop is closed.
            log.debug("actor_loop_closed", actor=self.name)


def _weight(actor: ThreadActor, envelopes: list[Envelope]) -> int:
    return sum(actor.weigh(envelope.message) for envelope in envelopes)
