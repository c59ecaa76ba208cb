"""Training through several scaffolds, measured through another: `python -m benchmarks.scaffolds`.

    [--model tiny|smollm2] [--seeds N] [--steps N] [--tasks N] [--quick] [--json FILE]
    [--root DIR] [--plot FILE]

For each seed three cells: the starting weights, training through one scaffold, and training through
three with the same tasks, steps and rollouts. Each cell measures held-out tasks through all four;
no cell trains through the last one. docs/scaffolds.md has the scaffolds and the results.

Each finished cell is a few lines of ROOT/scaffolds/results.jsonl, and is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.support.report import arguments, keep, progress_bar
from benchmarks.support.scaffolds.cell import CONDITIONS, Cell, Measured, run_cell
from benchmarks.support.scaffolds.results import (
    append,
    draw,
    finished,
    numbers,
    read,
    table,
)
from forge.cli.local_run.presets import preset_for

QUICK_STEPS = 3
QUICK_TASKS = 8


def main() -> None:
    """Runs the cells that have no results yet; prints the table of all."""
    options = _options()
    folder = options.root / ("scaffolds-quick" if options.quick else "scaffolds")
    results = folder / "results.jsonl"
    cells = cells_of(options)
    with progress_bar() as progress:
        bar = progress.add_task("cells", total=len(cells))
        for cell in cells:
            if not finished(results, cell):
                append(results, _run(cell, options.root, folder, progress))
            progress.advance(bar)
    lines = [line for line in read(results) if line.cell in {cell.name for cell in cells}]
    Console().print(table(lines))
    if options.plot is not None:
        draw(lines, options.plot)
    keep(numbers(lines), options.json)


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Returns the cells, all conditions of a seed together."""
    steps = options.steps or preset_for(options.model).steps
    return [
        Cell(
            model=options.model,
            seed=seed,
            condition=condition,
            steps=QUICK_STEPS if options.quick else steps,
            eval_tasks=QUICK_TASKS if options.quick else options.tasks,
        )
        for seed in range(1 if options.quick else options.seeds)
        for condition in CONDITIONS
    ]


def _run(cell: Cell, root: Path, folder: Path, progress: Progress) -> list[Measured]:
    shown = progress.add_task(cell.name, total=None)

    def on_progress(phase: str, done: int, total: int) -> None:
        progress.update(shown, description=f"{cell.name}: {phase}", completed=done, total=total)

    lines = asyncio.run(run_cell(cell, root=root, folder=folder, on_progress=on_progress))
    progress.remove_task(shown)
    return lines


def _options() -> argparse.Namespace:
    parser = arguments(__doc__, quick="one seed, few steps and tasks")
    parser.add_argument("--model", default="tiny", choices=("tiny", "smollm2"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="optimizer steps; default: the preset's")
    parser.add_argument("--tasks", type=int, default=48, help="held-out tasks per domain")
    parser.add_argument("--root", type=Path, default=Path(".forge"), help="models and run data")
    parser.add_argument("--plot", type=Path, help="write a picture to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
