"""`forge plot`: draws the curves of one or several runs in one picture.

Reads `metrics.jsonl` only, without a running system.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.cli.rundir import RunDirectory
from forge.core.errors import InvalidArgument, NotFound
from forge.core.extras import extras_named

SMOOTHING = 0.25
"""Weight of the newest step in the moving average, drawn over the single steps."""

Step = Mapping[str, Any]
Evaluation = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a panel."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One quantity over optimizer steps."""

    title: str
    value: Callable[[Step], float]
    of_domain: str = ""
    """The value's name in a domain's metrics; "" if only complete steps have it."""
    of_evaluation: str = ""
    """The value's name in evaluations and their domains; "" if evaluations lack it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Evaluations of one domain, or of one run."""

    label: str
    spans: Sequence[tuple[int, int, float]]
    """First and last step of the sampling weights, and the value."""
    intervals: Sequence[tuple[float, float] | None] = ()
    """95 % confidence interval of each value; None in records of earlier versions."""


PANELS = (
    Panel(
        title="reward",
        value=lambda step: step["mean_reward"],
        of_domain="mean_reward",
        of_evaluation="mean_reward",
    ),
    Panel(title="entropy (nats)", value=lambda step: step["entropy"], of_domain="entropy"),
    Panel(title="staleness (versions)", value=lambda step: step["staleness_mean"]),
    Panel(title="log-prob gap", value=lambda step: step["logprob_gap_mean"]),
    Panel(title="tokens merged into one", value=lambda step: step["merge_ratio"]),
    Panel(
        title="seconds a step, waiting included", value=lambda step: step["step_s"] + step["wait_s"]
    ),
)


def read_steps(path: Path) -> list[Step]:
    """Returns the steps of a run directory or metrics file, in order; of a repeated step, the last
    record. Raises `NotFound` without a file, `InvalidArgument` for a file without valid steps."""
    steps, _ = _read(path)
    if not steps:
        raise InvalidArgument(f"{_file_of(path)} has no step yet")
    return [steps[number] for number in sorted(steps)]


def read_evaluations(path: Path) -> list[Evaluation]:
    """Returns the evaluations of a run directory or metrics file, by step, possibly none. Raises
    the errors of `read_steps`."""
    _, evaluations = _read(path)
    return [evaluations[number] for number in sorted(evaluations)]


def _file_of(path: Path) -> Path:
    return RunDirectory(path).metrics_file if path.is_dir() else path


def _read(path: Path) -> tuple[dict[int, Step], dict[int, Evaluation]]:
    """Returns steps and evaluations by step; later records replace earlier ones."""
    file = _file_of(path)
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        raise NotFound(f"{file} does not exist; name a run's directory") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{file} cannot be read: {error}") from None
    steps: dict[int, Step] = {}
    evaluations: dict[int, Evaluation] = {}
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if evaluation := entry.get("evaluation"):
                _check_evaluation(evaluation)
                evaluations[evaluation["step"]] = evaluation
            else:
                _check(entry)
                steps[entry["step"]] = entry
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InvalidArgument(f"{file}:{number} is not the metrics of a step") from None
    return steps, evaluations


def _check(step: Step) -> None:
    """Raises KeyError or TypeError for an invalid step."""
    for panel in PANELS:
        panel.value(step)
        for domain in step["domains"].values() if panel.of_domain else ():
            float(domain[panel.of_domain])


def _check_evaluation(evaluation: Evaluation) -> None:
    """Raises KeyError or TypeError for an invalid evaluation."""
    int(evaluation["min_weight_version"]), int(evaluation["max_weight_version"])
    for panel in PANELS:
        for part in (evaluation, *evaluation["domains"].values()) if panel.of_evaluation else ():
            float(part[panel.of_evaluation])


def labels(paths: Sequence[Path]) -> list[str]:
    """Returns a label per run: the shortest end of its path that is unique."""
    metrics = RunDirectory(Path()).metrics_file.name
    places = [path.resolve() for path in paths]
    places = [place.parent if place.name == metrics else place for place in places]
    if len({place.name for place in places}) == len(places):
        return [place.name for place in places]
    common = os.path.commonpath([place.parent for place in places])
    return [str(place.relative_to(common)) for place in places]


def curves(panel: Panel, runs: Mapping[str, Sequence[Step]]) -> list[Curve]:
    """Returns a line for each domain of one run, or for each of several runs."""
    if len(runs) > 1 or not panel.of_domain:
        return [
            Curve(
                label=name,
                steps=[step["step"] for step in steps],
                values=[panel.value(step) for step in steps],
            )
            for name, steps in runs.items()
        ]
    (steps,) = runs.values()
    domains = sorted({name for step in steps for name in step["domains"]})
    lines = []
    for name in domains:
        own = {step["step"]: step["domains"][name] for step in steps if name in step["domains"]}
        values = [one[panel.of_domain] for one in own.values()]
        lines.append(Curve(label=name, steps=list(own), values=values))
    return lines


