"""Messages of the router actor, with the admissions and placements that it shares with callers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from forge.core.placement.chain_hashes import PromptChains
from services.inference.engines.base import CacheChange
from services.inference.router.fleet.needs import NO_NEEDS, Needs
from services.inference.router.fleet.workers import Worker


@dataclass(slots=True, eq=False, kw_only=True)
class QueuePlace:
    """A request's place: queued until `granted`, then admitted until it leaves."""

    granted: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    asked_s: float = 0.0
    """Time at which it joined the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Ask: queue the request. ResourceExhausted when too many wait, UnsupportedByEngines when no
    engine in discovery can serve it; `granted` is Unavailable when it has waited for
    router.worker_wait_s while no worker samples. Leave must follow in any case."""

    admission: QueuePlace = field(default_factory=QueuePlace)
    needs: Needs = NO_NEEDS


@dataclass(slots=True, eq=False, kw_only=True)
class Placement:
    """A worker that counts the request as load. Prefilled, Decoded, Failed or Abandoned must
    follow in any case."""

    chosen: Worker | None = None
    """None until the request is placed."""
    tokens: int = 0
    """Tokens counted as its load until the outcome."""
    session: str = ""
    beside: int = 0
    """Requests of the worker at the placement, with this one."""
    prompt: PromptChains | None = None
    """The prompt; None before the placement."""

    @property
    def worker(self) -> Worker:
        """The chosen worker; only after the placement."""
        assert self.chosen is not None, "the request was placed"
        return self.chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePrefill:
    """Ask: place a prefill. Unavailable without an available worker, TooOld while all have older
    weights than `floor`, and the errors of `require_able`."""

    ids: bytes
    session: str = ""
    key: str = ""
    """Decides whether a canary gets it: the session, or the request without one."""
    floor: int = 0
    """Newest version of the weights of the answer's tokens."""
    needs: Needs = NO_NEEDS
    placement: Placement = field(default_factory=Placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """Tell: a prefill has succeeded."""

    placement: Placement
    ids: bytes
    cached_tokens: int
    prefill_s: float
    stored_tokens: int = 0
    stored_s: float = 0.0
    decode: Placement | None = None
    """Placement of the decode with which the same call continues, on the same worker; Decoded,
    Failed or Abandoned must follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceDecode:
    """Ask: place a decode. As PlacePrefill."""

    ids: bytes
    session: str = ""
    floor: int = 0
    read_by: Worker | None = None
    """The worker that has read the prompt."""
    early: bool = False
    """`read_by` still reads the prompt: only a worker that takes early hand-offs from it."""
    needs: Needs = NO_NEEDS
    placement: Placement = field(default_factory=Placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Tell: a decode has finished; `ids` are prompt and answer."""

    placement: Placement
    ids: bytes
    decode_s: float
    tokens: int = 0
    """Tokens that it sampled."""
    fetched_tokens: int = 0
    """Tokens whose keys and values it fetched, in `fetch_s`."""
    fetch_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Tell: a placement failed. `dead`: the worker did not answer."""

    placement: Placement
    dead: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandoned:
    """Tell: the caller left before the outcome of a placement."""

    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSampled:
    """Tell: tokens were sampled for a caller."""

    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Tell: the request has ended."""

    admission: QueuePlace


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Ask: GetInferenceStatusResponse without the fields of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReported:
    """Tell: a worker's prefix cache has changed."""

    worker: Worker
    change: CacheChange


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldChanged:
    """Tell: a hold of the weights began, changed or ended."""

    newest: int | None
    """The newest held version; None without a hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChanged:
    """Tell: discovery has changed."""
