"""The pure parts of `forge run`: presets, tasks, run directories, results."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forge.cli.connection import of_run
from forge.cli.local_run import stack
from forge.cli.local_run.campaign import Campaign, CampaignResult, Evaluation, evaluation
from forge.cli.local_run.dataset import held_out_tasks, interleave, training_tasks
from forge.cli.local_run.display import RunDisplay, result_table, sparkline
from forge.cli.local_run.presets import PRESETS, merged, parse_overrides, preset_for
from forge.cli.local_run.run_options import RunOptions
from forge.cli.local_run.training_run import device_settings, open_run, run_settings, running
from forge.cli.rundir import RunDirectory, RunState, choose_run_directory
from forge.client.operator import DomainResult, domain_results
from forge.core.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from forge.core.queue.admission import Mode
from forge.runtime.settings import load
from forge.v1 import common_pb2 as pb
from forge.v1 import scheduler_pb2
from services.scheduler.config import SchedulerConfig

STATE = RunState(model="tiny", model_path="/models/tiny", seed=0, steps=3)


def test_stopped_run_is_refused_with_the_command_to_start_it(tmp_path: Path) -> None:
    """Its etcd ended with it and is not contacted."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    (directory.path / "etcd.endpoints").write_text("127.0.0.1:1\n")
    with pytest.raises(FailedPrecondition, match=rf"`forge up --run-dir {directory.path}` starts"):
        of_run(directory.path)
    with directory.locked():
        assert of_run(directory.path).etcd == "127.0.0.1:1"


def test_run_without_etcd_yet_is_being_started(tmp_path: Path) -> None:
    """The first start makes weights for minutes; the directory is that of a run all the same."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    with directory.locked(), pytest.raises(FailedPrecondition, match="is being started"):
        of_run(directory.path)
    with pytest.raises(NotFound, match="is not a run directory"):
        of_run(directory.path)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_shares_sum_to_one_and_a_batch_fits_the_window(name: str) -> None:
    """A batch larger than W = 0.3 N could never be taken."""
    preset = PRESETS[name]
    assert sum(preset.domains.values()) == pytest.approx(1.0)
    assert preset.groups_per_step <= 0.3 * preset.concurrency + 1


@pytest.mark.parametrize("mode", [None, *(mode.value for mode in Mode)])
def test_run_in_any_mode_sets_no_setting_that_the_mode_ignores(mode: str | None) -> None:
    """`--set scheduler.queue.mode=adaptive` is enough: the preset's shares are then left out."""
    found = run_settings(STATE, PRESETS["tiny"], mode)["scheduler"]
    assert bool(found["queue.domain_shares"]) == (mode not in ("fifo", "adaptive"))
    settings = {**found, **({"queue.mode": mode} if mode else {})}
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    load(SchedulerConfig, service="scheduler", argv=argv, environ={})


def test_device_of_a_run_is_that_of_its_trainer_and_workers() -> None:
    """On a GPU the trainer computes and publishes in bfloat16 where the GPU is good at it."""
    assert device_settings("cpu") == {}
    of_run = device_settings("cuda:0")
    assert {name: settings["device"] for name, settings in of_run.items()} == dict.fromkeys(
        ("trainer", "prefill", "decode"), "cuda:0"
    )
    assert of_run["trainer"]["autocast"] == of_run["trainer"]["publish_dtype"] == "auto"


def test_overrides_name_service_and_key() -> None:
    """`--set` words become settings; later layers override key by key."""
    words = ["trainer.optimizer.learning-rate=1e-4", "pool.shard=a=b"]
    settings = parse_overrides(words)
    assert settings == {"trainer": {"optimizer.learning_rate": "1e-4"}, "pool": {"shard": "a=b"}}
    assert merged({"trainer": {"optimizer.learning_rate": "1", "seed": "2"}}, settings)[
        "trainer"
    ] == {
        "optimizer.learning_rate": "1e-4",
        "seed": "2",
    }


@pytest.mark.parametrize("word", ["trainer", "trainer.x", "=1", "trainer=1", ".x=1", "a.=1"])
def test_override_without_service_or_key_is_refused(word: str) -> None:
    """The error shows the word and an example."""
    with pytest.raises(InvalidArgument, match=r"service\.key=value"):
        parse_overrides([word])


@given(st.lists(st.integers(1, 10), min_size=1, max_size=6), st.integers(1, 200))
def test_interleaving_keeps_every_prefix_within_one_of_its_shares(
    weights: list[int], count: int
) -> None:
    """After n tasks each domain has had its share of n, to within one round."""
    shares = {f"d{i}": weight / sum(weights) for i, weight in enumerate(weights)}
    names = list(islice(interleave(shares), count))
    for name, share in shares.items():
        assert abs(names.count(name) - share * count) < len(shares)


