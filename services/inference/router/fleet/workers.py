"""Workers as a router knows them: the engine that each announces, its load and its cache. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from forge.core.placement.cache_view import CacheView
from forge.runtime.coordination import Instance
from forge.runtime.process.agreement import AGREED_KEY, read_agreed
from forge.runtime.process.drain import DRAINING_KEY
from forge.runtime.serving_groups import role_of
from forge.runtime.telemetry import log
from services.inference.engines.capabilities import EARLY_HAND_OFF, Capabilities
from services.inference.router.fleet.costs import Times
from services.inference.router.fleet.open_calls import OpenCalls

UNKNOWN_ENGINE = "unknown"
"""Name of the engine of a worker that announces none: it is of an earlier release."""
_NUMBERS = ("weight_version", "capacity", "block_tokens", "cache_tokens", "stored_tokens")
_MODEL_FILES = ("config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Engine:
    """A worker's announcement of its engine; workers that announce the same share one object."""

    role: str
    """prefill, decode or both."""
    able: Capabilities | None = None
    """None from an earlier release: then it gets any request, and refuses by itself what it cannot
    serve."""
    model: str = ""
    """Fingerprints of the model's config.json and tokenizer.json; empty: unknown."""

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self.able.engine if self.able else UNKNOWN_ENGINE

    @property
    def reads(self) -> bool:
        """Whether it prefills."""
        return self.role != "decode"

    @property
    def samples(self) -> bool:
        """Whether it decodes."""
        return self.role != "prefill"

    def has_model_of(self, other: Engine) -> bool:
        """Whether both run one model, as far as known."""
        return not (self.model and other.model) or self.model == other.model

    def takes_from(self, reader: Engine) -> bool:
        """Whether it takes the keys and values of a reader in another process."""
        if not self.has_model_of(reader):
            return False
        if self.able is None or reader.able is None:
            return True
        return bool(self.able.hand_offs & reader.able.hand_offs)

    def takes_early_from(self, reader: Engine) -> bool:
        """Whether it takes them while the reader computes them."""
        ables = (self.able, reader.able)
        early = all(able is not None and EARLY_HAND_OFF in able.hand_offs for able in ables)
        return early and self.has_model_of(reader)


@dataclass(slots=True, eq=False, kw_only=True)
class Worker:
    """One instance that prefills, decodes or does both."""

    instance_id: str
    address: str
    engine: Engine
    capacity: int
    """Requests it samples at the same time; 0 for prefill."""
    version: int
    cached: CacheView
    times: Times = field(default_factory=Times)
    running: int = 0
    """Unfinished placements."""
    pending_tokens: int = 0
    """Uncached prompt tokens of unfinished prefills."""
    computed_tokens: int = 0
    cached_tokens: int = 0
    suspect_until_s: float = 0.0
    stored_tokens: int = 0
    """Capacity of the KV store that it shares; 0: none."""
    reports_cache: bool = False
    prefills_in_decode: bool = False
    """The worker reads and samples in one call."""
    serves_stream: bool = False
    """The worker takes its calls on one kept stream."""
    draining: bool = False
    """An operator drains it."""
    calls: OpenCalls = field(default_factory=OpenCalls)

    def is_available(self, now_s: float) -> bool:
        """Whether it gets new requests."""
        return not self.draining and self.suspect_until_s <= now_s

    @property
    def role(self) -> str:
        """prefill, decode or both."""
        return self.engine.role

    @property
    def reads(self) -> bool:
        """Whether it prefills."""
        return self.engine.reads

    @property
    def samples(self) -> bool:
        """Whether it decodes."""
        return self.engine.samples


def is_readable(one: Instance) -> bool:
    """Whether the numbers of a directory entry can be read; the log names one that cannot."""
    try:
        for name in _NUMBERS:
            int(one.metadata.get(name, 0))
    except ValueError as error:
        log.error("worker_metadata_unreadable", worker=one.instance_id, error=f"{name}: {error}")
        return False
    return True


def new_worker(one: Instance) -> Worker:
    """Return the worker of a readable directory entry."""
    engine = engine_of(one)
    capacity = max(1, int(one.metadata.get("capacity", 1))) if engine.samples else 0
    return Worker(
        instance_id=one.instance_id,
        draining=DRAINING_KEY in one.metadata,
        address=one.address,
        engine=engine,
        capacity=capacity,
        version=version_of(one),
        cached=CacheView(
            block_tokens=max(1, int(one.metadata.get("block_tokens", 16))),
            capacity_tokens=int(one.metadata.get("cache_tokens", 0)),
        ),
        stored_tokens=int(one.metadata.get("stored_tokens", 0)),
        reports_cache=one.metadata.get("cache_reports") == "1",
        prefills_in_decode=one.metadata.get("prefills_in_decode") == "1",
        serves_stream=one.metadata.get("worker_stream") == "1",
    )


def version_of(one: Instance) -> int:
    """Return the weight version of a directory entry."""
    return int(one.metadata.get("weight_version", 0))


def engine_of(one: Instance) -> Engine:
    """Return the engine of a directory entry: the same object for the same content."""
    data = one.metadata
    role = data.get("role", role_of(one.kind))
    return _engine(role, data.get("capabilities", ""), data.get(AGREED_KEY, "{}"))


@lru_cache(maxsize=1024)
def _engine(role: str, announced: str, agreed: str) -> Engine:
    files = {name.rpartition("model ")[2]: value for name, value in read_agreed(agreed).items()}
    model = " ".join(files.get(file, "") for file in _MODEL_FILES).strip()
    able = None
    if announced:
        try:
            able = Capabilities.decode(announced)
        except ValueError as error:
            # Of a later release: the worker serves, and refuses by itself what it cannot.
            log.warning("capabilities_unreadable", error=str(error))
    return Engine(role=role, able=able, model=model)
