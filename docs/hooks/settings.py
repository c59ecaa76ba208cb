"""The settings of every service, from its config type."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from collections.abc import Iterator
from typing import Any

from docs.hooks.page import Page, table
from forge.runtime.config import ServiceConfig, to_toml

CONFIGS = {
    "gateway": "services.gateway.config:GatewayConfig",
    "pool": "services.pool.config:PoolConfig",
    "scheduler": "services.scheduler.config:SchedulerConfig",
    "inference": "services.inference.config:InferenceConfig",
    "trainer": "services.trainer.config:TrainerConfig",
    "runner": "forge.agents.config:RunnerConfig",
}
"""By the name that is part of the environment variable: `FORGE_POOL_SHARD`."""

_INTRODUCTION = """# Settings

Each process reads its settings once, at its start. From weak to strong: a key of the TOML file
(`--config FILE` or `FORGE_CONFIG`), `FORGE_<KEY>`, `FORGE_<SERVICE>_<KEY>`, a flag `--<key>` with
hyphens. An unknown key or a value outside of what is allowed ends the start with exit code 2.
`--print-config` prints the settings in force as TOML.

For example, the key `lease_ttl_s` of the pool is `FORGE_LEASE_TTL_S`, `FORGE_POOL_LEASE_TTL_S` or
`--lease-ttl-s`.
"""


def page() -> Page:
    """One table of the settings that all services have, and one for each service."""
    lines = [_INTRODUCTION, "## Every service", "", *_table(ServiceConfig, frozenset())]
    shared = frozenset(_described(ServiceConfig).items())
    for service, reference in CONFIGS.items():
        module, _, name = reference.partition(":")
        config = getattr(importlib.import_module(module), name)
        lines += [f"## {service.capitalize()}", "", (config.__doc__ or "").splitlines()[0], ""]
        lines += _table(config, shared)
    return Page(path="reference/settings.md", text="\n".join(lines))


def _table(config: type[Any], known: frozenset[tuple[str, tuple[str, ...]]]) -> list[str]:
    """The settings of a config, less those that are `known` and stand there unchanged."""
    rows = [
        (f"`{key}`", *rest) for key, rest in _described(config).items() if (key, rest) not in known
    ]
    return table(["key", "type", "default", "allowed", "meaning"], rows)


def _described(config: type[Any]) -> dict[str, tuple[str, ...]]:
    hints = typing.get_type_hints(config)
    defaults = dict(_defaults(config))
    described = {}
    for field in dataclasses.fields(config):
        rules = field.metadata["rules"]
        described[field.name] = (
            _type_name(hints[field.name]),
            f"`{defaults[field.name]}`",
            _allowed(rules),
            rules.help,
        )
    return described


def _defaults(config: type[Any]) -> Iterator[tuple[str, str]]:
    """Key and default as `--print-config` writes them, tables as one line."""
    prefix = ""
    values = config()
    for field in dataclasses.fields(config):
        value = getattr(values, field.name)
        if isinstance(value, dict):
            yield field.name, ",".join(f"{part}={number}" for part, number in value.items()) or "{}"
    for line in to_toml(values).splitlines():
        if line.startswith("["):
            prefix = line
        elif " = " in line and not prefix:
            key, _, rest = line.partition(" = ")
            yield key, rest.partition("  # ")[0]


def _allowed(rules: Any) -> str:
    if rules.choices:
        return ", ".join(f"`{choice}`" for choice in rules.choices)
    low, high = rules.minimum, rules.maximum
    if low is not None and high is not None:
        return f"{low} to {high}"
    if low is not None:
        return f"{low} or more"
    return "any" if high is None else f"{high} or less"


def _type_name(kind: Any) -> str:
    if kind in (str, int, float, bool):
        return {str: "text", int: "integer", float: "number", bool: "true or false"}[kind]
    return "table" if "dict" in str(kind) or "Mapping" in str(kind) else "list"
