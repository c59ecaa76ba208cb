"""The same training run with each engine: `python -m benchmarks.engine_runs`.

    [--model tiny|smollm2|DIRECTORY] [--engines NAME...] [--seeds N...] [--steps N]
    [--eval-tasks N] [--set SERVICE.KEY=VALUE...] [--root DIR] [--quick] [--json FILE]

One `forge run` for each seed and engine, with the same tasks, settings and steps. The first table
has the mean outcome on held-out tasks before and after training, and of the training itself. The
second one has for each step the mean reward, and the mean difference of log-probs between engine
and trainer on the freshest tokens of the batch (the staleness of these in brackets): at staleness 0
both computed with the same weights.

The first table is printed after each run. A run that has ended under ROOT/engine-runs is not run
again, and one that was cut short continues. The engine vllm runs in the
environment of `make engine-vllm`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.support.report import arguments, keep
from forge.cli.local_run.campaign import CampaignResult
from forge.cli.local_run.presets import preset_for
from forge.cli.local_run.run_options import RunOptions
from forge.cli.local_run.training_run import run_campaign
from forge.cli.rundir import RunDirectory
from forge.core.confidence_intervals import change_interval

QUICK_STEPS = 3
QUICK_TASKS = 4
_WIDTH = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One finished run."""

    engine: str
    seed: int
    result: CampaignResult
    steps: Sequence[Mapping[str, Any]]
    """Rows of metrics.jsonl."""

    @property
    def last_rewards(self) -> float:
        """Mean reward of the last third of the steps."""
        return statistics.mean(
            float(step["mean_reward"]) for step in self.steps[-_third(self.steps) :]
        )

    def numbers(self) -> dict[str, float]:
        """Returns the figures by name."""
        name = f"{self.engine}.seed{self.seed}"
        interval = _interval(self.result)
        found = {
            f"{name}.before": self.result.before.overall,
            f"{name}.after": self.result.after.overall,
            f"{name}.last_rewards": self.last_rewards,
            f"{name}.run_s": self.steps[-1]["run_s"],
        }
        if interval is not None:
            found |= {f"{name}.change_low": interval.low, f"{name}.change_high": interval.high}
        for step in self.steps:
            at = f"{name}.step{step['step']:02d}"
            found[f"{at}.reward"] = step["mean_reward"]
            found[f"{at}.gap"] = step["inference_gap_mean"]
            found[f"{at}.gap_staleness"] = step["inference_gap_staleness"]
        return found


def main() -> None:
    """Runs what has not ended yet; prints the tables."""
    options = _options()
    # Rows of a Markdown table do not wrap.
    console = Console(width=_WIDTH)
    runs: list[EngineRun] = []
    numbers: dict[str, float] = {}
    for seed in options.seeds:
        for engine in options.engines:
            runs.append(_run(options, engine=engine, seed=seed))
            numbers |= runs[-1].numbers()
            # After each run: the next one may be cut short.
            console.print(_summary(runs))
            keep(numbers, options.json)
    for seed in options.seeds:
        console.print(_by_step([run for run in runs if run.seed == seed]))


def _run(options: argparse.Namespace, *, engine: str, seed: int) -> EngineRun:
    steps = QUICK_STEPS if options.quick else options.steps or preset_for(options.model).steps
    name = f"{Path(options.model).name}-seed{seed}-steps{steps}-{engine}"
    directory = RunDirectory((options.root / "engine-runs" / name).resolve())
    chosen = RunOptions(
        model=options.model,
        seed=seed,
        steps=steps,
        eval_tasks=QUICK_TASKS if options.quick else options.eval_tasks,
        root=options.root,
        run_dir=directory.path,
        console=False,
        engine=engine,
        overrides=options.overrides,
    )
    Console(stderr=True).print(f"{name} ...")
    result, _ = asyncio.run(run_campaign(chosen, directory))
    lines = [json.loads(line) for line in directory.metrics_file.read_text().splitlines()]
    # A step that a restarted trainer took again is there twice.
    taken = {line["step"]: line for line in lines if "step" in line}
    return EngineRun(
        engine=engine, seed=seed, result=result, steps=[taken[step] for step in sorted(taken)]
    )


def _summary(runs: Sequence[EngineRun]) -> Table:
    table = Table(title="Held-out mean outcome", title_justify="left", box=box.MARKDOWN)
    last = f"reward of the last {_third(runs[0].steps)} steps"
    for column in ("seed", "engine", "before", "after", "change, 95 %", last, "time"):
        table.add_column(column)
    for run in runs:
        interval = _interval(run.result)
        table.add_row(
            str(run.seed),
            run.engine,
            f"{run.result.before.overall:.3f}",
            f"{run.result.after.overall:.3f}",
            f"{interval.low:+.3f} to {interval.high:+.3f}" if interval else "-",
            f"{run.last_rewards:.3f}",
            f"{run.steps[-1]['run_s']:.0f} s",
        )
    return table


def _by_step(runs: Sequence[EngineRun]) -> Table:
    title = f"Seed {runs[0].seed}: reward, log-prob gap"
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    table.add_column("step")
    for run in runs:
        table.add_column(f"{run.engine}: reward")
        table.add_column("gap (staleness)")
    for rows in zip(*(run.steps for run in runs), strict=False):
        cells = [str(rows[0]["step"])]
        for step in rows:
            staleness = step["inference_gap_staleness"]
            cells += [
                f"{step['mean_reward']:.3f}",
                f"{step['inference_gap_mean']:.2g} ({staleness:.0f})",
            ]
        table.add_row(*cells)
    return table


def _interval(result: CampaignResult) -> Any:
    return change_interval([result.changes(name) for name in sorted(result.before.by_domain)])


def _third(steps: Sequence[Any]) -> int:
    return max(1, len(steps) // 3)


def _options() -> argparse.Namespace:
    parser = arguments(__doc__, quick=f"{QUICK_STEPS} steps, {QUICK_TASKS} held-out tasks")
    parser.add_argument("--model", default="smollm2", help="as of forge run")
    parser.add_argument("--engines", nargs="+", default=["embedded", "vllm"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="optimizer steps; default: the preset's")
    parser.add_argument("--eval-tasks", type=int, help="held-out tasks per domain")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--root", type=Path, default=Path(".forge"), help="models and run data")
    return parser.parse_args()


if __name__ == "__main__":
    main()
