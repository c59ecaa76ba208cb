"""When a runner process begins to lease: once it is in discovery, and its settings agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from forge.agents.app import RunnerApp
from forge.agents.config import RunnerConfig
from forge.agents.runner import Runner
from forge.runtime.process.service import ServiceContext
from forge.runtime.settings import load
from forge.v1 import scheduler_pb2
from tests.support.runtime.waiting import settle


class NoInstances:
    """Discovery without any instance."""

    instances = ()

    def changed(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()


@pytest_asyncio.fixture
async def context(tmp_path: Any) -> AsyncIterator[ServiceContext]:
    nothing: Any = None
    key_file = tmp_path / "key"
    key_file.write_bytes(b"k" * 32)
    key_file.chmod(0o600)
    argv = [f"--key-file={key_file}", "--unsafe-sandbox=true"]
    coordinator: Any = SimpleNamespace(discover=lambda kind: NoInstances())
    made = ServiceContext(
        config=load(RunnerConfig, service="runner", argv=argv, environ={}),
        security=SimpleNamespace(bearer=None),  # type: ignore[arg-type]
        coordinator=coordinator,
        channels=nothing,
        actors=nothing,
        server=nothing,
    )
    yield made
    await made.undo.aclose()


def test_help_names_the_command_of_a_runner(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader can type what the first line shows."""
    with pytest.raises(SystemExit):
        load(RunnerConfig, service="runner", argv=["--help"], environ={})
    assert capsys.readouterr().out.startswith("usage: forge agents run [--config FILE]")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The methods that a runner called."""
    methods: list[str] = []

    async def ask(self: RunnerApp, method: str, request: Any, *, timeout_s: float) -> Any:
        methods.append(method)
        if not request.leaving:
            await asyncio.get_running_loop().create_future()
        return scheduler_pb2.LeaseRolloutsResponse()

    monkeypatch.setattr(RunnerApp, "_ask_scheduler", ask)
    return methods


async def test_runner_leases_only_once_it_is_registered(
    context: ServiceContext, asked: list[str]
) -> None:
    """Before, an operator could not drain it, and a runner with other settings would take work."""
    app = RunnerApp(context)
    await app.start()
    await settle()
    assert asked == []
    context.registered.set()
    await settle()
    assert asked == ["LeaseRollouts"]
    await app.stop()


async def test_runner_that_never_registered_ends_at_once(
    context: ServiceContext, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal during the start does not wait for work that never began."""

    async def never(self: Runner, *, patience_s: float) -> None:
        raise AssertionError("nothing to drain")

    monkeypatch.setattr(Runner, "drain", never)
    app = RunnerApp(context)
    await app.start()
    await app.drain()
    await app.stop()
    assert asked == []
