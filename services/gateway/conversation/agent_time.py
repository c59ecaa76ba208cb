"""Agent time between the calls of one session.

Owns the times in a turn's record from which `forge.core.credit.completion_time` computes the
completion time of a rollout: the number of turns that had ended when the request arrived, and the
agent time since the latest end. Within this gateway they come from the monotonic clock. Across
gateways, and after a read from the pool, they come from the wall clock, so the clocks of the hosts
must agree. `AgentTime` reads no clock: time is an argument.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from forge.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One point in time."""

    at_s: float
    """On the monotonic clock of this process."""
    unix_s: float

    @classmethod
    def now(cls) -> Moment:
        """Reads both clocks."""
        return cls(at_s=time.monotonic(), unix_s=time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The agent time of a call, at the arrival of its request."""

    turns_before: int
    agent_s: float | None
    """None when the latest end is not on record."""


class AgentTime:
    """The agent time of one session."""

    def __init__(self) -> None:
        self._first: Moment | None = None
        """Arrival of the first request at this gateway."""
        self._ended: Moment | None = None
        """End of the latest turn of this gateway, unless another gateway recorded a later one."""
        self._ended_unix_s: float | None = None
        """End of the latest turn; None without turns, 0 if its record has no end."""
        self._closed: Moment | None = None
        """End of the agent."""
        self._before_failure_s: float | None = None
        """Agent time before the latest failed calls; the time after them is not agent time."""

    def rebuilt(self, turn: common_pb2.Turn | None) -> None:
        """Sets the latest turn as the pool has it; None without turns."""
        if turn is None:
            return
        if self._ended is None or turn.ended_unix_s > self._ended.unix_s:
            self._ended = None
            self._ended_unix_s = turn.ended_unix_s

    def began(self, arrived: Moment, *, turns: int) -> Begun:
        """Returns the agent time of a request that arrived after the end of `turns` turns."""
        if self._first is None:
            self._first = arrived
        return Begun(turns_before=turns, agent_s=self._until(arrived))

    def record(
        self, turn: common_pb2.Turn, begun: Begun | None, *, arrived: Moment, now_s: float
    ) -> None:
        """Writes the times of an ended call into its turn. `begun` is None if the begin of the call
        is unknown."""
        unix_s = arrived.unix_s + max(0.0, now_s - arrived.at_s)
        turn.started_unix_s, turn.ended_unix_s = arrived.unix_s, unix_s
        if begun is not None and begun.agent_s is not None:
            turn.timings.agent_s = begun.agent_s
            turn.turns_before = begun.turns_before
        self._ended, self._ended_unix_s = Moment(at_s=now_s, unix_s=unix_s), unix_s
        self._before_failure_s = None

    def failed(self, begun: Begun, *, turns: int) -> None:
        """Observes a call that ended without a turn, after `turns` turns. Until its retry the agent
        waits for the cluster."""
        if begun.turns_before == turns and begun.agent_s is not None:
            self._before_failure_s = max(self._before_failure_s or 0.0, begun.agent_s)

    def close(self, agent_ended: Moment) -> None:
        """Stores the agent's end; a repeated close does not move it."""
        self._closed = self._closed or agent_ended

    @property
    def closing_s(self) -> float | None:
        """`closing_agent_s` of the trajectory; None before a close, and if unknown."""
        return self._until(self._closed) if self._closed is not None else None

    def _until(self, now: Moment) -> float | None:
        """Returns the agent time from the latest end to `now`; without an end, from the first
        request. None if that end is not on record."""
        if self._before_failure_s is not None:
            return self._before_failure_s
        if self._ended is not None:
            return max(0.0, now.at_s - self._ended.at_s)
        if self._ended_unix_s is not None:
            return max(0.0, now.unix_s - self._ended_unix_s) if self._ended_unix_s else None
        return max(0.0, now.at_s - self._first.at_s) if self._first is not None else 0.0
