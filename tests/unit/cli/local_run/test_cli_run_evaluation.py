"""`forge run --eval-every-steps`: the trainer's settings and the display."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forge.cli.local_run import campaign as campaign_module
from forge.cli.local_run import training_run
from forge.cli.local_run.campaign import Campaign, Progress
from forge.cli.local_run.display import RunDisplay, evaluation_line, evaluations_table
from forge.cli.local_run.presets import preset_for
from forge.cli.local_run.run_options import RunOptions
from forge.cli.local_run.training_run import check_run, open_run, plan_of, preset_of
from forge.cli.rundir import RunDirectory
from forge.cli.status.system_state import trainer_status
from forge.client.task_files import read_tasks
from forge.core.errors import InvalidArgument, Unavailable
from forge.v1 import inference_pb2, scheduler_pb2
from forge.v1 import trainer_pb2 as pb
from services.trainer.evaluation import DEFAULTS

EVALUATION = pb.Evaluation(
    step=6,
    min_weight_version=7,
    max_weight_version=9,
    mean_reward=0.5,
    solved_share=0.25,
    rollouts=8,
    failed=1,
    skipped=2,
    domains={"qa": pb.DomainEvaluation(mean_reward=0.625)},
)


def options_of(root: Path, **changed: Any) -> RunOptions:
    return RunOptions(root=root, **changed)


async def test_trainer_gets_the_held_out_tasks_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file of the run, without the last weights, which the run measures itself. The command
    line overrides."""

    async def no_model(*_: Any, **__: Any) -> Path:
        return tmp_path / "model"

    monkeypatch.setattr(training_run, "ensure_model", no_model)
    directory = RunDirectory(tmp_path / "run")
    options = options_of(tmp_path, eval_every_steps=15, eval_tasks=3)
    state = await open_run(options, directory)
    preset = preset_of(options, state)
    settings = plan_of(options, directory, state, preset).settings["trainer"]
    assert {key: value for key, value in settings.items() if key.startswith("eval")} == {
        "evaluation.tasks": str(directory.eval_tasks),
        "evaluation.every_steps": "15",
        "evaluation.at_end": "false",
    }
    tasks = read_tasks(directory.eval_tasks, DEFAULTS)
    domains = preset_for("tiny").domains
    assert sorted(task.domain for task in tasks) == sorted([*domains] * 3)
    assert {task.group_size for task in tasks} == {preset.eval_attempts}

    at_end = ["trainer.evaluation.at_end=true"]
    own = options_of(tmp_path, eval_every_steps=15, overrides=at_end)
    assert plan_of(own, directory, state, preset).settings["trainer"]["evaluation.at_end"] == "true"
    plain = plan_of(options_of(tmp_path), directory, state, preset).settings["trainer"]
    assert not any(key.startswith("eval") for key in plain)


async def test_evaluation_interval_without_tasks_is_refused_at_start(
    tmp_path: Path,
) -> None:
    """With the trainer's message."""
    options = options_of(tmp_path, overrides=["trainer.evaluation.every_steps=5"])
    directory = RunDirectory(tmp_path / "run")
    with pytest.raises(
        InvalidArgument, match=r"evaluation\.every_steps = 5 is not allowed without"
    ):
        await check_run(options, directory)
    assert not directory.path.exists()


def test_evaluation_is_shown_once_in_one_line() -> None:
    """With the versions that sampled, and the numbers of failed and skipped ones."""
    console = Console(file=StringIO(), width=200)
    progress = Progress(phase="train", evaluations=[EVALUATION])
    with RunDisplay(console, total_steps=9) as display:
        display.update(progress)
        display.update(progress)
    assert isinstance(console.file, StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if "held-out after" in line]
    (line,) = lines
    assert line.partition("held-out ")[2] == (
        "after step 6  reward 0.50  (qa 0.62)  solved 0.25  by v7-9  8 attempts  1 given up  "
        "2 skipped before it"
    )


async def test_each_evaluation_is_recorded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the last one is waited for. For any number of polls; an unreachable trainer leaves the
    progress unchanged."""
    answers: list[Any] = [
        pb.GetTrainerStatusResponse(),
        pb.GetTrainerStatusResponse(latest_evaluation=EVALUATION),
        pb.GetTrainerStatusResponse(latest_evaluation=EVALUATION),
        Unavailable("restarting"),
        pb.GetTrainerStatusResponse(latest_evaluation=pb.Evaluation(step=12)),
    ]

    class Observer:
        async def scheduler_status(self) -> Any:
            return scheduler_pb2.GetSchedulerStatusResponse()

        async def inference_status(self) -> Any:
            return inference_pb2.GetInferenceStatusResponse()

        async def trainer_status(self) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    anything: Any = None
    observer: Any = Observer()
    campaign = Campaign(
        operator=anything,
        observer=observer,
        directory=anything,
        preset=anything,
        seed=0,
        on_progress=lambda progress: None,
    )
    while len(answers) > 1:
        await campaign._observe()
    assert [each.step for each in campaign.progress.evaluations] == [6]
    # The last one may end after the run's own measurement: the trainer must not stop before.
    monkeypatch.setattr(campaign_module, "POLL_S", 0.0)
    answers[:0] = [pb.GetTrainerStatusResponse(evaluating=True)] * 2
    await campaign._trainer_evaluated()
    assert not answers
    assert [each.step for each in campaign.progress.evaluations] == [6, 12]


def test_evaluation_table_has_a_row_per_evaluation() -> None:
    """Domains, the mean over all with its interval, if it has one, and the versions that sampled,
    within 80 columns."""
    rows: list[dict[str, Any]] = [
        {
            "step": step,
            "min_weight_version": 7,
            "max_weight_version": newest,
            "mean_reward": 0.5,
            "failed": 1,
            "domains": {
                name: {"mean_reward": 0.625} for name in ("code", "general", "qa", "reasoning")
            },
        }
        | interval
        for step, newest, interval in (
            (6, 7, {}),
            (12, 9, {"mean_reward_low": 0.375, "mean_reward_high": 0.625}),
        )
    ]
    console = Console(file=StringIO(), width=80)
    console.print(evaluations_table(rows))
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    shown = [line.replace("│", " ").split() for line in lines]
    rewards = ["0.62"] * 4 + ["0.50"]
    assert ["6", "v7", *rewards, "-", "1"] in shown
    assert ["12", "v7-9", *rewards, "0.38-0.62", "1"] in shown


def test_evaluation_line_has_its_interval() -> None:
    """Evaluations of an earlier trainer have none."""
    told = pb.Evaluation()
    told.CopyFrom(EVALUATION)
    assert "95 %" not in evaluation_line(told)
    told.mean_reward_low, told.mean_reward_high = 0.375, 0.625
    assert "reward 0.50  (qa 0.62)  95 % 0.38 to 0.62  solved 0.25" in evaluation_line(told)


async def test_status_lists_no_single_task_of_an_evaluation() -> None:
    """A file of thousands of tasks would hide the rest."""

    class Operator:
        async def trainer_status(self) -> pb.GetTrainerStatusResponse:
            own = pb.DomainEvaluation(mean_reward=0.625, task_outcomes={"31": 0.5})
            evaluation = pb.Evaluation(domains={"qa": own})
            return pb.GetTrainerStatusResponse(step=9, latest_evaluation=evaluation)

    operator: Any = Operator()
    shown = str(await trainer_status(operator))
    assert "mean_reward: 0.625" in shown and "31" not in shown