def test_tasks_depend_on_seed_and_index_alone() -> None:
    """A resumed run submits the same tasks; held-out ones differ from trained ones."""
    shares = preset_for("tiny").domains
    first = list(islice(training_tasks(shares, seed=3, group_size=4), 8))
    again = list(islice(training_tasks(shares, seed=3, group_size=4), 8))
    assert first == again
    assert {task.domain for task in first} == set(shares)
    held_out = held_out_tasks(shares, seed=3, count=2, attempts=1, tag="eval")
    assert all(task.purpose == pb.PURPOSE_EVAL for task in held_out)
    assert not {t.payload_json for t in held_out} & {t.payload_json for t in first}


def test_run_directory_keeps_its_phase(tmp_path: Path) -> None:
    """A saved state is loaded unchanged; `enter` changes only the phase."""
    directory = RunDirectory(tmp_path / "run")
    assert directory.load() is None
    directory.create()
    directory.save(STATE)
    directory.enter("train")
    loaded = directory.load()
    assert loaded is not None and (loaded.phase, loaded.steps) == ("train", 3)


@pytest.mark.parametrize(
    ("given", "differences"),
    [
        ({"model": "smollm2"}, "--model tiny, not smollm2: omit --model"),
        ({"seed": 4}, "--seed 3, not 4: omit --seed"),
        ({"seed": 0}, "--seed 3, not 0: omit --seed"),
        (
            {"model": "smollm2", "seed": 4},
            "--model tiny, not smollm2 and --seed 3, not 4: omit --model and --seed",
        ),
    ],
)
async def test_run_directory_of_another_model_or_seed_is_refused(
    tmp_path: Path, given: dict[str, Any], differences: str
) -> None:
    """The run would continue with its own model and seed, against the command line."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.save(replace(STATE, seed=3))
    options = RunOptions(root=tmp_path, run_dir=directory.path, **given)
    with pytest.raises(InvalidArgument) as refused:
        await open_run(options, directory)
    assert str(refused.value) == (
        f"{directory.path} is a run with {differences} to resume it, or name another directory "
        "with --run-dir"
    )
    assert directory.load() == replace(STATE, seed=3)


@pytest.mark.parametrize(
    "given", [{}, {"model": "tiny", "seed": 3}, {"model": "{tmp}/tiny", "steps": 9}]
)
async def test_run_directory_resumes_with_its_own_model_and_seed(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    """Options that are absent or the same; other options may differ from start to start."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    saved = replace(STATE, seed=3, model_path=str(tmp_path / "tiny"))
    directory.save(saved)
    if "model" in given:
        given = given | {"model": given["model"].format(tmp=tmp_path)}
    options = RunOptions(root=tmp_path, run_dir=directory.path, **given)
    steps = given.get("steps", saved.steps)
    assert await open_run(options, directory) == replace(saved, steps=steps)


def test_foreign_state_file_is_refused_by_name(tmp_path: Path) -> None:
    """It is not overwritten."""
    (tmp_path / "run.json").write_text('{"colour": "red"}')
    with pytest.raises(InvalidArgument, match=r"run\.json"):
        RunDirectory(tmp_path).load()


def test_unfinished_run_is_chosen_before_a_new_one(tmp_path: Path) -> None:
    """The same command resumes; after the end it starts a new run beside the old one."""
    first = choose_run_directory(tmp_path, model="tiny", seed=0)
    first.create()
    first.save(STATE)
    assert choose_run_directory(tmp_path, model="tiny", seed=0).path == first.path
    first.enter("done")
    assert choose_run_directory(tmp_path, model="tiny", seed=0).path != first.path
    assert choose_run_directory(tmp_path, model="tiny", seed=1).path != first.path


def test_second_start_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    """Two runs in one directory would mix their data."""
    directory = RunDirectory(tmp_path / "run")
    with (
        directory.locked(),
        pytest.raises(FailedPrecondition, match="in use"),
        RunDirectory(tmp_path / "run").locked(),
    ):
        pass


def scored(domain: str, *outcomes: float, group_size: int) -> scheduler_pb2.BatchGroup:
    group = scheduler_pb2.BatchGroup()
    group.group.task.domain = domain
    group.group.task.group_size = group_size
    for value in outcomes:
        trajectory = group.trajectories.add(state=pb.TRAJECTORY_STATE_SEALED)
        trajectory.rewards.add(kind=pb.REWARD_KIND_OUTCOME, value=value)
        trajectory.rewards.add(kind=pb.REWARD_KIND_SPEED, value=0.5)
    return group


def test_evaluation_counts_failed_attempts_as_zero() -> None:
    """Only outcomes are averaged, and a failed rollout is not left out."""
    groups = [scored("a", 1.0, group_size=2), scored("b", 1.0, 0.5, group_size=2)]
    found = evaluation(domain_results(groups), "eval")
    assert found.by_domain == {"a": 0.5, "b": 0.75}
    assert (found.overall, found.attempts, found.failed) == (0.625, 4, 1)


def test_evaluation_without_results_is_an_error() -> None:
    """A run whose agents all failed must not look like a model that scores 0."""
    with pytest.raises(Unavailable, match="runner's log"):
        evaluation(domain_results([scored("a", group_size=2)]), "eval")


