"""The process by which an instance takes part in groups."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from forge.core.errors import ConfigError
from forge.runtime.settings import ServiceConfig
from forge.runtime.settings.weight_group_settings import WeightGroupSettings
from forge.runtime.weights import group_process
from forge.runtime.weights.group_process import GroupError, GroupProcess, require_private
from tests.support.runtime.waiting import until

SETTINGS = WeightGroupSettings(backend="gloo", silence_s=0.2)


@asynccontextmanager
async def started(program: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GroupProcess]:
    monkeypatch.setattr(group_process, "_PROGRAM", program)
    process = GroupProcess(SETTINGS, host="127.0.0.1", device="cpu")
    process.start()
    yield process
    await process.close()


async def nothing(answer: Mapping[str, Any]) -> None: ...


async def test_hung_process_is_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After the silence; the next broadcast has another process."""
    file = os.open(tmp_path, os.O_RDONLY)
    async with started("tests.support.runtime.hung_program", monkeypatch) as process:
        await until(lambda: process.ready)
        assert process._process is not None
        hung = psutil.Process(process._process.pid)
        with pytest.raises(GroupError, match=r"no data for 0.2 s"):
            await process.broadcast(file, {}, nothing)
        assert not process.ready
        await until(lambda: process.ready)
        assert not hung.is_running() and process._process.pid != hung.pid
    os.close(file)
    assert not process.started


async def test_broadcast_without_an_end_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A slow member keeps the others for `limit_s`."""
    monkeypatch.setenv("FORGE_TEST_ENDLESS", "1")
    file = os.open(tmp_path, os.O_RDONLY)
    async with started("tests.support.runtime.hung_program", monkeypatch) as process:
        process.settings = replace(SETTINGS, silence_s=600.0, limit_s=0.5)
        await until(lambda: process.ready)
        with pytest.raises(GroupError, match=r"not complete after 0.5 s"):
            await process.broadcast(file, {}, nothing)
        await until(lambda: process.ready)
    os.close(file)


async def test_process_of_a_cancelled_broadcast_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be in the middle of a collective."""
    file = os.open(tmp_path, os.O_RDONLY)
    async with started("tests.support.runtime.hung_program", monkeypatch) as process:
        process.settings = replace(SETTINGS, silence_s=600.0)
        await until(lambda: process.ready)
        run = asyncio.create_task(process.broadcast(file, {}, nothing))
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await until(lambda: process.ready)
    os.close(file)


async def test_program_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again at the next broadcast, which fails at once."""
    async with started("tests.support.runtime.no_such_program", monkeypatch) as process:
        assert process._starting is not None
        await process._starting
        assert not process.started
        monkeypatch.setattr(group_process, "_PROGRAM", "tests.support.runtime.hung_program")
        with pytest.raises(GroupError, match="not ready"):
            await process.broadcast(0, {}, nothing)
        await until(lambda: process.ready)


def test_network_that_others_see_needs_insecure() -> None:
    """Also with TLS, which groups do not have; one line has the remedy."""
    config = ServiceConfig(advertise_host="10.0.0.1", tls_ca="ca.pem")
    with pytest.raises(ConfigError) as refused:
        require_private(SETTINGS, config)
    assert str(refused.value) == (
        "weight_group.backend = gloo sends weights without encryption, and '10.0.0.1' is not a "
        "loopback address: use a private network and set insecure = true, or weight_group.backend "
        "= off"
    )
    require_private(SETTINGS, replace(config, insecure=True))
    require_private(SETTINGS, ServiceConfig())


def test_group_listens_on_the_interface_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that the operator has set stays."""
    for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(key, raising=False)
    assert group_process._environment("127.0.0.1")["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in group_process._environment("192.0.2.1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    found = group_process._environment("localhost")
    assert found["NCCL_SOCKET_IFNAME"] == "ib0"
