"""The settings of every service, from its config type."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable

from docs.hooks.page import Page, table
from forge.runtime.settings import ServiceConfig, Setting, allowed, fields_of, settings_of, toml

CONFIGS = {
    "gateway": "services.gateway.config:GatewayConfig",
    "pool": "services.pool.config:PoolConfig",
    "scheduler": "services.scheduler.config:SchedulerConfig",
    "inference": "services.inference.config:InferenceConfig",
    "trainer": "services.trainer.config:TrainerConfig",
    "console": "services.console.config:ConsoleConfig",
    "runner": "forge.agents.config:RunnerConfig",
}
"""By the name that is part of the environment variable: `FORGE_POOL_SHARD`."""

_INTRODUCTION = """# Settings

Each process reads its settings once, at its start. The sources are a key of the TOML file
(`--config FILE` or `FORGE_CONFIG`), `FORGE_<KEY>`, `FORGE_<SERVICE>_<KEY>`, and a flag `--<key>`
with hyphens; later sources win. A process ends with exit code 2 after an unknown key or a value
that is not allowed.
`--print-config` prints the settings in force as TOML; `--check` prints each problem of the settings
and of this host.

For example, `lease_ttl_s` of the pool is `FORGE_LEASE_TTL_S`, `FORGE_POOL_LEASE_TTL_S` or
`--lease-ttl-s`; `window` of the table `[queue]` is `FORGE_QUEUE__WINDOW` or `--queue.window`.
"""


def page() -> Page:
    """One table of the settings that all services have, and one for each table of each service."""
    shared = settings_of(ServiceConfig())
    lines = [_INTRODUCTION, "## Every service", "", *_rows(shared.values())]
    for service, reference in CONFIGS.items():
        module, _, name = reference.partition(":")
        config = getattr(importlib.import_module(module), name)()
        lines += [f"## {service.capitalize()}", "", (config.__doc__ or "").splitlines()[0], ""]
        own = [one for one in settings_of(config).values() if not _unchanged(one, shared)]
        for group, settings in itertools.groupby(own, key=lambda one: one.table):
            lines += [f"### {service}: \\[{group}\\]", ""] if group else []
            lines += _rows(settings)
        for one in own:
            if named := fields_of(one.type, f"{one.key}.NAME"):
                lines += [f"### {service}: \\[{one.key}.NAME\\]", "", *_rows(named.values())]
    return Page(path="reference/settings.md", text="\n".join(lines))


def _unchanged(setting: Setting, shared: dict[str, Setting]) -> bool:
    """Whether the service has it as every service does."""
    same = shared.get(setting.key)
    return same is not None and (same.value, same.type) == (setting.value, setting.type)


def _value(one: Setting) -> str:
    return "" if one.value is None else f"`{toml(one.value)}`"


def _rows(settings: Iterable[Setting]) -> list[str]:
    rows = ((f"`{one.key}`", _value(one), allowed(one.type), one.text) for one in settings)
    return table(["key", "default", "allowed", "meaning"], rows)
