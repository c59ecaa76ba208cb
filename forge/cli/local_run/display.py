"""The display of a run: a live panel on a terminal, otherwise one line per step.

Reads `Progress`; decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forge.cli.local_run.campaign import CampaignResult, Progress
from forge.cli.local_run.models.kept import MeasuredModel
from forge.cli.rundir import Phase, RunDirectory
from forge.cli.trouble import troubles
from forge.core.confidence_intervals import change_interval
from forge.runtime.process.child_processes import ProcessEvent
from forge.v1 import trainer_pb2

PHASES: Mapping[Phase, str] = {
    "before": "Measuring held-out tasks before training ...",
    "train": "Training ...",
    "after": "Measuring held-out tasks with the trained weights ...",
    "done": "Done.",
}
SPARKS = "▁▂▃▄▅▆▇█"


class RunDisplay(AbstractContextManager["RunDisplay"]):
    """Displays one run: redraws on a terminal, otherwise prints new lines."""

    def __init__(self, console: Console, *, total_steps: int) -> None:
        self._console = console
        self._total_steps = total_steps
        self._started = time.monotonic()
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )
        self._said_phase: Phase | None = None
        self._said_step = 0
        self._said_evaluations = 0
        self._said_troubles: set[str] = set()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str, *, style: str = "") -> None:
        """Prints one line that stays."""
        line = Text.assemble((self._elapsed(), "dim"), " ", (text, style))
        self._console.print(line, soft_wrap=True)

    def process_event(self, event: ProcessEvent) -> None:
        """Prints a failure of a child process; normal starts and stops are silent."""
        if event.kind in ("crashed", "gave_up", "killed"):
            self.say(event.line, style="yellow")

    def update(self, progress: Progress) -> None:
        """Displays the new parts of the progress."""
        if progress.phase != self._said_phase:
            self._said_phase = progress.phase
            self.say(PHASES[progress.phase])
        self._say_troubles(progress)
        if self._live:
            self._live.update(self._panel(progress))
        else:
            self._print_new_steps(progress)
        for evaluation in progress.evaluations[self._said_evaluations :]:
            self.say(evaluation_line(evaluation))
        self._said_evaluations = len(progress.evaluations)

    def _say_troubles(self, progress: Progress) -> None:
        """Prints each trouble once, and again after a return."""
        present = troubles(progress.scheduler)
        for name, text in present.items():
            if name not in self._said_troubles:
                self.say(text, style="yellow")
        self._said_troubles = set(present)

    def _print_new_steps(self, progress: Progress) -> None:
        for step in progress.steps:
            if step.step > self._said_step:
                self._said_step = step.step
                self.say(step_line(step, self._total_steps))

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._started)
        return f"{seconds // 60:2d}:{seconds % 60:02d}"

    def _panel(self, progress: Progress) -> RenderableType:
        rows: list[RenderableType] = [_bar(progress, self._total_steps)]
        if progress.steps:
            rows += ["", _domains(progress), "", _learning(progress)]
        rows += ["", _queue(progress)]
        rows += [Text(text, style="yellow") for text in troubles(progress.scheduler).values()]
        title = f"forge  {PHASES[progress.phase]}  {self._elapsed()}"
        return Panel(Group(*rows), title=title, title_align="left", padding=(0, 1))


def step_line(step: trainer_pb2.StepMetrics, total: int) -> str:
    """Returns one line about an optimizer step."""
    return (
        f"step {step.step:3d}/{total}  reward {step.mean_reward:.2f}  "
        f"({_figures(step.reward_by_domain)})  "
        f"v{step.weight_version}  staleness {step.staleness_mean:.1f}  "
        f"merge {step.merge_ratio:.1f}x  {step.step_s:.1f} s"
    )


def evaluation_line(evaluation: trainer_pb2.Evaluation) -> str:
    """Returns one line about an evaluation during training."""
    rewards = {name: domain.mean_reward for name, domain in evaluation.domains.items()}
    versions = _versions(evaluation.min_weight_version, evaluation.max_weight_version)
    left_out = f"  {evaluation.skipped} skipped before it" if evaluation.skipped else ""
    given_up = f"  {evaluation.failed} given up" if evaluation.failed else ""
    low, high = evaluation.mean_reward_low, evaluation.mean_reward_high
    # Evaluations of an earlier version have no interval.
    interval = f"95 % {low:.2f} to {high:.2f}  " if low < high else ""
    return (
        f"held-out after step {evaluation.step}  reward {evaluation.mean_reward:.2f}  "
        f"({_figures(rewards)})  {interval}solved {evaluation.solved_share:.2f}  by {versions}  "
        f"{evaluation.rollouts} attempts{given_up}{left_out}"
    )


def _figures(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in sorted(values.items()))


def _versions(oldest: int, newest: int) -> str:
    if newest < 0:
        return "none"
    return f"v{oldest}" if oldest == newest else f"v{oldest}-{newest}"


def evaluations_table(evaluations: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the table of the evaluations in a metrics file, by step."""
    # Four domains with their names fit in 80 columns.
    table = Table(title="Held-out mean reward while training", title_justify="left", pad_edge=False)
    domains = sorted({name for one in evaluations for name in one["domains"]})
    for column in ("step", "weights", *domains, "all", "95 %", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in evaluations:
        rewards = (one["domains"].get(name, {}).get("mean_reward", 0.0) for name in domains)
        table.add_row(
            str(one["step"]),
            _versions(one["min_weight_version"], one["max_weight_version"]),
            *(f"{reward:.2f}" for reward in (*rewards, one["mean_reward"])),
            _ends(one),
            str(one["failed"]),
        )
    return table


def _ends(one: Mapping[str, Any]) -> str:
    low, high = one.get("mean_reward_low", 0.0), one.get("mean_reward_high", 0.0)
    return f"{low:.2f}-{high:.2f}" if low < high else "-"


def result_table(result: CampaignResult, measured: MeasuredModel | None = None) -> Table:
    """Returns the table of mean outcomes before and after, with the confidence of the change. With
    `measured`, the title of the second column says if it is the kept model's."""
    after = "kept model" if measured and not measured.problem else "after"
    table = Table(title="Held-out mean reward (outcome)", title_justify="left")
    table.add_column("domain")
    for column in ("before", after, "change", "95 % interval", "tasks"):
        table.add_column(column, justify="right", no_wrap=True)
    names = sorted(result.before.by_domain)
    changes = {name: result.changes(name) for name in names}
    for name in names:
        means = result.before.by_domain[name], result.after.by_domain.get(name, 0.0)
        _add_row(table, name, *means, [changes[name]])
    table.add_section()
    # Without an interval for every domain there is none over all.
    strata = list(changes.values()) if all(changes.values()) else []
    _add_row(table, "all", result.before.overall, result.after.overall, strata)
    return table


def result_notes(
    result: CampaignResult, directory: RunDirectory, elapsed_s: float
) -> list[str | Text]:
    """Returns notes on the figures, and the paths of the files."""
    notes: list[str | Text] = [
        f"{result.after.attempts} held-out attempts each time; the second time sampled from "
        f"weight version {result.weight_version}, streamed to the running workers. Intervals are "
        "of the change, paired by task (docs/training.md, Confidence intervals).",
        f"Took {elapsed_s:.0f} s.  Data {directory.path}  "
        f"logs {directory.logs}  metrics {directory.metrics_file}",
    ]
    for label, measured in (("before", result.before), ("after", result.after)):
        if measured.failed:
            notes.append(
                Text(
                    f"{measured.failed} of {measured.attempts} attempts {label} training failed "
                    "and count as 0; see the runner's log.",
                    style="yellow",
                )
            )
    return notes


def kept_note(measured: MeasuredModel) -> str | Text:
    """Returns the path of the model that was measured after training."""
    if measured.problem:
        text = f"The kept model {measured.path} was not measured: {measured.problem}"
        return Text(text, style="red")
    return (
        f"Kept model {measured.path}: published from these files as weight version "
        f"{measured.weight_version}; digest equal to that of the weights served."
    )


def _add_row(
    table: Table, name: str, before: float, after: float, changes: Sequence[Sequence[float]]
) -> None:
    """`changes`: changes of the tasks, by domain."""
    change = after - before
    color = "green" if change > 0 else "red"
    interval = change_interval(changes)
    table.add_row(
        name,
        f"{before:.3f}",
        f"{after:.3f}",
        Text(f"{change:+.3f}", style=color),
        f"{interval.low:+.3f} to {interval.high:+.3f}" if interval else "-",
        str(sum(map(len, changes))) if interval else "-",
    )


def _bar(progress: Progress, total_steps: int) -> RenderableType:
    if progress.phase == "train":
        done, total, unit = (progress.steps[-1].step if progress.steps else 0), total_steps, "steps"
    else:
        done, total, unit = progress.evaluated, progress.to_evaluate, "held-out tasks"
    grid = Table.grid(padding=(0, 1))
    grid.add_row(
        ProgressBar(total=max(total, 1), completed=done, width=44), f"{done}/{total} {unit}"
    )
    return grid


def _domains(progress: Progress) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    latest = progress.steps[-1]
    for name, value in sorted(latest.reward_by_domain.items()):
        history = [s.reward_by_domain.get(name, 0.0) for s in progress.steps[-44:]]
        grid.add_row(name, f"{value:.2f}", Text(sparkline(history), style="cyan"))
    history = [s.mean_reward for s in progress.steps[-44:]]
    total = Text(f"{latest.mean_reward:.2f}", style="bold")
    grid.add_row(Text("reward", style="bold"), total, sparkline(history))
    return grid


def _learning(progress: Progress) -> RenderableType:
    step = progress.steps[-1]
    sampled = progress.inference.sampled_tokens_per_s if progress.inference else 0.0
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        f"weights v{step.weight_version}",
        f"staleness {step.staleness_mean:.1f} (max {step.staleness_max:.0f})",
        f"merge {step.merge_ratio:.1f}x",
        f"log-prob gap {step.logprob_gap_mean:.4f}",
    )
    grid.add_row(
        f"generated {sampled:.0f} tok/s",
        f"trained {step.trained_tokens_per_s:.0f} tok/s",
        f"entropy {step.entropy:.2f}",
        f"J {step.yield_j:.2f}",
    )
    return grid


def _queue(progress: Progress) -> RenderableType:
    status = progress.scheduler
    if status is None:
        return Text("waiting for the scheduler", style="dim")
    return Text(
        f"H {status.head}  W {status.window}  N {status.concurrency}  "
        f"running {status.running_rollouts}  complete in window {status.complete_in_window}, "
        f"outside {status.complete_outside_window}  "
        f"accepted {status.accepted} = trained {status.trained} + tombstoned {status.tombstoned} "
        f"+ pending {status.pending}",
        style="dim",
    )


def sparkline(values: list[float]) -> str:
    """Returns values as bars; the scale is 0 to 1, or wider if a value is outside."""
    low, high = min(0.0, *values), max(1.0, *values)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round((value - low) / (high - low) * top)] for value in values)
