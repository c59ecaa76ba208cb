"""The automatic canary of a run with two workers that decode, and kill -9 of its processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.suite.forge_run import ForgeRun
from tests.support.suite.second_worker import SECOND, second_worker

pytestmark = pytest.mark.timeout(1800)

CANARY = {"share": 0.5, "trajectories": 4, "max_reward_drop": 1000}


@contextmanager
def run_with_canary(folder: Path, root: Path, **bounds: float) -> Iterator[ForgeRun]:
    """A run that takes more steps than any test waits for, with a second worker that decodes."""
    settings = {**CANARY, **bounds}
    extra = [f"--set=trainer.canary.{key}={value}" for key, value in settings.items()]
    run = ForgeRun(folder / "run", root=root, steps=1000, extra=tuple(extra))
    run.start()
    run.wait_for_step(1)
    with second_worker(run):
        yield run
        assert run.interrupt() == 130, run.explain()


def events(run: ForgeRun, name: str, *kinds: str) -> list[dict[str, Any]]:
    """Lines of a process's log, of these events; other lines are those of libraries."""
    file = run.directory / "logs" / f"{name}.log"
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    logged = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [one for one in logged if one["event"] in kinds]


def outcomes(run: ForgeRun) -> list[tuple[str, str]]:
    """Outcome and reason of each step of the canary so far."""
    steps = []
    for one in events(run, "trainer", "audit"):
        if one["method"] == "AutomaticCanary":
            outcome, _, reason = str(one["error"]).partition(": ")
            steps.append((outcome, reason))
    return steps


def wait_for(run: ForgeRun, outcome: str, *, after: int = 0) -> int:
    """Wait for an outcome; returns the number of steps up to it."""

    def found() -> list[int]:
        steps = outcomes(run)
        return [n for n in range(after, len(steps)) if steps[n][0] == outcome]

    run.wait_until(lambda: bool(found()), f"canary {outcome}")
    return found()[0] + 1


def served_before_judgement(run: ForgeRun) -> list[tuple[str, int]]:
    """Worker and version of each swap to a version that the worker was not to serve: neither a base
    nor a canary of its own. Counted from the first promotion on: a hold begins while workers follow
    the newest version."""
    holds = events(run, "trainer", "weights_held")
    since = holds[2]["timestamp"]
    bases = {one["base"] for one in holds}
    own = {
        name: {one["canary"] for one in holds if name in one["canary_workers"]}
        for name in ("decode", SECOND)
    }
    return [
        (name, swap["weight_version"])
        for name in own
        for swap in events(run, name, "weights_swapped")
        if swap["timestamp"] > since and swap["weight_version"] not in bases | own[name]
    ]


@pytest.mark.parametrize("victim", ["trainer", "decode"])
def test_canary_is_judged_and_promoted_after_a_kill(
    victim: str, tmp_path: Path, forge_root: Path
) -> None:
    """kill -9 of the trainer, or of a worker, while a canary is served: a later step promotes one,
    and no worker of the base serves a version before its judgement."""
    with run_with_canary(tmp_path, forge_root, max_logprob_gap=1000) as run:
        done = wait_for(run, "promoted")
        begun = wait_for(run, "begun", after=done)
        run.kill(victim)
        run.wait_until(lambda: f"{victim} crashed (SIGKILL)" in run.output(), "word of the kill")
        promoted = wait_for(run, "promoted", after=begun)
        wait_for(run, "promoted", after=promoted)
        if victim == "trainer":  # with a single worker left, all follow the newest version
            assert served_before_judgement(run) == []


def test_canary_out_of_bounds_is_rolled_back_for_good(tmp_path: Path, forge_root: Path) -> None:
    """All workers keep the base, also after kill -9 of the trainer; the version is not tried again,
    a later one is."""
    with run_with_canary(tmp_path, forge_root, max_logprob_gap=0) as run:
        done = wait_for(run, "rolled_back")
        run.kill("trainer")
        run.wait_until(lambda: "trainer crashed (SIGKILL)" in run.output(), "word of the kill")
        wait_for(run, "rolled_back", after=done)
        steps = outcomes(run)
        assert "promoted" not in {outcome for outcome, _ in steps}
        tried = [reason for outcome, reason in steps if outcome == "begun"]
        assert len(tried) >= 2 and len({*tried}) == len(tried)
        assert len({one["base"] for one in events(run, "trainer", "weights_held")}) == 1
        assert len(events(run, "trainer", "canary_rolled_back")) >= 2
        assert served_before_judgement(run) == []
