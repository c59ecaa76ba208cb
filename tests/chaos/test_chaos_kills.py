"""kill -9 of each service in the middle of a run: the run completes all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.suite.forge_run import ForgeRun

pytestmark = pytest.mark.timeout(1800)

MORE = 8
"""Steps that are taken after the kill, more than what lies ready in the queue would do for."""


@pytest.mark.parametrize(
    "victim",
    ["gateway", "pool", "scheduler", "decode", "trainer", "prefill", "router", "runner", "etcd"],
)
def test_run_survives_the_kill_of_each_service(
    victim: str, tmp_path: Path, forge_root: Path
) -> None:
    """SIGKILL in mid-run costs one line on the screen, never the run or a sealed trajectory."""
    # More steps than it can take before the kill, however late that is.
    run = ForgeRun(tmp_path / "run", root=forge_root, steps=1000)
    run.start()
    run.wait_for_step(2)
    run.kill(victim)
    run.wait_until(lambda: f"{victim} " in run.output() and "SIGKILL" in run.output(), "word of it")
    run.wait_for_step(run.last_step() + MORE)
    run.interrupt()

    run.steps = int(run.metrics()[-1]["step"]) + 1
    run.start()
    assert run.finish() == 0, run.explain()
    assert run.state()["phase"] == "done"
    assert sorted({int(step["step"]) for step in run.metrics()}) == list(range(1, run.steps + 1))
