"""One leader's term: from the won election to the end of its leadership.

Owns the actors of the term, and the pool shards that join or leave during it. All memory of the
term is lost with it; the pool alone rebuilds the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from forge.core.errors import ForgeError, Unavailable
from forge.core.queue.generation_queue import GenerationQueue
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from forge.runtime.actors.supervision import Restart
from forge.runtime.concurrency.tasks import cancel_and_wait, first_done
from forge.runtime.coordination import Coordinator, Leadership
from forge.runtime.coordination.shard_record import LOST, gone_shards, mark_gone, read_record
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from services.scheduler import metrics
from services.scheduler.actors.commits import CommitActor
from services.scheduler.actors.delivery import ask_until_handled
from services.scheduler.actors.expired_leases import ExpiredLeaseActor
from services.scheduler.actors.lost_shards import parse_count_key
from services.scheduler.actors.outcome_writer import OutcomeWriter
from services.scheduler.actors.queue import QueueActor
from services.scheduler.actors.shard_removals import ShardRemovals
from services.scheduler.actors.submissions import SubmissionActor
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership import recovery
from services.scheduler.leadership.erasure_follower import ErasureFollower
from services.scheduler.leadership.standby import ShardCopies
from services.scheduler.listening_clock import ListeningClock
from services.scheduler.shards.group_moves import GroupMoves
from services.scheduler.shards.pool_shards import PoolShards
from services.scheduler.shards.shard_membership import ShardMembership
from services.scheduler.state.messages.groups import ReserveIndices, RestoreGroups
from services.scheduler.state.messages.term import Connect, GetStatus, NoteHead, SetAway
from services.scheduler.state.term_state import TermState
from services.scheduler.term_record import Move, OwnRecord, TermRecord

RETRY_S = 1.0
ASK_S = 30.0
NOTE_HEAD_S = 10.0
"""Largest age of the head in the term record."""


@dataclass(slots=True, kw_only=True)
class LeaderContext:
    """The parts of the current term that calls use."""

    leadership: Leadership
    queue: ActorRef
    submissions: ActorRef
    commits: ActorRef
    removals: ActorRef
    members: ShardMembership
    shards: PoolShards


class Term:
    """One term: `begin`, serve until `ended` returns, then `end`."""

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
        """`copies`: what this instance read of the shards on standby. `awaiting` receives the
        shards that the term waits for before it begins."""
        self._config = config
        self._coordinator = coordinator
        self._leadership = leadership
        self._shards = shards
        self._copies = copies
        self._awaiting = awaiting
        self._failed = asyncio.Event()
        # A crash may leave inconsistent state: end the term, and rebuild it from the pool.
        self._actors = ActorSystem("scheduler-term", on_escalate=lambda *_: self._failed.set())
        self._keeper: asyncio.Task[None] | None = None
        self._leader: LeaderContext | None = None
        self._number = -1
        self._clock = ListeningClock(time.monotonic)
        self._members = ShardMembership()
        self._awaited: frozenset[str] = frozenset()
        """Pool shards that the term waits for before it begins."""
        self._declared = asyncio.Event()
        """Set when an awaited shard was declared lost."""
        self._move: Move | None = None
        """The last move of an earlier term, until it is complete."""
        self._noting: asyncio.Task[None] | None = None
        self._marks: dict[str, str] = {}
        """By registered shard, the mark of the scan that read it."""
        self._following: asyncio.Task[None] | None = None
        self._restored = 0
        """Messages sent with the groups of shards that joined."""

    async def begin(self) -> LeaderContext:
        """Rebuild the queue and start the actors. Raises ForgeError."""
        started_s = time.monotonic()
        last = await TermRecord.read(self._coordinator)
        live, gone = await recovery.wait_for_shards(
            self._shards,
            last.shards,
            forget_gone=self._forget_gone,
            declared=self._declared,
            # Without a stored head, the head could pass groups of an unreachable shard.
            patience_s=math.inf if last.head is None else self._config.shard_wait_s,
            awaiting=self._await,
        )
        floors = await self._shards.floors(live)
        last = await recovery.above_floors(last.without(gone), floors, self._leadership)
        record = replace(last, term=last.term + 1, shards=last.shards | live, claims=True)
        await record.write(self._coordinator)
        self._number, self._move = record.term, record.move
        self._members.unread = record.shards
        registered = await self._complete_move(live)
        self._members.registered, self._members.unread = registered, record.shards - registered
        self._members.set_retiring(record.retiring)
        state = await self._rebuild(registered, last)
        self._leader = leader = await self._start_actors(state)
        self._keeper = asyncio.create_task(self._keep_shards(leader), name="shard-keeper")
        self._keeper.add_done_callback(lambda _: self._failed.set())
        self._noting = asyncio.create_task(self._note_head(leader), name="head-note")
        self._following = self._follow_erasures(leader)
        totals = state.queue.ledger.totals()
        log.info(
            "term_began",
            term=self._number,
            fence=self._leadership.fence,
            head=state.queue.window.head,
            accepted=totals.accepted,
            pending=totals.pending,
            awaited_shards=sorted(self._members.unread),
            retiring_shards=sorted(self._members.retiring),
            rebuilt_s=time.monotonic() - started_s,
        )
        return leader

    async def declare_lost(self, shard: str) -> None:
        """Declare a shard lost that the term waits for. Raises Unavailable."""
        if shard not in self._awaited:
            raise Unavailable(
                f"the term has not begun, and it does not wait for pool shard {shard}"
            )
        stored, _ = await read_record(self._coordinator, shard)
        await mark_gone(
            self._coordinator,
            shard,
            gone=LOST,
            lineage="" if stored is None else stored.lineage,
            now_unix_s=time.time(),
        )
        log.warning("pool_shard_lost", pool_shard=shard)
        self._declared.set()

    async def _await(self, missing: frozenset[str]) -> None:
        self._awaited = missing
        await self._awaiting(missing)

    async def _forget_gone(self, known: frozenset[str]) -> frozenset[str]:
        gone = await gone_shards(self._coordinator, known)
        for record in gone.values():
            self._shards.forget_store(record.lineage)
        return frozenset(gone)

    async def _complete_move(self, live: frozenset[str]) -> frozenset[str]:
        """Completes the last move of an earlier term. Returns the shards of `live` that may be
        scanned: a group in between would be read twice. Raises ForgeError."""
        if self._move is None:
            return live
        ends = {self._move.source, self._move.target}
        if not ends <= self._members.known:
            # One of them was declared lost.
            self._move = None
            return live
        if not ends <= live:
            return live - ends
        await GroupMoves(self._shards, self._record()).complete(self._move)
        self._move = None
        return live

    async def ended(self) -> None:
        """Returns when leadership is lost or an actor has failed."""
        await first_done(self._leadership.lost(), self._failed.wait())

    async def end(self) -> None:
        """Stop the actors, which answers waiting calls, and resign."""
        await cancel_and_wait(self._keeper, self._noting, self._following)
        await self._note_that_no_claims_are_out()
        await self._actors.stop()
        metrics.clear()
        await self._leadership.resign()
        gc.unfreeze()
        log.info("term_ended", term=self._number, fence=self._leadership.fence)

    async def _rebuild(self, registered: frozenset[str], last: TermRecord) -> TermState:
        queue = GenerationQueue(self._config.queue, term=self._number, void_before=last.void_before)
        queue.set_activity(last.activity)
        state = TermState(
            queue,
            max_pending=self._config.max_queued_groups,
            skip_equal_rewards=self._config.skip_equal_rewards,
            stall_after_s=self._config.stall_after_s,
            most_settled=self._config.held_settled_groups,
            draining_runners=last.draining_runners,
        )
        unread, retiring = self._members.unread, self._members.retiring
        state.set_away(unread, unread=unread, now_s=self._clock(), retiring=retiring)
        await self._read_groups(state, registered, last)
        if last.claims:
            queue.rollouts.hold(until_s=self._clock() + self._config.takeover_hold_s)
        return state

    async def _read_groups(
        self, state: TermState, registered: frozenset[str], last: TermRecord
    ) -> None:
        """Read the groups of all registered shards."""
        queue, unread = state.queue, self._members.unread
        # A million groups live as long as the term: the garbage collector must not walk them each
        # time. During the rebuild it would stop the process for longer than the lease lasts.
        gc.disable()
        try:
            registry = await recovery.register_shards(
                self._shards, registered, self._copies, term=self._number
            )
            self._marks |= registry.marks
            now_s = self._clock()
            head = registry.head()
            if unread and last.head is not None:
                head = min(head, last.head)
            queue.begin_at(head, unknown_from=last.head if unread else None)
            if registry.unbounded:
                state.settled.hold_all()
            for part in registry.parts():
                state.earlier.restore(part, now_s=now_s)
                # The lease of the leadership must be renewed meanwhile.
                await asyncio.sleep(0)
            state.earlier.leave_out(registry.left_out)
            lost = {parse_count_key(key): groups for key, groups in last.lost.items()}
            queue.ledger.counts.add_counted(lost)
            gc.freeze()
        finally:
            gc.enable()

    async def _start_actors(self, state: TermState) -> LeaderContext:
        spawn = partial(self._actors.spawn, restart=Restart(max_restarts=0))
        queue = await spawn(lambda: QueueActor(state, clock=self._clock), name="queue")
        submissions = await spawn(
            lambda: SubmissionActor(
                queue,
                self._shards,
                next_index={
                    common_pb2.PURPOSE_TRAIN: state.queue.window.next_index,
                    common_pb2.PURPOSE_EVAL: state.queue.ledger.next_eval_index,
                },
                placeable=lambda: self._members.placeable(self._shards.live()),
                reachable=lambda: self._members.registered & self._shards.live(),
            ),
            name="submissions",
        )
        commits = await spawn(
            lambda: CommitActor(queue, self._shards, self._record()), name="commits"
        )
        removals = await spawn(
            lambda: ShardRemovals(
                queue, commits, self._shards, self._members, self._coordinator, self._record()
            ),
            name="shard_removals",
        )
        writer = await spawn(lambda: OutcomeWriter(self._shards), name="outcome_writer")
        expired_leases = await spawn(
            lambda: ExpiredLeaseActor(queue, self._shards), name="expired_leases"
        )
        queue.tell(Connect(queue=queue, outcome_writer=writer, expired_leases=expired_leases))
        return LeaderContext(
            leadership=self._leadership,
            queue=queue,
            submissions=submissions,
            commits=commits,
            removals=removals,
            members=self._members,
            shards=self._shards,
        )

    async def _keep_shards(self, leader: LeaderContext) -> None:
        """Follow the pool: report unreachable shards to the queue, register new ones."""
        reported_away = frozenset[str]()
        members = self._members
        while True:
            changed = asyncio.create_task(first_done(self._shards.changed(), members.changed()))
            try:
                live = self._shards.live()
                away = (members.registered - live) | members.unread
                leader.queue.tell(
                    SetAway(shards=away, unread=members.unread, retiring=members.withheld)
                )
                if away != reported_away:
                    reported_away = away
                    log.warning("pool_shards_away", pool_shards=sorted(away))
                if joined := await self._complete_move(live) - members.registered:
                    await self._admit(joined, leader)
                else:
                    await changed
            except ForgeError as error:
                log.warning("pool_shard_not_registered", error=str(error))
                await asyncio.sleep(RETRY_S)
            finally:
                changed.cancel()

    async def _admit(self, joined: frozenset[str], leader: LeaderContext) -> None:
        """Register shards that joined during the term. Raises ForgeError."""
        # The record first: the next term does not read a shard that the record does not name.
        await self._record().add_shards(joined)
        await self._rise_above(joined)
        registry = await recovery.register_shards(
            self._shards, joined, self._copies, term=self._number
        )
        self._marks |= registry.marks
        next_index, next_eval_index = registry.next_index(), registry.next_eval_index()
        holds_all = bool(registry.unbounded)
        for part in registry.parts():
            await self._restore(leader, RestoreGroups(groups=part, holds_all=holds_all))
        await self._restore(leader, RestoreGroups(left_out=registry.left_out, holds_all=holds_all))
        indices: dict[int, int] = {
            common_pb2.PURPOSE_TRAIN: next_index,
            common_pb2.PURPOSE_EVAL: next_eval_index,
        }
        await ask_until_handled(leader.submissions, ReserveIndices(next_index=indices))
        members = self._members
        members.registered |= joined
        members.unread -= joined

    async def _rise_above(self, joined: frozenset[str]) -> None:
        """Raises the fence above those of joined shards, which may know a later leader than etcd.
        Raises Unavailable."""
        floors = await self._shards.floors(joined)
        if floors.term > self._number:
            log.error("term_is_older_than_pool", term=self._number, pool_term=floors.term)
            self._failed.set()
        await self._leadership.raise_above(floors.fence)

    async def _restore(self, leader: LeaderContext, part: RestoreGroups) -> None:
        await ask_until_handled(leader.queue, replace(part, number=self._restored))
        self._restored += 1

    def _follow_erasures(self, leader: LeaderContext) -> asyncio.Task[None]:
        follower = ErasureFollower(
            leader.queue,
            self._shards,
            registered=lambda: self._members.registered,
            marks=self._marks,
        )
        task = asyncio.create_task(follower.follow(), name="erasure-follower")
        task.add_done_callback(lambda _: self._failed.set())
        return task

    async def _note_head(self, leader: LeaderContext) -> None:
        """Store the head in the term record, for a leader that begins without a shard."""
        while True:
            try:
                await leader.commits.ask(NoteHead(), timeout_s=ASK_S)
            except ForgeError as error:
                log.info("head_not_stored", error=str(error))
            await asyncio.sleep(NOTE_HEAD_S)

    def _record(self) -> OwnRecord:
        return OwnRecord(self._coordinator, self._number)

    async def _note_that_no_claims_are_out(self) -> None:
        """The next leader then does not wait for runners to renew."""
        if self._leader is None or not self._leadership.alive:
            return
        with contextlib.suppress(ForgeError):
            status = await self._leader.queue.ask(GetStatus(), timeout_s=RETRY_S)
            if status.running_rollouts == 0:
                await self._record().amend(claims=False)
