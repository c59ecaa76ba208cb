"""The results of the scaffold report: their file, their table and their picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.table import Table

from benchmarks.support.scaffolds.cell import CONDITIONS, HELD_OUT, SCAFFOLDS, Cell, Measured


def append(path: Path, lines: Iterable[Measured]) -> None:
    """Adds the lines of one cell with one write: an interrupted cell leaves none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(asdict(line)) + "\n" for line in lines)
    with path.open("a") as file:
        file.write(text)


def read(path: Path) -> list[Measured]:
    """Returns all lines; none without a file."""
    if not path.exists():
        return []
    return [Measured(**json.loads(line)) for line in path.read_text().splitlines()]


def finished(path: Path, cell: Cell) -> bool:
    """True if the file has the cell with these steps and through every scaffold."""
    found = {
        line.scaffold
        for line in read(path)
        if line.cell == cell.name and line.steps == cell.optimizer_steps
    }
    return found == set(SCAFFOLDS)


def by_condition(lines: Iterable[Measured], scaffold: str) -> dict[str, list[float]]:
    """Returns the mean outcomes of the seeds, in the order of the seeds, by condition."""
    found: dict[str, list[float]] = {condition: [] for condition in CONDITIONS}
    for line in sorted(lines, key=lambda line: line.seed):
        if line.scaffold == scaffold:
            found[line.condition].append(line.mean_outcome)
    return found


def numbers(lines: Sequence[Measured]) -> dict[str, float]:
    """Returns `<condition>.<scaffold>.mean`, `.min` and `.max` over the seeds."""
    flat: dict[str, float] = {}
    for scaffold in SCAFFOLDS:
        for condition, values in by_condition(lines, scaffold).items():
            if values:
                key = f"{condition.replace(' ', '_')}.{scaffold}"
                flat |= {
                    f"{key}.mean": statistics.mean(values),
                    f"{key}.min": min(values),
                    f"{key}.max": max(values),
                }
    return flat


def table(lines: Sequence[Measured]) -> Table:
    """Returns a row per scaffold, a column per condition: mean and range over the seeds."""
    shown = Table(title="Held-out mean outcome", title_justify="left", box=box.MARKDOWN)
    shown.add_column("measured through", no_wrap=True)
    for condition in CONDITIONS:
        shown.add_column(condition, justify="right", no_wrap=True)
    for scaffold in SCAFFOLDS:
        cells = [_mean_and_range(one) for one in by_condition(lines, scaffold).values()]
        shown.add_row(f"{scaffold} (never trained)" if scaffold == HELD_OUT else scaffold, *cells)
    return shown


def _mean_and_range(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def draw(lines: Sequence[Measured], path: Path) -> None:
    """Draws the means, the seeds as points, into an SVG or PNG file."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    width = 0.8 / len(CONDITIONS)
    for number, condition in enumerate(CONDITIONS):
        found: Mapping[str, list[float]] = {
            scaffold: by_condition(lines, scaffold)[condition] for scaffold in SCAFFOLDS
        }
        places = [at + (number - 1) * width for at in range(len(SCAFFOLDS))]
        means = [statistics.mean(values) if values else 0.0 for values in found.values()]
        axes.bar(places, means, width * 0.9, label=condition, alpha=0.7)
        for place, values in zip(places, found.values(), strict=True):
            axes.plot([place] * len(values), values, "o", color="black", markersize=3)
    labels = [f"{name}\n(never trained)" if name == HELD_OUT else name for name in SCAFFOLDS]
    axes.set_xticks(range(len(SCAFFOLDS)), labels)
    axes.set_ylabel("held-out mean outcome")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
