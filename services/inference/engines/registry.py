"""Engines by name.

Another package adds an engine with an entry point in the group `forge.engines`: it names a module
or an object that fulfils `EngineProvider`. Not here: the contract of an engine; see `base`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import cast

from forge.core.entry_points import installed, load_entry_point
from forge.core.errors import ConfigError
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import BothEngine, EngineOptions, EngineProvider

ENGINES_GROUP = "forge.engines"
# Listed again in pyproject.toml. Installed metadata may be older than this file.
BUILT_IN = {
    "embedded": "services.inference.engines.embedded.engine",
    "tensorrt_llm": "services.inference.engines.tensorrt_llm.provider",
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
            f"{ENGINES_GROUP} (docs/inference.md)"
        )
    return entries[name]


async def start_both(name: str, actors: ActorSystem, options: EngineOptions) -> BothEngine:
    """Start an engine in the role both. Raises `ConfigError` for one that has separate roles
    alone."""
    start = getattr(get_engine(name), "start_both", None)
    if start is None:
        raise ConfigError(f"engine = {name!r} has no role both: choose prefill or decode")
    return cast(BothEngine, await start(actors, options))
