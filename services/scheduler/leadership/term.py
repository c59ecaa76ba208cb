"""One leader's term: from winning the election to losing or giving up the office.

Owns the actors of the term and the coming and going of pool shards during it. Everything in
memory dies with the term; the next one is built from the pool alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from forge.core.errors import ForgeError
from forge.core.queue.generation_queue import GenerationQueue
from forge.runtime.actor_system import ActorRef, ActorSystem
from forge.runtime.coordination import Coordinator, Leadership
from forge.runtime.first_done import first_done
from forge.runtime.supervision import Restart
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from services.scheduler import metrics
from services.scheduler.actors.commits import Ledger
from services.scheduler.actors.expired_leases import Inspector
from services.scheduler.actors.outcome_writer import Archivist
from services.scheduler.actors.queue import QueueActor
from services.scheduler.actors.submissions import Registrar
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership.recovery import enlist, wait_for_shards
from services.scheduler.leadership.standby import ShardCopies
from services.scheduler.listening_clock import ListeningClock
from services.scheduler.pool_shards import PoolShards
from services.scheduler.state.messages import (
    Connect,
    GetStatus,
    NoteHead,
    ReserveIndices,
    RestoreGroups,
    SetAway,
)
from services.scheduler.state.term_state import TermState
from services.scheduler.term_record import OwnRecord, TermRecord

RETRY_S = 1.0
ASK_S = 30.0
NOTE_HEAD_S = 10.0
"""How old the head in the term record may be."""


@dataclass(slots=True, kw_only=True)
class Office:
    """What calls need of the term in force."""

    leadership: Leadership
    queue: ActorRef
    registrar: ActorRef
    ledger: ActorRef
    shards: PoolShards


class Term:
    """One term; `begin` it, serve while it holds, `end` it."""

    def __init__(
        self,
        config: SchedulerConfig,
        coordinator: Coordinator,
        leadership: Leadership,
        shards: PoolShards,
        copies: ShardCopies,
        *,
        awaiting: Callable[[frozenset[str]], Awaitable[None]],
    ) -> None:
        """`copies`: what this instance knows of the shards from the time it stood by. `awaiting` is
        told which shards are waited for before the term begins."""
        self._config = config
        self._coordinator = coordinator
        self._leadership = leadership
        self._shards = shards
        self._copies = copies
        self._awaiting = awaiting
        self._failed = asyncio.Event()
        # A crash leaves state nobody can vouch for: end the term, and rebuild it from the pool.
        self._actors = ActorSystem("scheduler-term", on_escalate=lambda *_: self._failed.set())
        self._keeper: asyncio.Task[None] | None = None
        self._office: Office | None = None
        self._number = -1
        self._clock = ListeningClock(time.monotonic)
        self._enlisted: frozenset[str] = frozenset()
        """Pool shards that have been fenced and scanned."""
        self._unread: frozenset[str] = frozenset()
        """Those that may hold groups and were away when the term began."""
        self._noting: asyncio.Task[None] | None = None
        self._restored = 0
        """Messages with the groups of shards that joined."""

    async def begin(self) -> Office:
        """Rebuild the queue and start the actors. Raises ForgeError when something gave way."""
        started_s = time.monotonic()
        last = await TermRecord.read(self._coordinator)
        lost = frozenset(self._config.lost_shards)
        enlisted = await wait_for_shards(
            self._shards,
            last.shards,
            lost=lost,
            # Without a bound on the head, groups of a shard that is away could be passed.
            patience_s=math.inf if last.head is None else self._config.shard_wait_s,
            awaiting=self._awaiting,
        )
        self._unread = last.shards - lost - enlisted
        record = replace(
            last, term=last.term + 1, shards=(last.shards - lost) | enlisted, claims=True
        )
        await record.write(self._coordinator)
        self._number, self._enlisted = record.term, enlisted
        state = await self._rebuild(enlisted, last)
        self._office = office = await self._start_actors(state)
        self._keeper = asyncio.create_task(self._keep_shards(office), name="shard-keeper")
        self._keeper.add_done_callback(lambda _: self._failed.set())
        self._noting = asyncio.create_task(self._note_head(office), name="head-note")
        books = state.queue.books.status()
        log.info(
            "term_began",
            term=self._number,
            fence=self._leadership.fence,
            head=state.queue.books.window.head,
            accepted=books.accepted,
            pending=books.pending,
            awaited_shards=sorted(self._unread),
            rebuilt_s=time.monotonic() - started_s,
        )
        return office

    async def ended(self) -> None:
        """Returns when leadership is lost or an actor has failed."""
        await first_done(self._leadership.lost(), self._failed.wait())

    async def end(self) -> None:
        """Stop the actors, answering whoever waits, and leave the office to the next."""
        for task in (self._keeper, self._noting):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        await self._note_that_no_claims_are_out()
        await self._actors.stop()
        metrics.clear()
        await self._leadership.resign()
        gc.unfreeze()
        log.info("term_ended", term=self._number, fence=self._leadership.fence)

    async def _rebuild(self, enlisted: frozenset[str], last: TermRecord) -> TermState:
        queue = GenerationQueue(
            self._config.queue,
            term=self._number,
            void_before=last.void_before,
        )
        queue.books.activity = last.activity
        queue.books.window.unknown_from = last.head if self._unread else None
        state = TermState(
            queue,
            max_pending=self._config.max_queued_groups,
            skip_equal_rewards=self._config.skip_equal_rewards,
            stall_after_s=self._config.stall_after_s,
            most_settled=self._config.held_settled_groups,
        )
        state.set_away(self._unread, unread=self._unread, now_s=self._clock())
        # A million groups live as long as the term. The collector need not walk them each time, and
        # least of all now: it stops the process for longer than the lease may wait.
        gc.disable()
        try:
            found = await enlist(self._shards, enlisted, self._copies)
            now_s = self._clock()
            head = found.head()
            if self._unread and last.head is not None:
                head = min(head, last.head)
            queue.books.begin_at(head)
            if found.whole:
                state.settled.hold_all()
            for part in found.parts():
                state.earlier.restore(part, now_s=now_s)
                # The lease that leadership rests on has to be renewed meanwhile.
                await asyncio.sleep(0)
            state.earlier.leave_out(found.left_out)
            gc.freeze()
        finally:
            gc.enable()
        if last.claims:
            queue.rollouts.hold_until_s = self._clock() + self._config.takeover_hold_s
        return state

    async def _start_actors(self, state: TermState) -> Office:
        no_restart = Restart(max_restarts=0)
        next_index: dict[int, int] = {
            common_pb2.PURPOSE_TRAIN: state.queue.books.window.next_index,
            common_pb2.PURPOSE_EVAL: state.queue.books.next_eval_index,
        }
        spawn = self._actors.spawn
        queue = await spawn(
            lambda: QueueActor(state, clock=self._clock), name="queue", restart=no_restart
        )
        registrar = await spawn(
            lambda: Registrar(
                queue,
                self._shards,
                next_index=next_index,
                placeable=lambda: self._enlisted & self._shards.live(),
            ),
            name="registrar",
            restart=no_restart,
        )
        ledger = await spawn(
            lambda: Ledger(queue, self._shards, self._record()), name="ledger", restart=no_restart
        )
        archivist = await spawn(
            lambda: Archivist(self._shards), name="archivist", restart=no_restart
        )
        inspector = await spawn(
            lambda: Inspector(queue, self._shards), name="inspector", restart=no_restart
        )
        queue.tell(Connect(own=queue, archivist=archivist, inspector=inspector))
        return Office(
            leadership=self._leadership,
            queue=queue,
            registrar=registrar,
            ledger=ledger,
            shards=self._shards,
        )

    async def _keep_shards(self, office: Office) -> None:
        """Follow the pool: what is away is not waited for, what is new gets new groups."""
        told = frozenset[str]()
        while True:
            changed = asyncio.create_task(self._shards.changed())
            try:
                live = self._shards.live()
                away = (self._enlisted - live) | self._unread
                office.queue.tell(SetAway(shards=away, unread=self._unread))
                if away != told:
                    told = away
                    log.warning("pool_shards_away", pool_shards=sorted(away))
                if live <= self._enlisted:
                    await changed
                else:
                    await self._admit(live - self._enlisted, office)
            except ForgeError as error:
                log.warning("pool_shard_not_enlisted", error=str(error))
                await asyncio.sleep(RETRY_S)
            finally:
                changed.cancel()

    async def _admit(self, joined: frozenset[str], office: Office) -> None:
        """Shards that were not there when the term began. Raises ForgeError."""
        # The record first: a shard it does not name would be forgotten by the next term.
        await self._record().add_shards(joined)
        found = await enlist(self._shards, joined, self._copies)
        next_index, next_eval_index = found.next_index(), found.next_eval_index()
        holds_all = bool(found.whole)
        for part in found.parts():
            await self._restore(office, RestoreGroups(groups=part, holds_all=holds_all))
        await self._restore(office, RestoreGroups(left_out=found.left_out, holds_all=holds_all))
        indices: dict[int, int] = {
            common_pb2.PURPOSE_TRAIN: next_index,
            common_pb2.PURPOSE_EVAL: next_eval_index,
        }
        await _until_taken(office.registrar, ReserveIndices(next_index=indices))
        self._enlisted |= joined
        self._unread -= joined

    async def _restore(self, office: Office, part: RestoreGroups) -> None:
        await _until_taken(office.queue, replace(part, number=self._restored))
        self._restored += 1

    async def _note_head(self, office: Office) -> None:
        """Keep the head in the term record: a later leader may have to begin without a shard."""
        while True:
            try:
                await office.ledger.ask(NoteHead(), timeout_s=ASK_S)
            except ForgeError as error:
                log.info("head_not_noted", error=str(error))
            await asyncio.sleep(NOTE_HEAD_S)

    def _record(self) -> OwnRecord:
        return OwnRecord(self._coordinator, self._number)

    async def _note_that_no_claims_are_out(self) -> None:
        """Then the next leader need not wait for runners to renew."""
        if self._office is None or not self._leadership.alive:
            return
        with contextlib.suppress(ForgeError):
            status = await self._office.queue.ask(GetStatus(), timeout_s=RETRY_S)
            if status.running_rollouts == 0:
                await self._record().amend(claims=False)


async def _until_taken(actor: ActorRef, message: Any) -> None:
    """Asks again when no answer came: what was read of a shard is not read again."""
    while True:
        try:
            await actor.ask(message, timeout_s=ASK_S)
        except ForgeError as error:
            log.warning("groups_not_restored", error=str(error))
            await asyncio.sleep(RETRY_S)
        else:
            return
