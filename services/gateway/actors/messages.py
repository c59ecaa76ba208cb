"""Messages of the session actor, and its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forge.v1 import common_pb2
from services.gateway.conversation.agent_time import Moment
from services.gateway.conversation.prompt import Prompt, SampledAnswer
from services.gateway.conversation.turn_request import TurnRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginCall:
    """Begins a call; the answer is its `Prompt`."""

    call_id: str
    abort: Callable[[], None]
    """Ends the call at once; the tokens sampled so far are recorded."""
    request: TurnRequest
    opening: str
    """The beginning of the answer that ends the prompt, for example of a required call."""

    @property
    def arrived(self) -> Moment:
        """Arrival of the request."""
        return self.request.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPrompt:
    """Makes the prompt of a request; the answer is its `Prompt`. No call begins."""

    request: TurnRequest
    opening: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCall:
    """Ends a call, also one that has not begun; the answer is its turn index, -1 without a turn."""

    call_id: str
    request: TurnRequest
    prompt: Prompt | None
    sampled: SampledAnswer | None
    """None for a call without sampled tokens."""

    @property
    def arrived(self) -> Moment:
        """Arrival of the request."""
        return self.request.arrived


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginOther:
    """Begins a call of another model than the policy; the answer is None."""

    call_id: str
    abort: Callable[[], None]
    """Ends the call, as in `BeginCall`."""
    arrived: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOther:
    """Ends a call of another model; the answer is its turn index, -1 without a turn."""

    call_id: str
    arrived: Moment
    turn: common_pb2.Turn | None
    """The record without the session's fields; None for a call without an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Finds a turn by name; the answer is `Recalled`, or None for an unknown name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Removes the name of a turn, after its `deletion` is on record. The turn itself stays."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe:
    """Requests `SessionFacts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartClose:
    """Refuses new calls and aborts those in flight; the answer is a future that is done after the
    last of them is recorded."""

    agent_ended: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """Reports that the pool has sealed the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsBusy:
    """Asks whether calls are in flight; reads nothing from the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reread:
    """Rebuilds the session from the pool: another gateway may have recorded turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFacts:
    """The state of a session."""

    turns: int
    closed: bool
    malformed: tuple[int, ...]
    """Turns with a tool call that did not parse."""
    closing_agent_s: float | None = None
    """As in `Trajectory`; None while the session is open, and if unknown."""
