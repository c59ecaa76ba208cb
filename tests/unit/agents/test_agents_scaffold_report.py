"""The scaffold report: its tasks, its cells and its table."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest

from benchmarks.support.scaffolds.agents.text import calls_in
from benchmarks.support.scaffolds.cell import (
    CONDITIONS,
    HELD_OUT,
    SCAFFOLDS,
    Cell,
    Measured,
    eval_tasks,
    train_tasks,
)
from benchmarks.support.scaffolds.results import append, draw, finished, numbers, read, table

CELL = Cell(model="tiny", seed=1, condition="three scaffolds", steps=4, eval_tasks=3)
LINE = Measured(
    cell=CELL.name,
    model="tiny",
    seed=1,
    condition=CELL.condition,
    scaffold="text",
    steps=4,
    rollouts=9,
    failed=0,
    mean_outcome=0.25,
    by_domain={"qa": 0.25},
)


def test_no_condition_trains_through_the_held_out_scaffold() -> None:
    """It is measured in every cell."""
    assert all(HELD_OUT not in scaffolds for scaffolds in CONDITIONS.values())
    assert HELD_OUT in SCAFFOLDS
    assert {*CONDITIONS["three scaffolds"], HELD_OUT} == {*SCAFFOLDS}


def test_conditions_train_the_same_tasks() -> None:
    """Only their scaffolds differ, and those take turns in each domain."""
    one, three = (
        list(islice(train_tasks(replace(CELL, condition=condition)), 36))
        for condition in ("one scaffold", "three scaffolds")
    )
    assert [task.payload_json for task in one] == [task.payload_json for task in three]
    assert {task.scaffold for task in one} == {"blackbox"}
    for domain in CELL.preset.domains:
        turns = [task.scaffold for task in three if task.domain == domain]
        assert turns == list(islice(cycle(CONDITIONS["three scaffolds"]), len(turns)))


def test_scaffolds_are_measured_on_the_same_tasks() -> None:
    """With ids of their own, and none of them trained."""
    tasks = {scaffold: eval_tasks(CELL, scaffold) for scaffold in SCAFFOLDS}
    payloads = [[task.payload_json for task in of_one] for of_one in tasks.values()]
    assert all(one == payloads[0] for one in payloads)
    ids = [task.task_id for of_one in tasks.values() for task in of_one]
    assert len(set(ids)) == len(ids) == 4 * 3 * 3
    trained = {task.payload_json for task in islice(train_tasks(CELL), 200)}
    assert not trained & {*payloads[0]}


def test_a_cell_is_finished_once_every_scaffold_is_measured(tmp_path: Path) -> None:
    """With the same number of steps; the file has a line for each."""
    path = tmp_path / "runs" / "results.jsonl"
    assert not finished(path, CELL)
    append(path, [replace(LINE, scaffold=scaffold) for scaffold in SCAFFOLDS[1:]])
    assert not finished(path, CELL)
    append(path, [replace(LINE, scaffold=SCAFFOLDS[0])])
    assert finished(path, CELL)
    assert not finished(path, replace(CELL, steps=5))
    assert read(path)[0] == replace(LINE, scaffold=SCAFFOLDS[1])


def test_results_show_mean_and_range_of_the_seeds(tmp_path: Path) -> None:
    """As numbers, in the table and in the picture."""
    lines = [replace(LINE, seed=seed, mean_outcome=seed / 4) for seed in (0, 1, 3)]
    assert numbers(lines) == {
        "three_scaffolds.text.mean": pytest.approx(1 / 3),
        "three_scaffolds.text.min": 0.0,
        "three_scaffolds.text.max": 0.75,
    }
    (column,) = [one for one in table(lines).columns if one.header == "three scaffolds"]
    assert list(column.cells) == ["-", "-", "-", "0.333 (0.000 to 0.750)"]
    draw(lines, tmp_path / "picture.svg")
    assert "never trained" in (tmp_path / "picture.svg").read_text()


def test_text_agent_reads_calls_and_leaves_broken_ones() -> None:
    """As text of the answer."""
    good = '<tool_call>\n{"name": "find", "arguments": {"fact": "pet"}}\n</tool_call>'
    broken = ('<tool_call>{"name": "find"}</tool_call>', "<tool_call>{</tool_call>", "<tool_call>")
    assert calls_in("".join((*broken[:2], good, broken[2]))) == [
        ("call_2", "find", json.dumps({"fact": "pet"}))
    ]
