"""The time of the agent between the calls of one session.

Owns what is recorded for the completion time of a rollout (`forge.core.credit.completion_time`):
for each turn how many turns had ended when its request arrived, and the agent's time since the
latest end. Within this gateway it is taken from the monotonic clock. Across gateways, and when a
session is read back from the pool, it is taken from the wall clock, which the hosts have to agree
on. Pure: time comes in.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One point in time."""

    at_s: float
    """On the monotonic clock of this process."""
    unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What is known of a call as its request arrives."""

    turns_before: int
    agent_s: float | None
    """None when the latest end is not on record."""


class AgentTime:
    """Of one session."""

    def __init__(self) -> None:
        self._first: Moment | None = None
        """Arrival of the first request here."""
        self._ended: Moment | None = None
        """End of the latest turn that was recorded here, unless another gateway's was later."""
        self._ended_unix_s: float | None = None
        """End of the latest turn on record; None without turns, 0 when it is not on record."""
        self._closed: Moment | None = None
        """When the agent had ended."""
        self._before_failure_s: float | None = None
        """Agent time before the calls that failed since: the time after them is theirs."""

    def rebuilt(self, turn: common_pb2.Turn | None) -> None:
        """The latest turn as the pool has it; None without turns."""
        if turn is None:
            return
        if self._ended is None or turn.ended_unix_s > self._ended.unix_s:
            self._ended = None
            self._ended_unix_s = turn.ended_unix_s

    def began(self, arrived: Moment, *, turns: int) -> Begun:
        """A request arrived when `turns` turns had ended."""
        if self._first is None:
            self._first = arrived
        return Begun(turns_before=turns, agent_s=self._until(arrived))

    def record(
        self, turn: common_pb2.Turn, begun: Begun | None, *, arrived: Moment, now_s: float
    ) -> None:
        """A call ended with this turn: enters its times. `begun` is None for a call whose begin is
        not known here."""
        unix_s = arrived.unix_s + max(0.0, now_s - arrived.at_s)
        turn.started_unix_s, turn.ended_unix_s = arrived.unix_s, unix_s
        if begun is not None and begun.agent_s is not None:
            turn.timings.agent_s = begun.agent_s
            turn.turns_before = begun.turns_before
        self._ended, self._ended_unix_s = Moment(at_s=now_s, unix_s=unix_s), unix_s
        self._before_failure_s = None

    def failed(self, begun: Begun, *, turns: int) -> None:
        """A call ended without a turn; `turns` have ended by now. Until it is tried again, the
        agent waits for the cluster."""
        if begun.turns_before == turns and begun.agent_s is not None:
            self._before_failure_s = max(self._before_failure_s or 0.0, begun.agent_s)

    def close(self, agent_ended: Moment) -> None:
        """A close that is tried again comes later; the agent's end does not."""
        self._closed = self._closed or agent_ended

    @property
    def closing_s(self) -> float | None:
        """As `closing_agent_s` of a trajectory; None before a close, and when it is not known."""
        return self._until(self._closed) if self._closed is not None else None

    def _until(self, now: Moment) -> float | None:
        """Agent time from the latest end to `now`; without any end, from the first request. None
        when that end is not on record."""
        if self._before_failure_s is not None:
            return self._before_failure_s
        if self._ended is not None:
            return max(0.0, now.at_s - self._ended.at_s)
        if self._ended_unix_s is not None:
            return max(0.0, now.unix_s - self._ended_unix_s) if self._ended_unix_s else None
        return max(0.0, now.at_s - self._first.at_s) if self._first is not None else 0.0
