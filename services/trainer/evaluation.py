"""Evaluation during training: held-out tasks, sampled and scored beside it.

    due -> every worker serves the weights -> submitted -> all groups ended -> recorded

Owns the schedule of evaluations, the ids of their tasks and their results, one evaluation at a
time. Task ids contain run, step and weight version, and the scheduler ignores known ids: after any
restart the same tasks are submitted again and nothing is sampled twice. A repeated step has other
weights and is evaluated again. Results have no effect on training.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from forge.client.operator import DomainResult, Operator
from forge.core.confidence_intervals import Interval, mean_interval
from forge.core.errors import ConfigError, ForgeError
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.files.private import replace_private_file
from forge.runtime.telemetry import log
from forge.v1 import common_pb2
from forge.v1 import trainer_pb2 as pb
from services.trainer import metrics
from services.trainer.reporting.run_record import TrainingRecord
from services.trainer.setting_tables import EvaluationSettings

POLL_S = 2.0
SERVED_POLL_S = 0.2
_RUN_FILE = "run-id"

DEFAULTS = common_pb2.Task(scaffold="blackbox", group_size=1, purpose=common_pb2.PURPOSE_EVAL)
"""Defaults of fields that a line of the file omits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Due:
    step: int
    tag: str
    weight_version: int
    fresh: bool
    """The weights of `step` are the newest; otherwise only a submitted evaluation is followed."""


class Evaluator:
    """The evaluations of one run."""

    def __init__(
        self,
        operator: Operator,
        record: TrainingRecord,
        *,
        tasks: Sequence[common_pb2.Task],
        settings: EvaluationSettings,
        max_steps: int,
        run_id: str,
        poll_s: float = POLL_S,
    ) -> None:
        """`tasks` have no ids yet; `run_id` distinguishes runs of one cluster."""
        self._operator = operator
        self._record = record
        self._tasks = tasks
        self._settings = settings
        self._max_steps = max_steps
        self._poll_s = poll_s
        digest = blake2b(run_id.encode(), digest_size=4)
        for task in tasks:
            digest.update(task.SerializeToString(deterministic=True))
        self._name = f"eval-{digest.hexdigest()}"
        self._waiting: deque[_Due] = deque()
        self._current: _Due | None = None
        """The evaluation in flight."""
        self._skipped: list[int] = []
        """Steps skipped since the last recorded evaluation."""
        self._work: asyncio.Task[None] | None = None
        self._stopped = False

    def _due(self, step: int) -> bool:
        return self._settings.due(step, max_steps=self._max_steps)

    def resumed(self) -> None:
        """Training resumes from the record's step, whose weights are published. Evaluations that
        were submitted and not recorded, perhaps by another process, are followed again; those of
        rewound steps are dropped."""
        self._drop_rewound()
        step = self._record.step
        versions = {each.step: each.weight_version for each in self._record.steps}
        recorded = max((each.step for each in self._record.evaluations), default=-1)
        for earlier in range(recorded + 1, step):
            if self._due(earlier) and not self._known(earlier):
                version = versions.get(earlier, self._record.weight_version)
                self._wait(earlier, version, fresh=False)
        self._begin(step)

    def reached(self, step: int, *, published: bool = True) -> None:
        """A step was taken, and its weights are published or not. Never waits."""
        if not self._due(step) or self._known(step):
            return
        if not published:
            self._skip(step, "its weights are not published yet")
        elif self._current is not None and step != self._max_steps:
            self._skip(step, f"the evaluation of step {self._current.step} is still in flight")
        else:
            self._begin(step)

    async def stop(self) -> None:
        """Stop following and begin nothing; the next start continues."""
        self._stopped = True
        left = self._current
        if self._work is None or left is None:
            return
        await cancel_and_wait(self._work)
        log.info("evaluation_left_running", step=left.step, tag=left.tag)

    def tag(self, step: int) -> str:
        """The tag of the groups that evaluate `step`, which is in the record, or 0."""
        versions = [each.weight_version for each in self._record.steps if each.step == step]
        # Step 0 has the same weights after each rewind, so its tag has no version.
        return "-".join([self._name, f"s{step}", *(f"v{version}" for version in versions)])

    def _known(self, step: int) -> bool:
        pending = {each.step for each in (*self._waiting, self._current) if each is not None}
        return step in pending or any(each.step == step for each in self._record.evaluations)

    def _show(self, in_flight: bool) -> None:
        self._record.evaluating = in_flight
        metrics.EVALUATING.set(in_flight)

    def _skip(self, step: int, reason: str) -> None:
        self._skipped.append(step)
        metrics.EVALUATIONS.labels("skipped").inc()
        log.warning("evaluation_skipped", step=step, reason=reason)

    def _begin(self, step: int) -> None:
        if self._stopped:
            return
        if self._due(step) and not self._known(step):
            self._wait(step, self._record.weight_version, fresh=True)
        if self._waiting and self._current is None:
            self._show(True)
            self._current = self._waiting.popleft()
            self._work = asyncio.create_task(self._evaluate_waiting())
            self._work.add_done_callback(self._ended)

    def _wait(self, step: int, weight_version: int, *, fresh: bool) -> None:
        due = _Due(step=step, tag=self.tag(step), weight_version=weight_version, fresh=fresh)
        self._waiting.append(due)

    def _drop_rewound(self) -> None:
        """Drop the evaluations of steps after the record's."""
        step = self._record.step
        self._waiting = deque(due for due in self._waiting if due.step <= step)
        self._skipped = [skipped for skipped in self._skipped if skipped <= step]
        if self._work is not None and self._current is not None and self._current.step > step:
            log.info("evaluation_removed", step=self._current.step, tag=self._current.tag)
            self._work.cancel()
            self._work = self._current = None
            self._show(False)

    async def _evaluate_waiting(self) -> None:
        while self._current is not None:
            await self._evaluate(self._current)
            self._current = self._waiting.popleft() if self._waiting else None

    def _ended(self, work: asyncio.Task[None]) -> None:
        if work is self._work:
            self._current = None
            self._show(False)
        if not work.cancelled() and (error := work.exception()):
            log.error("evaluation_crashed", exc_info=error)

    async def _evaluate(self, due: _Due) -> None:
        """Follow an evaluation to its end, through outages of scheduler and inference."""
        began_s = asyncio.get_running_loop().time()
        logged = False
        while True:
            try:
                if not await self._submitted(due):
                    return
                results = await self._operator.all_ended(
                    due.tag, groups=len(self._tasks), poll_s=self._poll_s
                )
                break
            except ForgeError as error:
                if not error.retryable:
                    metrics.EVALUATIONS.labels("refused").inc()
                    log.error("evaluation_refused", step=due.step, error=str(error))
                    return
                if not logged:
                    log.warning("evaluation_waits", step=due.step, error=str(error))
                logged = True
            await asyncio.sleep(self._poll_s)
        if due.step <= self._record.step:
            duration_s = asyncio.get_running_loop().time() - began_s
            self._report(due, results, duration_s)

    async def _submitted(self, due: _Due) -> bool:
        """Whether the tasks are in the queue now; False if it is too late to begin."""
        begun = [group async for group in self._operator.groups(due.tag)]
        if not begun and not due.fresh:
            return False
        if not begun:
            await self._served(due.weight_version)
        # The scheduler ignores tasks that were submitted before.
        new = await self._operator.submit(self._named(due.tag))
        if new:
            log.info("evaluation_begun", step=due.step, tag=due.tag, groups=len(self._tasks))
        return True

    async def _served(self, weight_version: int) -> None:
        """Wait until no worker samples from older weights."""
        while True:
            status = await self._operator.inference_status()
            if status.weight_version >= weight_version:
                return
            # A short interval: newer weights may follow soon.
            await asyncio.sleep(min(self._poll_s, SERVED_POLL_S))

    def _named(self, tag: str) -> list[common_pb2.Task]:
        named = []
        for row, task in enumerate(self._tasks):
            own = common_pb2.Task(task_id=f"{tag}-r{row}", tag=tag)
            own.MergeFrom(task)
            named.append(own)
        return named

    def _report(self, due: _Due, results: Sequence[DomainResult], duration_s: float) -> None:
        evaluation = evaluation_of(
            results,
            step=due.step,
            weight_version=due.weight_version,
            duration_s=duration_s,
            skipped=len(self._skipped),
            tag=due.tag,
        )
        self._skipped.clear()
        self._record.evaluated(evaluation)
        metrics.show_evaluation(evaluation)
        log.info(
            "evaluation_done",
            step=due.step,
            mean_reward=round(evaluation.mean_reward, 4),
            solved_share=round(evaluation.solved_share, 4),
            rollouts=evaluation.rollouts,
            failed=evaluation.failed,
            weight_version=evaluation.weight_version,
            min_weight_version=evaluation.min_weight_version,
            max_weight_version=evaluation.max_weight_version,
            duration_s=round(duration_s, 1),
        )


