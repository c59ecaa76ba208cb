"""What a stack checks before its start, by the flags of each `--check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.cli.local_run import member_checks
from forge.cli.local_run.member_checks import check_members
from forge.cli.local_run.stack import Stack, StackPlan, members
from forge.cli.rundir import Phase, RunDirectory, RunState

MODEL = "--model-path=/models/policy"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Sequence[str]]:
    """The flags of the last check of each process, by instance id."""
    found: dict[str, Sequence[str]] = {}

    async def run_module(
        module: str, arguments: Sequence[str], env: Mapping[str, str], **_: Any
    ) -> tuple[int, str]:
        (name,) = (one for one in arguments if one.startswith("--instance-id="))
        found[name.partition("=")[2]] = arguments
        return 0, ""

    monkeypatch.setattr(member_checks, "run_module", run_module)
    return found


def resumed(folder: Path, *, phase: Phase) -> StackPlan:
    """The plan of a run that was started once and has come to this phase."""
    directory = RunDirectory(folder / "run")
    directory.create()
    directory.save(RunState(model="own", model_path="/models/policy", seed=0, steps=9, phase=phase))
    plan = StackPlan(
        directory=directory,
        model_path="/models/policy",
        cluster="run",
        settings={"trainer": {"max_steps": "9"}},
    )
    started = Stack(plan, on_event=lambda _: None)
    started.endpoints = "127.0.0.1:4711"
    started._save(members(plan))
    return replace(plan, settings={"trainer": {"max_steps": "12"}})


async def test_resumed_run_checks_no_model_again(
    tmp_path: Path, checked: dict[str, Sequence[str]]
) -> None:
    """Trainer and workers have served it with these settings; everything else is checked."""
    await check_members(resumed(tmp_path, phase="train"))
    assert checked.keys() >= {"pool", "trainer", "prefill", "decode", "router", "runner"}
    assert all(flags[0] == "--check" for flags in checked.values())
    for name in ("trainer", "prefill", "decode"):
        assert MODEL not in checked[name]
    assert "--max-steps=12" in checked["trainer"]


@pytest.mark.parametrize(
    ("code", "output", "problem"),
    [
        (-9, "", "its check was killed by SIGKILL, perhaps for lack of memory"),
        (-11, "torch: a warning: of no import\n", "its check was killed by SIGSEGV"),
        (3, "", "its check ended with exit code 3 and without a message"),
        (1, "Traceback ...\nMemoryError\n", "MemoryError"),
        (1, "Traceback ...\nOSError: no: such file\n", "OSError: no: such file"),
        (2, "a warning\nforge pool: port = 1: taken\nother\n", "port = 1: taken"),
    ],
)
async def test_check_that_fails_is_a_problem_whatever_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, output: str, problem: str
) -> None:
    """One line for all processes that have it."""

    async def run_module(*_: Any, **__: Any) -> tuple[int, str]:
        return code, output

    monkeypatch.setattr(member_checks, "run_module", run_module)
    (found,) = await check_members(resumed(tmp_path, phase="train"))
    names, _, said = str(found).partition(" cannot start: ")
    assert said == problem
    assert {"pool", "trainer", "runner"} <= set(names.split(", "))


async def test_changed_setting_checks_the_model_again(
    tmp_path: Path, checked: dict[str, Sequence[str]]
) -> None:
    """Of the process that it is for."""
    plan = resumed(tmp_path, phase="train")
    changed = {**plan.settings, "decode": {"context_tokens": "99"}}
    await check_members(replace(plan, settings=changed))
    assert MODEL in checked["decode"] and MODEL not in checked["prefill"]


@pytest.mark.parametrize("lost", [False, True])
async def test_run_that_never_served_its_model_is_checked_whole(
    tmp_path: Path, checked: dict[str, Sequence[str]], lost: bool
) -> None:
    """Its last start may have failed for the model; so is a run without the record of its start."""
    plan = resumed(tmp_path, phase="train" if lost else "before")
    if lost:
        plan.directory.processes.unlink()
    await check_members(plan)
    assert all(MODEL in checked[name] for name in ("trainer", "prefill", "decode"))
