"""`forge plot`: the drawn steps, and errors for files without steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from forge.cli.local_run.plot import (
    PANELS,
    Curve,
    Measured,
    curves,
    draw,
    labels,
    measured,
    read_evaluations,
    read_steps,
    smoothed,
)
from forge.cli.main import app
from forge.core.errors import InvalidArgument, NotFound

REWARD, STALENESS = PANELS[0], PANELS[2]


def step(number: int, **rewards: float) -> dict[str, Any]:
    """Metrics of a step, as the trainer writes them."""
    domains = {
        name: {"mean_reward": reward, "entropy": 0.5} for name, reward in sorted(rewards.items())
    }
    return {
        "step": number,
        "weight_version": number + 1,
        "mean_reward": sum(rewards.values()) / len(rewards),
        "entropy": 0.5,
        "staleness_mean": 2.0,
        "logprob_gap_mean": 0.01,
        "merge_ratio": 8.0,
        "step_s": 1.0,
        "wait_s": 0.5,
        "domains": domains,
    }


def evaluation(number: int, versions: tuple[int, int], **rewards: float) -> dict[str, Any]:
    """An evaluation, as the trainer writes it."""
    domains = {name: {"mean_reward": reward} for name, reward in rewards.items()}
    told = {"min_weight_version": versions[0], "max_weight_version": versions[1]}
    return {"evaluation": {"step": number, "mean_reward": 0.5, "domains": domains} | told}


def with_interval(line: dict[str, Any], low: float, high: float) -> dict[str, Any]:
    """An evaluation whose domains have confidence intervals."""
    for domain in line["evaluation"]["domains"].values():
        domain |= {"mean_reward_low": low, "mean_reward_high": high}
    return line


def write(directory: Path, *steps: dict[str, Any]) -> Path:
    directory.mkdir()
    lines = "".join(json.dumps(one) + "\n" for one in steps)
    (directory / "metrics.jsonl").write_text(lines)
    return directory


def test_plot_uses_the_last_attempt_of_a_step(tmp_path: Path) -> None:
    """A run resumed from a checkpoint has some steps twice."""
    run = write(tmp_path / "run", step(1, qa=0.1), step(2, qa=0.2), step(2, qa=0.9), step(3, qa=1))
    assert [one["mean_reward"] for one in read_steps(run)] == [0.1, 0.9, 1]
    assert read_steps(run / "metrics.jsonl") == read_steps(run)


def test_plot_has_a_line_per_domain_or_per_run(tmp_path: Path) -> None:
    """A domain without rollouts in a batch has no value at that step, not zero."""
    steps = [step(1, qa=0.5, code=0.0), step(2, qa=1.0)]
    assert curves(REWARD, {"a": steps}) == [
        Curve(label="code", steps=[1], values=[0.0]),
        Curve(label="qa", steps=[1, 2], values=[0.5, 1.0]),
    ]
    assert curves(STALENESS, {"a": steps}) == [Curve(label="a", steps=[1, 2], values=[2.0, 2.0])]
    both = curves(REWARD, {"a": steps, "b": steps[:1]})
    assert [(line.label, line.values) for line in both] == [("a", [0.25, 1.0]), ("b", [0.25])]


def test_evaluations_are_drawn_over_the_steps_whose_weights_sampled(tmp_path: Path) -> None:
    """Of each domain of one run, or of each of several runs; none is drawn as a step. They end in
    any order, and of two of a step, after a restore, the last one counts. Weights published again
    as version 8 are those of step 2, and a version without samples is not drawn."""
    run = write(
        tmp_path / "run",
        step(1, qa=0.1),
        evaluation(2, (3, 8), qa=0.5),
        step(2, qa=0.2),
        step(3, qa=0.2) | {"weight_version": 9},
        evaluation(0, (1, 2), qa=0.25, code=0.75),
        with_interval(evaluation(2, (3, 8), qa=0.75), 0.5, 0.875),
        evaluation(3, (-1, -1), qa=0.0),
    )
    steps, found = read_steps(run), read_evaluations(run)
    assert [one["step"] for one in steps] == [1, 2, 3]
    assert [one["step"] for one in found] == [0, 2, 3]
    assert measured(REWARD, {"a": (steps, found)}) == [
        Measured(label="code", spans=[(0, 1, 0.75)], intervals=[None]),
        Measured(label="qa", spans=[(0, 1, 0.25), (2, 2, 0.75)], intervals=[None, (0.5, 0.875)]),
    ]
    assert measured(REWARD, {"a": (steps, found), "b": (steps, [])}) == [
        Measured(label="a", spans=[(0, 1, 0.5), (2, 2, 0.5)], intervals=[None, None])
    ]
    assert measured(STALENESS, {"a": (steps, found)}) == []
    assert read_evaluations(write(tmp_path / "other", step(1, qa=0.1))) == []
    plain, marked = tmp_path / "plain.svg", tmp_path / "marked.svg"
    draw([tmp_path / "other"], plain)
    draw([run], marked)
    # Words are drawn as glyphs; what stands in the file is what they were.
    assert "held-out" in marked.read_text() and "held-out" not in plain.read_text()


def test_moving_average_starts_at_the_first_step() -> None:
    """Not at zero."""
    assert smoothed([4.0, 4.0, 8.0]) == [4.0, 4.0, 5.0]
    assert smoothed([]) == []


def test_plot_names_the_domains(tmp_path: Path) -> None:
    """SVG has titles as text."""
    run = write(tmp_path / "run", step(1, qa=-0.5, code=0.0), step(2, qa=1.0, code=0.5))
    out = tmp_path / "curves.svg"
    draw([run], out)
    assert out.read_text().lstrip().startswith("<?xml")
    # The second line of a panel's legend stands for the second domain.
    assert out.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        ("", "has no step yet"),
        ("{}\n", ":1 is not the metrics of a step"),
        ('{"step": 1}\n', ":1 is not the metrics of a step"),
        ('{"evaluation": {"step": 1}}\n', ":1 is not the metrics of a step"),
        ("[1]\n", ":1 is not the metrics of a step"),
        (json.dumps(step(1, qa=0.5)) + "\nnonsense\n", ":2 is not the metrics of a step"),
    ],
)
def test_files_without_steps_are_named(tmp_path: Path, content: str | None, said: str) -> None:
    """One line: the file and the problem."""
    file = tmp_path / "metrics.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises((NotFound, InvalidArgument), match=said):
        read_steps(file)


def test_binary_metrics_file_is_named(tmp_path: Path) -> None:
    """For example a picture in place of the metrics."""
    file = tmp_path / "curves.png"
    file.write_bytes(b"\x89PNG\xff")
    with pytest.raises(InvalidArgument, match=r"curves\.png cannot be read"):
        read_steps(file)


def test_runs_of_one_name_have_different_labels(tmp_path: Path) -> None:
    """Seeds of two roots have directories of one name, and all metrics files have."""
    runs = [tmp_path / root / "tiny-seed0-1" for root in ("a", "b")]
    for run in runs:
        run.parent.mkdir()
        write(run, step(1, qa=0.5))
    assert labels(runs) == ["a/tiny-seed0-1", "b/tiny-seed0-1"]
    assert labels(runs[:1]) == ["tiny-seed0-1"]
    assert labels([runs[0] / "metrics.jsonl"]) == ["tiny-seed0-1"]
    out = tmp_path / "both.svg"
    draw([run / "metrics.jsonl" for run in runs], out)
    assert out.exists()


def test_unknown_plot_format_is_refused(tmp_path: Path) -> None:
    """The command ends with 2 and names the flag."""
    run = write(tmp_path / "run", step(1, qa=0.5))
    result = CliRunner().invoke(app, ["plot", str(run), "--out", str(tmp_path / "curves.txt4")])
    assert result.exit_code == 2
    assert "--out" in result.stderr and "txt4" in result.stderr


def test_plot_of_a_run_is_written_into_the_run(tmp_path: Path) -> None:
    """Without --out the command writes beside the metrics, and prints the path."""
    run = write(tmp_path / "run", step(1, qa=0.5))
    result = CliRunner().invoke(app, ["plot", str(run)])
    assert result.exit_code == 0
    assert (run / "curves.svg").exists()
    assert "curves.svg" in result.stdout


def test_comparison_of_runs_keeps_the_picture_of_each(tmp_path: Path) -> None:
    """It has a file of its own, in the directory of the first run."""
    runs = [write(tmp_path / name, step(1, qa=0.5)) for name in ("a", "b")]
    assert CliRunner().invoke(app, ["plot", str(runs[0])]).exit_code == 0
    own = (runs[0] / "curves.svg").read_bytes()
    result = CliRunner().invoke(app, ["plot", *map(str, runs)])
    assert result.output.strip() == str(runs[0] / "comparison.svg")
    assert (runs[0] / "curves.svg").read_bytes() == own


def test_error_of_a_picture_without_a_code_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Libraries of pictures raise OSError with a text alone."""
    monkeypatch.setattr(Figure, "savefig", Mock(side_effect=OSError("encoder error -2")))
    run = write(tmp_path / "run", step(1, qa=0.5))
    with pytest.raises(InvalidArgument, match=r"x\.png: encoder error -2"):
        draw([run], tmp_path / "x.png")