def evaluation_of(
    results: Sequence[DomainResult],
    *,
    step: int,
    weight_version: int,
    duration_s: float,
    skipped: int,
    tag: str,
) -> pb.Evaluation:
    """The result of an evaluation: of each domain, and of all rollouts together."""
    rollouts = sum(each.rollouts for each in results)
    failed = sum(each.failed for each in results)
    sampled = [each for each in results if each.min_weight_version >= 0]
    low, high = _interval(results)
    return pb.Evaluation(
        step=step,
        weight_version=weight_version,
        min_weight_version=min((each.min_weight_version for each in sampled), default=-1),
        max_weight_version=max((each.max_weight_version for each in sampled), default=-1),
        mean_reward=sum(each.mean_outcome * each.rollouts for each in results) / rollouts,
        solved_share=sum(each.solved for each in results) / rollouts,
        length_tokens=sum(each.sampled_tokens for each in results) / max(1, rollouts - failed),
        rollouts=rollouts,
        failed=failed,
        domains={each.domain: _domain_evaluation(each, tag) for each in results},
        duration_s=duration_s,
        skipped=skipped,
        tag=tag,
        mean_reward_low=low,
        mean_reward_high=high,
    )


def _domain_evaluation(result: DomainResult, tag: str) -> pb.DomainEvaluation:
    low, high = _interval([result])
    return pb.DomainEvaluation(
        mean_reward=result.mean_outcome,
        solved_share=result.solved / result.rollouts,
        length_tokens=result.sampled_tokens / max(1, result.rollouts - result.failed),
        rollouts=result.rollouts,
        failed=result.failed,
        mean_reward_low=low,
        mean_reward_high=high,
        task_outcomes={
            task.removeprefix(f"{tag}-r"): outcome for task, outcome in result.task_outcomes.items()
        },
    )


def _interval(results: Sequence[DomainResult]) -> Interval:
    """Confidence interval of the mean outcome over all tasks."""
    interval = mean_interval([list(each.task_outcomes.values()) for each in results])
    assert interval is not None, "an evaluation has tasks"
    return interval


def run_id_in(directory: Path) -> str:
    """The random id of the run with checkpoints in this directory, stored beside them.

    Raises `ConfigError` when it cannot be stored.
    """
    file = directory / _RUN_FILE
    try:
        if not file.exists():
            directory.mkdir(parents=True, exist_ok=True)
            replace_private_file(file, secrets.token_hex(8))
        return file.read_text()
    except OSError as error:
        raise ConfigError(f"trainer: {file}: {error.strerror}") from None
