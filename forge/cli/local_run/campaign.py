"""One run from start to end: evaluate, train, evaluate again.

Owns the phases, their order and their end conditions. Uses only the services of the stack, so a run
works also with processes of systemd. After an interruption every phase can be repeated: tasks are
recognized by id, training continues from the trainer's checkpoint, and the results of a finished
evaluation are read from the scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from forge.cli.local_run.dataset import held_out_tasks, training_tasks
from forge.cli.local_run.presets import Preset
from forge.cli.rundir import Phase, RunDirectory
from forge.client.operator import DomainResult, Operator
from forge.core.errors import ForgeError, Unavailable
from forge.v1 import common_pb2 as pb
from forge.v1 import inference_pb2, scheduler_pb2, trainer_pb2

POLL_S = 0.5


@dataclass(slots=True)
class Progress:
    """The observed state of a run: written by the campaign, read by the display."""

    phase: Phase = "before"
    evaluated: int = 0
    to_evaluate: int = 0
    scheduler: scheduler_pb2.GetSchedulerStatusResponse | None = None
    inference: inference_pb2.GetInferenceStatusResponse | None = None
    trainer: trainer_pb2.GetTrainerStatusResponse | None = None
    steps: list[trainer_pb2.StepMetrics] = field(default_factory=list)
    """Observed optimizer steps, in order."""
    evaluations: list[trainer_pb2.Evaluation] = field(default_factory=list)
    """Observed evaluations of the trainer, in the order of their ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Mean outcomes of held-out tasks, over all attempts."""

    by_domain: Mapping[str, float]
    overall: float
    attempts: int
    failed: int
    """Failed rollouts; they count as reward 0."""
    min_weight_version: int = -1
    """Oldest weight version of the sampled tokens; -1 if unknown."""
    by_task: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Mean outcome per task, by domain and by task id without the evaluation's tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignResult:
    """The evaluations before and after training."""

    before: Evaluation
    after: Evaluation
    weight_version: int
    """Oldest weight version in the second evaluation."""
    last_step_version: int = 0
    """Weights published after the last step; an evaluation with older ones is of another step."""

    def changes(self, domain: str) -> list[float]:
        """Returns the change of each task of a domain; empty unless both evaluations have the same
        tasks."""
        before = self.before.by_task.get(domain, {})
        after = self.after.by_task.get(domain, {})
        if before.keys() != after.keys():
            return []
        return [after[task] - outcome for task, outcome in before.items()]


class Campaign:
    """Runs the phases on a connected stack.

    `operator` sends commands and retries for long while a service restarts; `observer` reads the
    state with a short retry time, so the display never freezes.
    """

    def __init__(
        self,
        *,
        operator: Operator,
        observer: Operator,
        directory: RunDirectory,
        preset: Preset,
        seed: int,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._operator = operator
        self._observer = observer
        self._directory = directory
        self._preset = preset
        self._seed = seed
        self._on_progress = on_progress
        self.progress = Progress()

    async def run(self) -> CampaignResult:
        """Runs all phases; returns the result. Raises `ForgeError` if the run cannot continue."""
        started = self._directory.load()
        began = started is not None and started.phase != "before"
        self._enter("before")
        before = await self._ended("eval-before") if began else None
        before = before or await self._evaluate("eval-before")
        self._enter("train")
        await self._train()
        self._enter("after")
        version = await self._final_weights_served()
        after = await self._evaluate("eval-after")
        trainer = await self._trainer_evaluated()
        self._enter("done")
        return CampaignResult(
            before=before,
            after=after,
            weight_version=version,
            last_step_version=trainer.latest.weight_version if trainer else 0,
        )

    def _enter(self, phase: Phase) -> None:
        self.progress.phase = phase
        self._directory.enter(phase)
        self._on_progress(self.progress)

    async def _ended(self, tag: str) -> Evaluation | None:
        """Returns the evaluation of an earlier start, with any number of tasks: the weights that it
        sampled from no longer exist."""
        results = await self._operator.results(tag)
        return evaluation(results, tag) if results else None

    async def _evaluate(self, tag: str) -> Evaluation:
        """Samples the held-out tasks under `tag`, or reads the results of an earlier start."""
        tasks = held_out_tasks(
            self._preset.domains,
            seed=self._seed,
            count=self._preset.eval_tasks,
            attempts=self._preset.eval_attempts,
            tag=tag,
        )
        self.progress.evaluated, self.progress.to_evaluate = 0, len(tasks)
        await self._operator.submit(tasks)
        results = await self._operator.all_ended(
            tag, groups=len(tasks), poll_s=POLL_S, on_look=self._looked
        )
        return evaluation(results, tag)

    async def _looked(self, evaluated: int) -> None:
        await self._observe()
        self.progress.evaluated = evaluated
        self._on_progress(self.progress)

    async def _train(self) -> None:
        """Keeps the queue filled until the trainer has finished its last step."""
        tasks = training_tasks(
            self._preset.domains, seed=self._seed, group_size=self._preset.group_size
        )
        await self._observe()
        # An earlier start has displayed the earlier steps.
        following = asyncio.create_task(self._follow_steps(after_step=self._step()))
        try:
            while not (self._finished() and (following.done() or self._has_seen_every_step())):
                await self._top_up(tasks)
                await asyncio.sleep(POLL_S)
                await self._look()
        finally:
            following.cancel()

    async def _follow_steps(self, *, after_step: int) -> None:
        """Records every step; ends when the trainer stays unreachable."""
        async for step in self._operator.tail(after_step=after_step):
            steps = self.progress.steps
            # A trainer that restored a checkpoint repeats some steps.
            while steps and steps[-1].step >= step.step:
                steps.pop()
            steps.append(step)

    def _has_seen_every_step(self) -> bool:
        steps = self.progress.steps
        return not steps or steps[-1].step >= self._step()

    async def _top_up(self, tasks: Iterator[pb.Task]) -> None:
        """Submits tasks until `_ahead` groups are pending."""
        status = self.progress.scheduler
        pending = status.pending if status else 0
        missing = min(self._still_needed(), self._ahead()) - pending
        while missing > 0:
            # A resumed run submits from the first task on; the scheduler ignores known tasks.
            chunk = list(islice(tasks, missing))
            missing -= await self._operator.submit(chunk)

    def _ahead(self) -> int:
        """Returns the number of pending groups: N running ones, and two batches."""
        return self._preset.concurrency + 2 * self._preset.groups_per_step

    def _still_needed(self) -> int:
        # One additional batch: the last one must not wait for a tombstoned group.
        return (self._preset.steps - self._step() + 1) * self._preset.groups_per_step

    def _step(self) -> int:
        return self.progress.trainer.step if self.progress.trainer else 0

    def _finished(self) -> bool:
        trainer = self.progress.trainer
        return trainer is not None and trainer.phase == trainer_pb2.TRAINER_PHASE_FINISHED

    async def _final_weights_served(self) -> int:
        """Waits until every worker serves the last published version."""
        while True:
            await self._look()
            trainer, inference = self.progress.trainer, self.progress.inference
            if trainer and inference and inference.weight_version >= trainer.weight_version > 0:
                return inference.weight_version
            await asyncio.sleep(POLL_S)

    async def _trainer_evaluated(self) -> trainer_pb2.GetTrainerStatusResponse | None:
        """Waits for the end of the trainer's evaluation; returns its status."""
        while True:
            await self._look()
            trainer = self.progress.trainer
            if trainer is None or not trainer.evaluating:
                return trainer
            await asyncio.sleep(POLL_S)

    async def _look(self) -> None:
        await self._observe()
        self._on_progress(self.progress)

    async def _observe(self) -> None:
        """Updates the progress; a restarting service keeps its last state."""
        answers = await asyncio.gather(
            self._observer.scheduler_status(),
            self._observer.inference_status(),
            self._observer.trainer_status(),
            return_exceptions=True,
        )
        for service, answer in zip(("scheduler", "inference", "trainer"), answers, strict=True):
            if not isinstance(answer, BaseException):
                setattr(self.progress, service, answer)
            elif not isinstance(answer, ForgeError):
                raise answer
        if self.progress.trainer is not None:
            self._note_evaluation(self.progress.trainer)

    def _note_evaluation(self, trainer: trainer_pb2.GetTrainerStatusResponse) -> None:
        newest, known = trainer.latest_evaluation, self.progress.evaluations
        if trainer.HasField("latest_evaluation") and newest.step not in {e.step for e in known}:
            known.append(newest)


def evaluation(results: Sequence[DomainResult], tag: str) -> Evaluation:
    """Returns the means of the tasks under `tag`, by domain and over all.

    Raises `Unavailable` without a completed rollout.
    """
    attempts = sum(result.rollouts for result in results)
    failed = sum(result.failed for result in results)
    if attempts == failed:
        raise Unavailable("no held-out rollout was completed; see the runner's log")
    return Evaluation(
        by_domain={result.domain: result.mean_outcome for result in results},
        overall=sum(result.mean_outcome * result.rollouts for result in results) / attempts,
        attempts=attempts,
        failed=failed,
        min_weight_version=min(
            (each.min_weight_version for each in results if each.min_weight_version >= 0),
            default=-1,
        ),
        by_task={
            result.domain: {
                task.removeprefix(f"{tag}-"): outcome
                for task, outcome in result.task_outcomes.items()
            }
            for result in results
        },
    )
