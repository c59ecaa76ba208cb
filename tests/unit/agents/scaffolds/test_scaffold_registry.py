"""How a runner gets the scaffold of a task."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.agents.scaffolds import Scaffolds
from forge.core.errors import NotFound, Unavailable
from tests.support.runtime.waiting import until

SLOW = """
import threading
may_end = threading.Event()

class Slow:
    def __init__(self, **options):
        pass

assert may_end.wait(60), "the event loop was held up by this import"
"""


async def test_import_does_not_block_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop renews leases meanwhile. Two rollouts get the same scaffold."""
    (tmp_path / "slow_scaffold.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    scaffolds = Scaffolds(timeout_s=60.0, extra={"slow": "slow_scaffold:Slow"})
    waiting = [asyncio.create_task(scaffolds.get("slow")) for _ in range(2)]
    module: Any = await until(lambda: sys.modules.get("slow_scaffold"))
    await until(lambda: hasattr(module, "may_end"))
    module.may_end.set()
    first, second = await asyncio.gather(*waiting)
    assert first is second


async def test_unknown_scaffold_lists_the_known_scaffolds() -> None:
    with pytest.raises(
        NotFound, match="unknown scaffold 'x'; this runner knows blackbox, whitebox"
    ):
        await Scaffolds(timeout_s=60.0).get("x")


async def test_scaffold_that_cannot_be_imported_is_no_fault_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host may have the package: the rollout is retried, and no more such tasks come here
    until an import succeeds."""
    module = tmp_path / "broken_scaffold.py"
    module.write_text("import no_such_sdk")
    monkeypatch.syspath_prepend(tmp_path)
    scaffolds = Scaffolds(timeout_s=60.0, extra={"broken": "broken_scaffold:Agent"})
    assert "broken" in scaffolds.names
    with pytest.raises(Unavailable, match=r"cannot run 'broken'.*No module named 'no_such_sdk'"):
        await scaffolds.get("broken")
    assert scaffolds.names == {"blackbox", "whitebox"}


async def test_runner_without_any_scaffold_leases_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list would mean that it runs every scaffold."""
    monkeypatch.setattr("forge.agents.scaffolds.SCAFFOLDS", {"x": "no_such_module:Agent"})
    scaffolds = Scaffolds(timeout_s=60.0)
    with pytest.raises(Unavailable, match="host cannot run 'x'"):
        await scaffolds.get("x")
    with pytest.raises(Unavailable, match="no scaffold can be imported: no_such_module:Agent"):
        _ = scaffolds.names