def measured(
    panel: Panel, runs: Mapping[str, tuple[Sequence[Step], Sequence[Evaluation]]]
) -> list[Measured]:
    """Returns the evaluations in a panel, with the labels of `curves`; skips evaluations without
    sampled tokens."""
    if not panel.of_evaluation:
        return []
    found: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
    intervals: dict[str, list[tuple[float, float] | None]] = defaultdict(list)
    for run, (steps, evaluations) in runs.items():
        for one in evaluations:
            if one["max_weight_version"] < 0:
                continue
            span = (
                _step_of(one["min_weight_version"], steps),
                _step_of(one["max_weight_version"], steps),
            )
            parts = {run: one} if len(runs) > 1 else one["domains"]
            for label, part in parts.items():
                found[label].append((*span, part[panel.of_evaluation]))
                intervals[label].append(_interval(part, panel.of_evaluation))
    return [
        Measured(label=label, spans=found[label], intervals=intervals[label])
        for label in sorted(found)
    ]


def _interval(part: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    low, high = part.get(f"{name}_low", 0.0), part.get(f"{name}_high", 0.0)
    return (low, high) if low < high else None


def _step_of(weight_version: int, steps: Sequence[Step]) -> int:
    """Returns the step of a weight version; 0 for the starting weights."""
    before = bisect_right([step["weight_version"] for step in steps], weight_version)
    return steps[before - 1]["step"] if before else 0


def smoothed(values: Sequence[float]) -> list[float]:
    """Returns the exponential moving average, as long as `values`."""
    averages: list[float] = []
    for value in values:
        before = averages[-1] if averages else value
        averages.append(before + SMOOTHING * (value - before))
    return averages


def draw(paths: Sequence[Path], out: Path) -> None:
    """Writes the picture in the format of `out`'s suffix. Raises `ConfigError` without
    matplotlib, `NotFound` or `InvalidArgument` for files that cannot be read or written."""
    names = labels(paths)
    runs = dict(zip(names, map(read_steps, paths), strict=True))
    evaluated = dict(zip(names, map(read_evaluations, paths), strict=True))
    with extras_named():
        import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained", sharex=True)
    for axes, panel in zip(rows.flat, PANELS, strict=True):
        _draw_panel(axes, panel, runs, evaluated)
    for axes in rows[-1]:
        axes.set_xlabel("optimizer step")
    figure.suptitle(", ".join(runs), fontsize=11)
    try:
        figure.savefig(out)
    except (OSError, ValueError) as error:
        # Pillow's have no code.
        reason = getattr(error, "strerror", None) or error
        raise InvalidArgument(f"--out {out}: {reason}") from error
    finally:
        pyplot.close(figure)


def _draw_panel(
    axes: Any,
    panel: Panel,
    runs: Mapping[str, Sequence[Step]],
    evaluated: Mapping[str, Sequence[Evaluation]],
) -> None:
    lines = curves(panel, runs)
    for index, line in enumerate(lines):
        axes.plot(line.steps, line.values, color=f"C{index}", alpha=0.25, linewidth=0.8)
        axes.plot(line.steps, smoothed(line.values), color=f"C{index}", label=line.label)
    colors = {line.label: f"C{index}" for index, line in enumerate(lines)}
    held_out = measured(panel, {name: (runs[name], evaluated[name]) for name in runs})
    for each in held_out:
        # A domain with evaluations only has no line, but a color.
        label = None if each.label in colors else f"{each.label} (held-out)"
        color = colors.setdefault(each.label, f"C{len(colors)}")
        first, last, values = zip(*each.spans, strict=True)
        middle = [(a + b) / 2 for a, b in zip(first, last, strict=True)]
        axes.hlines(values, first, last, color=color)
        for at, ends in zip(middle, each.intervals, strict=True):
            if ends is not None:
                axes.vlines(at, *ends, color=color, linewidth=0.8, alpha=0.6)
        axes.plot(middle, values, "D", color=color, markeredgecolor="k", label=label)
    axes.set_title(panel.title + " (diamonds: held-out, 95 %)" * bool(held_out), fontsize=10)
    drawn = [value for line in lines for value in line.values]
    drawn += [value for each in held_out for _, _, value in each.spans]
    axes.set_ylim(bottom=min(0.0, *drawn))
    if len(colors) > 1:
        axes.legend(fontsize=8)
