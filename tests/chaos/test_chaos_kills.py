"""kill -9 of each service in the middle of a run: the run completes all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forge_run import ForgeRun

pytestmark = pytest.mark.timeout(900)

STEPS = 5


@pytest.mark.parametrize(
    "victim",
    ["gateway", "pool", "scheduler", "decode", "trainer", "prefill", "router", "runner", "etcd"],
)
def test_run_survives_kill_of(victim: str, tmp_path: Path, forge_root: Path) -> None:
    """SIGKILL in mid-run costs one line on the screen, never the run or a sealed trajectory."""
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=STEPS)
    run.start()
    run.wait_for_step(2)
    run.kill(victim)
    assert run.finish() == 0, run.explain()
    output = run.output()
    assert f"{victim} " in output and "SIGKILL" in output, output
    assert run.state()["phase"] == "done"
    assert sorted({int(step["step"]) for step in run.metrics()}) == list(range(1, STEPS + 1))
