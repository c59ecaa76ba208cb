"""Engines as the registry starts them: with abilities that the settings demand."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.core.errors import ConfigError
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines import registry
from services.inference.engines.base import ModelLimits
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.doctor import findings
from services.inference.engines.provider import EngineOptions

OPTIONS = EngineOptions(model_path="model", request_timeout_s=1.0, recompute_on_update=True)


class Foreign:
    """An engine of another package, and its provider, for any role."""

    def __init__(self, *, recomputes: bool) -> None:
        self.capabilities = Capabilities(
            engine="foreign",
            roles=frozenset({"both"}),
            update="in_flight",
            draws="stream",
            recomputes=recomputes,
        )
        self.capacity, self.limits = 1, ModelLimits(context_tokens=8, vocabulary=8)
        self.closed = False

    async def start_aggregated(self, actors: ActorSystem, options: EngineOptions) -> Any:
        return self

    start_decode = start_prefill = start_aggregated

    async def close(self) -> None:
        self.closed = True


STARTS = [registry.start_prefill, registry.start_decode, registry.start_both]


@pytest.mark.parametrize("start", STARTS)
async def test_answers_are_recomputed_by_engines_that_declare_it(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by one of another package. Without the capability it does not start."""
    found = {"able": Foreign(recomputes=True), "unable": Foreign(recomputes=False)}
    monkeypatch.setattr(registry, "installed", lambda group: {n: _entry(n) for n in found})
    monkeypatch.setattr(registry, "load_entry_point", lambda entry: found[entry.name])
    actors = ActorSystem("registry")
    await start("able", actors, OPTIONS)
    with pytest.raises(ConfigError, match=r"kv\.on_update = 'recompute': the engine foreign"):
        await start("unable", actors, OPTIONS)
    assert [engine.closed for engine in found.values()] == [False, True]
    await start("unable", actors, replace(OPTIONS, recompute_on_update=False))


def _entry(name: str) -> EntryPoint:
    return EntryPoint(name, "package.engine", registry.ENGINES_GROUP)


def test_doctor_checks_the_model_with_any_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the check of its start; an engine without one says that it was not run."""

    def check(model_path: str, *, device: str) -> None:
        if model_path != str(tmp_path):
            raise ConfigError(f"{model_path} on {device} is wrong")

    without = Foreign(recomputes=True)
    found = {"with": SimpleNamespace(check=check), "without": without}
    monkeypatch.setattr(registry, "installed", lambda group: {n: _entry(n) for n in found})
    monkeypatch.setattr(registry, "load_entry_point", lambda entry: found[entry.name])
    (tmp_path / "config.json").write_text("{}")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    registered, served = findings("with", str(tmp_path))
    assert registered.ok and served.ok and str(tmp_path) in served.text
    _, refused = findings("with", str(other))
    assert not refused.ok and refused.text.startswith(f"{other} on c")
    _, absent = findings("with", str(tmp_path / "none"))
    assert not absent.ok and "is not a model directory" in absent.text
    _, not_run = findings("without", str(tmp_path))
    assert not not_run.was_run
    assert len([*findings("without")]) == 1
