"""`forge status` before etcd has listed the services."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from forge.cli.status import system_state
from forge.core.errors import Unavailable


async def test_unlisted_services_are_no_absent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy etcd lists late: an upgrade that read no leader would restart leaders first."""
    monkeypatch.setattr(system_state, "_KNOW_S", 0.0)
    never = SimpleNamespace(known=asyncio.Event().wait)
    coordinator: Any = SimpleNamespace(discover=lambda kind: never)
    with pytest.raises(Unavailable, match="etcd has not listed the services"):
        channels: Any = SimpleNamespace()
        await system_state.read_state(coordinator, channels, cluster="default")