def measured(**outcomes: Sequence[float]) -> Evaluation:
    """One attempt at each task."""
    values = [value for own in outcomes.values() for value in own]
    return Evaluation(
        by_domain={name: fmean(own) for name, own in outcomes.items()},
        overall=fmean(values),
        attempts=len(values),
        failed=0,
        by_task={
            name: {f"{name}-{number}": value for number, value in enumerate(own)}
            for name, own in outcomes.items()
        },
    )


def table_rows(before: Evaluation, after: Evaluation) -> dict[str, list[str]]:
    """The words of each row, by its first, as an 80 column terminal shows them."""
    console = Console(width=80, file=StringIO())
    console.print(result_table(CampaignResult(before=before, after=after, weight_version=4)))
    assert isinstance(console.file, StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = [[word for word in line.split() if word not in "│┃"] for line in lines]
    return {line[0]: line[1:] for line in words if line}


def test_result_table_shows_each_domain_and_the_mean() -> None:
    """Before, after and change with its 95 % interval and the tasks it rests on; the mean over all
    attempts last."""
    before = measured(qa=[0.0, 0.5] * 12, code=[0.5] * 24)
    after = measured(qa=[0.5, 1.0] * 12, code=[0.5] * 24)
    rows = table_rows(before, after)
    order = [name for name in rows if name in ("code", "qa", "all")]
    assert order == ["code", "qa", "all"]
    assert rows["qa"][:3] == ["0.250", "0.750", "+0.500"] and rows["qa"][-1] == "24"
    assert rows["all"][:3] == ["0.375", "0.625", "+0.250"] and rows["all"][-1] == "48"
    for name, change in (("qa", 0.5), ("code", 0.0), ("all", 0.25)):
        low, to, high = rows[name][3:6]
        assert to == "to" and float(low) < change < float(high), name


def test_change_between_different_tasks_has_no_interval() -> None:
    """A run of an earlier version measured other tasks: its change has no interval."""
    before, after = measured(qa=[0.0] * 4, code=[0.5] * 4), measured(qa=[1.0] * 4, code=[0.5] * 5)
    rows = table_rows(before, after)
    assert rows["code"] == ["0.500", "0.500", "+0.000", "-", "-"]
    assert rows["all"][-2:] == ["-", "-"] and rows["qa"][-1] == "4"


def test_interval_of_a_change_pairs_equal_tasks() -> None:
    """If all tasks rise equally it is narrow, however different the tasks are."""
    outcomes = [number / 24 for number in range(12)]
    before = measured(qa=outcomes)
    steady = measured(qa=[value + 0.5 for value in outcomes])
    mixed = measured(qa=[value + 0.5 for value in reversed(outcomes)])
    widths = []
    for after in (steady, mixed):
        low, _, high = table_rows(before, after)["qa"][3:6]
        widths.append(float(high) - float(low))
    assert widths[0] < 0.8 * widths[1]


async def test_resumed_run_repeats_no_evaluation_before_training(tmp_path: Path) -> None:
    """The starting weights no longer exist. The earlier measurement counts, also of other tasks."""
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    directory.save(replace(STATE, phase="train"))
    groups = [scored("qa", 1.0, group_size=1)]
    groups[0].group.task.task_id = "eval-before-qa-0000"

    class Stop(Exception):
        pass

    class Recorded:
        async def results(self, tag: str) -> list[DomainResult]:
            assert tag == "eval-before"
            return domain_results(groups)

        async def submit(self, tasks: object) -> int:
            raise AssertionError("a task was submitted")

    class Looking(Campaign):
        async def _train(self) -> None:
            raise Stop

    recorded: Any = Recorded()
    campaign = Looking(
        operator=recorded,
        observer=recorded,
        directory=directory,
        preset=preset_for("tiny"),
        seed=0,
        on_progress=lambda progress: None,
    )
    with pytest.raises(Stop):
        await campaign.run()
    found = await campaign._ended("eval-before")
    assert found is not None and found.by_task == {"qa": {"qa-0000": 1.0}}


def test_sparkline_spans_zero_to_one() -> None:
    """Rewards between 0 and 1 are comparable across domains; others widen the scale."""
    assert sparkline([0.0, 1.0]) == "▁█"
    assert sparkline([0.0, 2.0, 1.0]) == "▁█▅"


async def test_own_etcd_that_cannot_start_ends_the_run_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is immediate and has the cause; the warning about disk space comes before."""
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\necho no space left on device >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setattr(stack, "etcd_binary", lambda: str(program))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=23 << 20))
    plan = stack.StackPlan(directory=RunDirectory(tmp_path / "run"), model_path="", cluster="c")
    console = Console(file=StringIO(), width=200)
    with pytest.raises(Unavailable, match=r"^etcd cannot start: no space left on device; see "):
        async with running(plan, RunDisplay(console, total_steps=1)):
            raise AssertionError("it did start")
    assert isinstance(console.file, StringIO)
    assert "0.0 GiB free" in console.file.getvalue()
