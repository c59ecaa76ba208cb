"""The turns of one pool shard that are not durable yet.

A turn leaves the backlog when the pool acknowledges it or refuses it permanently; then its session
cannot be sealed. The limit applies when a call begins (`Backlog.check_space`), never to a sampled
turn. One turn per trajectory is in flight.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from forge.core.errors import FailedPrecondition, ResourceExhausted
from forge.runtime.concurrency.futures import settle
from forge.v1 import common_pb2
from services.gateway.metrics import BACKLOG

MAX_REFUSALS = 10_000
"""Trajectories with a refused turn that are remembered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    trajectory_id: str
    turn_index: int
    data: bytes


@dataclass(slots=True, kw_only=True)
class Backlog:
    """Turns of one shard that are not durable yet. Survives a crash of the actor."""

    pool_shard: str
    max_bytes: int
    waiting: OrderedDict[int, _Waiting] = field(default_factory=OrderedDict)
    unsent: deque[int] = field(default_factory=deque)
    bytes: int = 0
    next_sequence: int = 1
    by_trajectory: dict[str, deque[int]] = field(default_factory=dict)
    """Sequences of the waiting turns per trajectory, in order; only the first is sent."""
    contested: set[str] = field(default_factory=set)
    """Trajectories that send no turn before a `Replace`."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reason of a permanent refusal by trajectory; the latest `MAX_REFUSALS`."""
    flushes: dict[str, list[asyncio.Future[None]]] = field(default_factory=dict)
    rejection: str = ""
    """Reason why the shard rejects turns for now, for example a full disk; "" after it accepts
    one."""

    def __post_init__(self) -> None:
        BACKLOG.labels(self.pool_shard).set_function(lambda: self.bytes)

    def check_space(self) -> None:
        """Raises `ResourceExhausted` while the backlog exceeds its limit."""
        if self.bytes >= self.max_bytes:
            raise ResourceExhausted(
                f"{self.bytes >> 20} MiB of turns wait for {self.where}", retry_after_s=2.0
            )

    @property
    def where(self) -> str:
        """Name of the shard, with the reason if it rejects turns."""
        return f"pool shard {self.pool_shard}{self.rejection and f' ({self.rejection})'}"

    def add_turn(self, turn: common_pb2.Turn) -> None:
        """Adds a sampled turn, without a limit."""
        data = turn.SerializeToString()
        sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        self.waiting[sequence] = _Waiting(
            trajectory_id=turn.trajectory_id, turn_index=turn.turn_index, data=data
        )
        queue = self.by_trajectory.setdefault(turn.trajectory_id, deque())
        queue.append(sequence)
        if len(queue) == 1:
            self.unsent.append(sequence)
        self.bytes += len(data)

    def resend_all(self) -> None:
        """Marks the first waiting turn of each trajectory as unsent."""
        self.unsent = deque(
            queue[0]
            for trajectory_id, queue in self.by_trajectory.items()
            if trajectory_id not in self.contested
        )

    def remove_turn(self, sequence: int) -> _Waiting | None:
        """Removes a turn that was acknowledged or refused, and releases the next one of its
        trajectory. Returns None if the turn was removed before."""
        turn = self.waiting.pop(sequence, None)
        if turn is None:
            return None
        self.bytes -= len(turn.data)
        queue = self.by_trajectory[turn.trajectory_id]
        assert queue[0] == sequence, "only the first turn of a trajectory is sent"
        queue.popleft()
        if queue:
            self.unsent.append(queue[0])
        else:
            del self.by_trajectory[turn.trajectory_id]
        return turn

    def turns_of(self, trajectory_id: str) -> list[common_pb2.Turn]:
        """Returns the waiting turns of a trajectory, in order."""
        queue = self.by_trajectory.get(trajectory_id, ())
        return [common_pb2.Turn.FromString(self.waiting[sequence].data) for sequence in queue]

    def replace_turns(self, trajectory_id: str, turns: Sequence[common_pb2.Turn]) -> None:
        """Replaces the waiting turns of a trajectory with `turns`."""
        for sequence in self.by_trajectory.pop(trajectory_id, ()):
            self.bytes -= len(self.waiting.pop(sequence).data)
        self.contested.discard(trajectory_id)
        for turn in turns:
            self.add_turn(turn)

    def refuse_all(self, refusal: str) -> None:
        """Removes all turns: no shard will store them."""
        for trajectory_id in list(self.by_trajectory):
            self.replace_turns(trajectory_id, ())
            self.store_refusal(trajectory_id, refusal)
            self.complete_flushes(trajectory_id)
        self.unsent.clear()

    def complete_flushes(self, trajectory_id: str) -> None:
        """Completes the flushes of a trajectory if none of its turns waits."""
        if trajectory_id in self.by_trajectory:
            return
        refusal = self.refused.get(trajectory_id)
        for flush in self.flushes.pop(trajectory_id, ()):
            settle(flush, None if refusal is None else FailedPrecondition(refusal))

    def store_refusal(self, trajectory_id: str, refusal: str) -> None:
        """Stores the first refusal beyond the life of the session in memory: a session read back
        from the pool lacks the refused turn and must not be sealed."""
        self.refused.setdefault(trajectory_id, refusal)
        if len(self.refused) > MAX_REFUSALS:
            del self.refused[next(iter(self.refused))]
