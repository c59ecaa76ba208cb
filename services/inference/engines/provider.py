"""Start of an engine: its options, and the functions of its entry point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import DecodeEngine, PrefillEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class KvStoreOptions:
    """Directory and size of the KV store."""

    directory: str
    """On a file system that all workers of the model see."""
    max_bytes: int
    """Largest size of the directory, over all workers."""
    host_bytes: int = 0
    """Memory of this worker in front of the directory."""
    block_tokens: int = 64
    """Tokens of one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Model, device and limits of one engine, from the settings of the worker."""

    model_path: str
    """Directory with the model's config.json."""
    dtype: str = "auto"
    device: str = "cpu"
    context_tokens: int = 0
    """Prompt and answer together; 0: the model's own limit."""
    threads: int = 1
    block_tokens: int = 16
    """Tokens of one block of the prefix cache."""
    cache_bytes: int = 512 << 20
    """Memory for the prefix cache."""
    kv_bytes: int = 2 << 30
    """Memory for running sequences (decode) or held prompts (prefill)."""
    pass_tokens: int = 0
    """Most tokens of one prefill pass; 0: the engine's own choice."""
    max_running: int = 128
    """Most requests that sample at the same time."""
    kv_store: KvStoreOptions | None = None
    """None: keys and values stay in this worker."""
    recompute_on_update: bool = False
    """A swap of weights ends running answers, and the router continues them with prompt and tokens
    computed again by the new weights; otherwise they keep their keys and values."""
    draft_tokens: int = 0
    """Most tokens that draft heads draft for one step; 0: no drafts."""
    adaptive_drafts: bool = True
    """Choose the number of drafts by measured speed; otherwise always `draft_tokens`."""
    request_timeout_s: float
    """Deadline of one message to the engine."""
    settings: object = None
    """The engine's own settings, from the table of its name; None: it has none, or its defaults."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Options of this engine alone; it refuses unknown ones with ConfigError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFinding:
    """A check of an engine's installation, for `forge doctor --engine`."""

    ok: bool
    text: str
    remedy: str = ""
    was_run: bool = True
    """False: the text says why the check was not run."""


class EngineProvider(Protocol):
    """Starts an engine for one role: a module, or an object, that an entry point names.

    It has one function or more of: `start_prefill` and `start_decode`, as below; `start_both`,
    which returns a `BothEngine`; `start_aggregated`, which returns an `AggregatedEngine` for the
    role both. `check(model_path, *, context_tokens, device, dtype)` raises ConfigError for a model
    that it cannot serve (`--check`, `forge run --model` and, without `examine`, `forge doctor
    --engine --model` call it); it may leave out any of the keywords. `examine(model_path)` yields
    findings on its installation, and with a model on what it computes.

    An actor of `actors` that fails for good ends the worker with exit code 1.
    """

    async def start_prefill(self, actors: ActorSystem, options: EngineOptions) -> PrefillEngine:
        """Build the model without weights. Raises ConfigError for options it does not support."""

    async def start_decode(self, actors: ActorSystem, options: EngineOptions) -> DecodeEngine:
        """Build the model without weights. Raises ConfigError for options it does not support."""
