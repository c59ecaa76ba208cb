"""One cell of the scaffold report: a stack that trains through some scaffolds, and is then measured
on held-out tasks through all.

Owns tasks, order and end of a cell. The stack is that of `forge run`: each service a process.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from rich.console import Console

from forge.cli.local_run.dataset import held_out_tasks, training_tasks
from forge.cli.local_run.display import RunDisplay
from forge.cli.local_run.models.models import ensure_model
from forge.cli.local_run.presets import Preset, Settings, merged, preset_for
from forge.cli.local_run.stack import StackPlan
from forge.cli.local_run.training_run import run_settings, running
from forge.cli.rundir import RunDirectory, RunState
from forge.client.operator import Operator
from forge.v1 import common_pb2 as pb
from forge.v1 import trainer_pb2

AGENTS = "benchmarks.support.scaffolds.agents"
ADDED = {
    "careful": f"{AGENTS}.careful:Careful",
    "bare": f"{AGENTS}.bare:Bare",
    "text": f"{AGENTS}.text:Text",
}
SCAFFOLDS = ("blackbox", *ADDED)
HELD_OUT = "text"
"""The scaffold that no condition trains through."""
CONDITIONS: Mapping[str, Sequence[str]] = {
    "untrained": (),
    "one scaffold": ("blackbox",),
    "three scaffolds": ("blackbox", "careful", "bare"),
}
"""Scaffolds of the training tasks."""
DOMAINS: Mapping[str, Mapping[str, float]] = {
    "tiny": {"reasoning": 1 / 3, "qa": 1 / 3, "code": 1 / 3},
    "smollm2": preset_for("smollm2").domains,
}
"""Shares of domains that every scaffold can run, by model; none has a context action."""
MAX_TURNS = 6
POLL_S = 0.5
RETRY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One seed under one condition."""

    model: str
    seed: int
    condition: str
    steps: int
    """Optimizer steps of a trained condition."""
    eval_tasks: int
    """Held-out tasks per domain, each attempted once through each scaffold."""

    @property
    def name(self) -> str:
        """For files and for the results."""
        return f"{self.model}-seed{self.seed}-{self.condition.replace(' ', '-')}"

    @property
    def trains(self) -> Sequence[str]:
        """Scaffolds of its training tasks."""
        return CONDITIONS[self.condition]

    @property
    def optimizer_steps(self) -> int:
        """Number of steps, 0 without training."""
        return self.steps if self.trains else 0

    @property
    def preset(self) -> Preset:
        """The model's preset with the domains of the report."""
        preset = preset_for(self.model)
        return replace(
            preset,
            domains=DOMAINS[self.model],
            steps=self.steps,
            groups_per_step=_multiple(preset.groups_per_step, len(DOMAINS[self.model])),
            eval_tasks=self.eval_tasks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Held-out tasks of one cell through one scaffold; a line of the results file."""

    cell: str
    model: str
    seed: int
    condition: str
    scaffold: str
    steps: int
    rollouts: int
    failed: int
    """Rollouts that were given up; they count as 0."""
    mean_outcome: float
    by_domain: Mapping[str, float]
    trained_rollouts: int = 0
    """Rollouts of the training groups that the optimizer steps consumed."""
    by_scaffold: Mapping[str, int] = field(default_factory=dict)
    """The same by their scaffold."""


OnProgress = Callable[[str, int, int], None]
"""Called with the phase, and how much of how much of it is done."""


async def run_cell(
    cell: Cell, *, root: Path, folder: Path, on_progress: OnProgress
) -> list[Measured]:
    """Trains and measures; an interrupted cell continues from its directory in `folder`. Starting
    weights are below `root`.

    Raises `ForgeError` when the stack cannot run.
    """
    model_path = await ensure_model(cell.model, seed=cell.seed, root=root)
    directory = RunDirectory(folder.resolve() / cell.name)
    with directory.locked():
        directory.create()
        plan = StackPlan(
            directory=directory,
            model_path=str(model_path),
            cluster=f"scaffolds-{cell.name}",
            settings=settings_of(cell, str(model_path)),
        )
        quiet = RunDisplay(Console(stderr=True), total_steps=cell.steps)
        async with running(plan, quiet) as (stack, coordinator, channels):
            operator = Operator(coordinator, channels, retry_for_s=RETRY_S)
            work = _Work(cell, operator, on_progress)
            return await stack.guard(work.run())


def settings_of(cell: Cell, model_path: str) -> Settings:
    """Returns the settings of the services of a cell."""
    preset = cell.preset
    # A trainer without steps would train forever: the untrained cell submits nothing to train.
    state = RunState(model=cell.model, model_path=model_path, seed=cell.seed, steps=cell.steps)
    scaffolds = ",".join(f"{name}={reference}" for name, reference in ADDED.items())
    return merged(
        run_settings(state, preset, None), preset.settings, {"runner": {"scaffolds": scaffolds}}
    )


class _Work:
    """The phases of one cell on a connected stack."""

    def __init__(self, cell: Cell, operator: Operator, on_progress: OnProgress) -> None:
        self._cell = cell
        self._operator = operator
        self._on_progress = on_progress

    async def run(self) -> list[Measured]:
        """Trains, then measures through each scaffold."""
        if self._cell.optimizer_steps:
            await self._train()
        trained = await self._trained()
        return [await self._measure(scaffold, trained) for scaffold in SCAFFOLDS]

    async def _train(self) -> None:
        preset = self._cell.preset
        # A batch more than the steps: the last one must not wait for a tombstoned group.
        needed = (self._cell.steps + 1) * preset.groups_per_step + preset.concurrency
        await self._operator.submit(islice(train_tasks(self._cell), needed))
        while True:
            trainer = await self._operator.trainer_status()
            self._on_progress("training", trainer.step, self._cell.steps)
            if trainer.phase == trainer_pb2.TRAINER_PHASE_FINISHED:
                inference = await self._operator.inference_status()
                if inference.weight_version >= trainer.weight_version > 0:
                    return
            await asyncio.sleep(POLL_S)

    async def _measure(self, scaffold: str, trained: Mapping[str, int]) -> Measured:
        tasks = eval_tasks(self._cell, scaffold)
        await self._operator.submit(tasks)

        async def looked(ended: int) -> None:
            self._on_progress(f"measuring {scaffold}", ended, len(tasks))

        results = await self._operator.all_ended(
            scaffold, groups=len(tasks), poll_s=POLL_S, on_look=looked
        )
        rollouts = sum(one.rollouts for one in results)
        cell = self._cell
        return Measured(
            cell=cell.name,
            model=cell.model,
            seed=cell.seed,
            condition=cell.condition,
            scaffold=scaffold,
            steps=cell.optimizer_steps,
            rollouts=rollouts,
            failed=sum(one.failed for one in results),
            mean_outcome=sum(one.mean_outcome * one.rollouts for one in results) / rollouts,
            by_domain={one.domain: one.mean_outcome for one in results},
            trained_rollouts=sum(trained.values()),
            by_scaffold=trained,
        )

    async def _trained(self) -> dict[str, int]:
        """Returns the number of trained rollouts by scaffold."""
        counts = dict.fromkeys(self._cell.trains, 0)
        async for one in self._operator.groups("train"):
            if one.group.state == pb.GROUP_STATE_TRAINED:
                counts[one.group.task.scaffold] += one.group.task.group_size
        return counts


def train_tasks(cell: Cell) -> Iterator[pb.Task]:
    """Yields the training tasks: the same ones for every condition, scaffolds taking turns within
    each domain."""
    seen: dict[str, int] = {}
    tasks = training_tasks(cell.preset.domains, seed=cell.seed, group_size=cell.preset.group_size)
    for task in tasks:
        turn = seen[task.domain] = seen.get(task.domain, -1) + 1
        yield _through(task, cell.trains[turn % len(cell.trains)])


def eval_tasks(cell: Cell, scaffold: str) -> list[pb.Task]:
    """Returns the held-out tasks through a scaffold: the same ones for every scaffold."""
    tasks = held_out_tasks(
        cell.preset.domains, seed=cell.seed, count=cell.eval_tasks, attempts=1, tag=scaffold
    )
    return [_through(task, scaffold) for task in tasks]


def _through(task: pb.Task, scaffold: str) -> pb.Task:
    payload = json.loads(task.payload_json)
    changed = pb.Task()
    changed.CopyFrom(task)
    changed.scaffold = scaffold
    changed.payload_json = json.dumps(payload | {"max_turns": MAX_TURNS})
    return changed


def _multiple(count: int, of: int) -> int:
    """Returns the smallest multiple of `of` that is at least `count`."""
    return -(-count // of) * of
