"""Engines by name.

Another package adds an engine with an entry point in the group `forge.engines`: it names a module
or an object that fulfils `EngineProvider`. Not here: the contract of an engine; see `base`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from inspect import signature
from typing import cast

from forge.core.entry_points import installed, load_entry_point
from forge.core.errors import ConfigError
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.aggregated import Aggregated
from services.inference.engines.base import (
    BothEngine,
    DecodeEngine,
    Engine,
    PrefillEngine,
)
from services.inference.engines.capabilities import Role
from services.inference.engines.provider import EngineOptions, EngineProvider

ENGINES_GROUP = "forge.engines"
# Listed again in pyproject.toml. Installed metadata may be older than this file.
BUILT_IN = {
    "embedded": "services.inference.engines.embedded.engine",
    "tensorrt_llm": "services.inference.engines.tensorrt_llm.provider",
    "vllm": "services.inference.engines.vllm.provider",
}


def get_engine(name: str) -> EngineProvider:
    """Import an engine. Raises `ConfigError` as `engine_entry`, and if the import fails."""
    return cast(EngineProvider, load_entry_point(engine_entry(name)))


def engine_entry(name: str) -> EntryPoint:
    """Find an engine. Raises `ConfigError`, which lists the installed engines."""
    entries = {key: EntryPoint(key, value, ENGINES_GROUP) for key, value in BUILT_IN.items()}
    if name not in entries:
        entries |= installed(ENGINES_GROUP)
    if name not in entries:
        raise ConfigError(
            f"engine = {name!r} is not installed; installed: {', '.join(sorted(entries))}. "
            f"To add one, install a package with the entry point {name!r} in the group "
            f"{ENGINES_GROUP} (docs/engines.md)"
        )
    return entries[name]


def check_model(name: str, model_path: str, **settings: object) -> bool:
    """Ask an engine whether it can serve a model; return False if it has no such check. Raises
    `ConfigError` as `get_engine`, and for a model that it cannot serve.

    `settings`: context_tokens, device and dtype of the worker.
    """
    if (check := getattr(get_engine(name), "check", None)) is None:
        return False
    # An engine names what it wants to know; those of earlier releases want less.
    taken = signature(check).parameters
    check(model_path, **{key: value for key, value in settings.items() if key in taken})
    return True


async def start_prefill(name: str, actors: ActorSystem, options: EngineOptions) -> PrefillEngine:
    """Start an engine in the role prefill. Raises `ConfigError` for one that does not have it."""
    return cast(PrefillEngine, await _start(name, "prefill", actors, options))


async def start_decode(name: str, actors: ActorSystem, options: EngineOptions) -> DecodeEngine:
    """Start an engine in the role decode. Raises `ConfigError` for one that does not have it."""
    return cast(DecodeEngine, await _start(name, "decode", actors, options))


async def start_both(name: str, actors: ActorSystem, options: EngineOptions) -> BothEngine:
    """Start an engine in the role both. Raises `ConfigError` for one that does not have it."""
    start = getattr(get_engine(name), "start_aggregated", None)
    if start is not None:
        both = Aggregated(await start(actors, options))
        await _require_abilities(both, options)
        return both
    return cast(BothEngine, await _start(name, "both", actors, options))


async def _start(name: str, role: Role, actors: ActorSystem, options: EngineOptions) -> Engine:
    provider = get_engine(name)
    start = getattr(provider, f"start_{role}", None)
    if start is None:
        functions = {"prefill": "prefill", "decode": "decode", "both": "both", "aggregated": "both"}
        found = {role for key, role in functions.items() if hasattr(provider, f"start_{key}")}
        raise ConfigError(
            f"engine = {name!r} has no role {role}: choose role = {' or '.join(sorted(found))}"
        )
    engine = cast(Engine, await start(actors, options))
    await _require_abilities(engine, options)
    return engine


async def _require_abilities(engine: Engine, options: EngineOptions) -> None:
    """Close an engine that lacks what the settings demand. Raises `ConfigError`."""
    able = engine.capabilities
    if options.recompute_on_update and not able.recomputes:
        await engine.close()
        raise ConfigError(
            f"kv.on_update = 'recompute': the engine {able.engine} does not end running answers "
            "when the weights change; set kv.on_update = 'keep', or choose an engine with the "
            "capability recomputes (docs/engines.md)"
        )
