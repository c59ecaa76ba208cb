"""Training, step by step: what is done in which order, and what a failure in between means.

    resume    restore the newest checkpoint (step k), Rewind(k), publish
    advance   take a batch, step, commit, publish, now and then begin a checkpoint
    finish    at max_steps: last checkpoint written, its kept model published

Owns that order, nothing of how. The invariant it keeps: the learner is ahead of the scheduler's
books only between a step and its commit, and a checkpoint of step k is written only after step k
was committed. Whatever goes wrong in between, the way on is always the same: resume.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.core.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from forge.rl.learner.types import StepResult
from forge.runtime.actor import Actor
from forge.runtime.actor_system import ActorRef
from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2 as pb
from services.trainer import metrics
from services.trainer.actors.checkpointing import Flush, Write
from services.trainer.actors.learner import Capture, Restore, Step, TakeSnapshot
from services.trainer.checkpoint.store import Checkpoint
from services.trainer.config import TrainerConfig
from services.trainer.data.batch_source import BatchSource, PreparedBatch
from services.trainer.evaluation import Evaluator
from services.trainer.reporting import step_metrics
from services.trainer.reporting.run_clock import RunClock
from services.trainer.reporting.run_record import TrainingRecord
from services.trainer.weight_publisher import Publisher

UNBOUNDED_S = 7 * 24 * 3600.0
"""A deadline for work whose length is the model's: a step, a checkpoint."""
_BATCH_WAIT_S = 1.0


class Diverged(FailedPrecondition):
    """Batch after batch gives no usable gradient: it is not the batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Do the next thing; answered by whether there is more to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Save a checkpoint now; answered by (step, path)."""


class Training(Actor):
    """One training run, from resume to finish."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        learner: ActorRef,
        writer: ActorRef,
        source: BatchSource,
        record: TrainingRecord,
        make_publisher: Callable[[int], Publisher],
        evaluator: Evaluator | None = None,
        clock: RunClock | None = None,
    ) -> None:
        """`make_publisher` takes the highest weight version known to be used."""
        self._config = config
        self._learner = learner
        self._writer = writer
        self._source = source
        self._record = record
        self._make_publisher = make_publisher
        self._evaluator = evaluator
        self._clock = clock or RunClock()
        self._publisher: Publisher | None = None
        self._consistent = False
        """The learner holds what the books say; otherwise the next thing to do is resume."""
        self._published_step = -1
        self._kept_step = -1
        """Of the weights that were published from a checkpoint's files."""
        self._checkpoint: Path | None = None
        """Of `record.checkpoint_step`."""
        self._saving: asyncio.Task[Path] | None = None
        """A checkpoint being written while training goes on."""
        self._skipped = 0
        """Batches in a row that were given up."""
        self._failing = False
        """The newest attempt at a checkpoint failed, and was told about."""
        self._idle_since_s = 0.0
        self._capture_s = 0.0
        """Copying for checkpoints since the newest step."""

    async def stopped(self) -> None:
        if self._saving is not None:
            self._saving.cancel()  # the waiting, not the writing
        await self._source.drop()

    async def receive(self, message: Any) -> Any:
        match message:
            case Advance():
                return await self._advance()
            case SaveCheckpoint():
                return await self._save()
        return await super().receive(message)

    async def _advance(self) -> bool:
        if not self._consistent:
            await self._resume()
        elif self._config.max_steps and self._record.step >= self._config.max_steps:
            await self._finish()
            return False
        else:
            self._record.phase = pb.TRAINER_PHASE_WAITING
            batch = await self._source.take(wait_s=_BATCH_WAIT_S)
            if batch is not None:
                await self._train(batch)
        return True

    async def _resume(self) -> None:
        self._record.phase = pb.TRAINER_PHASE_LOADING
        self._record.oldest_checkpoint_step = 0
        # One that is still being written is of a step that was committed: it counts.
        await self._flush()
        checkpoint: Checkpoint | None = await self._ask(Restore())
        self._record.rewind(checkpoint.history if checkpoint else [])
        self._record.checkpoint_step = checkpoint.step if checkpoint else 0
        self._checkpoint = checkpoint.path if checkpoint else None
        await self._source.rewind(self._record.step)
        if self._publisher is None:
            self._publisher = self._make_publisher(checkpoint.weight_version if checkpoint else 0)
        await self._publish(self._record.step)
        if checkpoint is not None:
            self._kept_step = checkpoint.step
        self._record.oldest_checkpoint_step = await self._flush()
        self._consistent = True
        self._clock.begin(self._record.run_s)
        self._capture_s = 0.0
        self._idle_since_s = self._now_s()
        if self._evaluator is not None:
            self._evaluator.resumed()

    async def _train(self, batch: PreparedBatch) -> None:
        self._record.phase = pb.TRAINER_PHASE_TRAINING
        step = self._record.step + 1
        wait_s = self._now_s() - self._idle_since_s
        if step != self._config.max_steps:
            self._source.prepare()
        self._consistent = False
        result: StepResult = await self._ask(
            Step(plan=batch.plan, weight_version=self._record.weight_version)
        )
        if result.skipped:
            await self._give_up(batch, result, step)
        elif await self._committed(batch, step):
            publish_s = await self._publish_if_possible(step)
            times = step_metrics.StepTimes(
                step_s=result.compute_s,
                wait_s=wait_s,
                publish_s=publish_s,
                checkpoint_s=self._capture_s,
                run_s=self._clock.run_s(),
            )
            self._capture_s = 0.0
            self._tell(batch, result, step, times)
            self._consistent = True
            self._skipped = 0
            await self._save_if_due(step)
            # The last step's is begun once its weights are out for certain.
            if self._evaluator is not None and step != self._config.max_steps:
                self._evaluator.reached(step, published=self._published_step == step)
        self._idle_since_s = self._now_s()

    async def _give_up(self, batch: PreparedBatch, result: StepResult, step: int) -> None:
        """The weights are as before; the batch is told to everybody and not tried again."""
        log.error(
            "batch_skipped",
            step=step,
            batch_id=batch.claim.batch_id,
            task_ids=batch.claim.task_ids,
            reason=result.skipped,
        )
        await self._source.tombstone(batch.claim, f"step {step} skipped: {result.skipped}")
        metrics.show_skipped(batch.samples)
        self._consistent = True
        self._skipped += 1
        if self._skipped == self._config.max_skipped_batches:
            # Going on would only use up the queue.
            raise Diverged(
                f"{self._skipped} batches in a row were skipped, the last one for: {result.skipped}"
            )

    async def _committed(self, batch: PreparedBatch, step: int) -> bool:
        try:
            await self._source.commit(batch.claim, step=step)
        except (NotFound, FailedPrecondition) as error:
            # Its groups are somebody else's by now: the step must not have happened.
            log.error("step_discarded", step=step, batch_id=batch.claim.batch_id, error=str(error))
            return False
        return True

    def _tell(
        self, batch: PreparedBatch, result: StepResult, step: int, times: step_metrics.StepTimes
    ) -> None:
        done = step_metrics.step_metrics(
            step=step,
            weight_version=self._record.weight_version,
            batch=batch.samples,
            result=result,
            times=times,
            earlier=self._record.steps,
        )
        self._warn(result, step, batch.claim.batch_id)
        self._record.append(done)
        metrics.show(done, batch.samples)
        log.info(
            "step_done",
            step=step,
            batch_id=batch.claim.batch_id,
            loss=round(done.loss, 5),
            mean_reward=round(done.mean_reward, 4),
            weight_version=done.weight_version,
            step_s=round(times.step_s, 3),
            wait_s=round(times.wait_s, 3),
            plan_s=round(batch.plan.plan_s, 4),
            flat_groups=batch.samples.flat_groups,
        )

    def _warn(self, result: StepResult, step: int, batch_id: str) -> None:
        """What a step that was taken should be looked at for."""
        stats, alarm = result.stats, self._config.logprob_gap_alarm
        if alarm and stats.inference_gap_mean > alarm:
            log.warning(
                "logprob_gap_high",
                step=step,
                gap=round(stats.inference_gap_mean, 4),
                logprob_gap_alarm=alarm,
                staleness=stats.inference_gap_staleness,
            )
        if result.memory_retries:
            log.warning(
                "token_budget_lowered",
                step=step,
                batch_id=batch_id,
                token_budget=result.plan.token_budget,
                retries=result.memory_retries,
                reason=result.shortage,
            )
        if result.cut_short:
            log.warning("passes_cut_short", step=step, reason=result.cut_short)

    async def _publish(self, step: int, *, checkpoint: Path | None = None) -> None:
        """Of the kept model, with `checkpoint`.

        Raises `Unavailable` when etcd does not answer, `Superseded`.
        """
        assert self._publisher is not None, "resume comes first"
        snapshot = await self._ask(TakeSnapshot(step=step, checkpoint=checkpoint))
        self._record.weight_version = await self._publisher.publish(snapshot)
        self._published_step = step

    async def _publish_if_possible(self, step: int) -> float:
        """An outage of etcd only delays publication: training goes on meanwhile."""
        began_s = self._now_s()
        try:
            await self._publish(step)
        except Unavailable as error:
            log.warning("publication_waits", step=step, error=str(error))
        return self._now_s() - began_s

    async def _save(self) -> tuple[int, str]:
        """A checkpoint of the newest step, durable on return."""
        if not self._consistent:
            raise Unavailable("training is being resumed: there is nothing consistent to save yet")
        await self._flush()
        step = self._record.step
        return step, str(await (await self._begin_save(step)))

    async def _save_if_due(self, step: int) -> None:
        if step - self._record.checkpoint_step < self._config.checkpoint.every_steps:
            return
        # One at a time: two copies of everything in host memory are enough.
        if self._saving is None or self._saving.done():
            await self._begin_save(step)

    async def _begin_save(self, step: int) -> asyncio.Task[Path]:
        """Copy what is to be saved; training may go on while it is written."""
        began_s = self._now_s()
        contents = await self._ask(Capture())
        self._capture_s += self._now_s() - began_s
        write = Write(
            contents=contents,
            step=step,
            weight_version=self._record.weight_version,
            history=self._record.history,
        )
        self._saving = asyncio.create_task(self._written(write))
        # Who does not wait for it has been told by the log.
        self._saving.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._saving

    async def _written(self, write: Write) -> Path:
        began_s = self._now_s()
        try:
            path: Path = await self._writer.ask(write, timeout_s=UNBOUNDED_S)
        except ResourceExhausted as error:
            # Training on costs nothing; the next step tries again, and the line is not repeated.
            if not self._failing:
                log.error("checkpoint_failed", step=write.step, error=str(error))
            self._failing = True
            metrics.show_checkpoint_failed()
            raise
        self._failing = False
        self._record.checkpoint_step = write.step
        self._checkpoint = path
        self._record.oldest_checkpoint_step = await self._flush()
        write_s = self._now_s() - began_s
        metrics.show_checkpoint(write.step, write_s)
        log.info("checkpoint_saved", step=write.step, path=str(path), write_s=round(write_s, 3))
        return path

    async def _flush(self) -> int:
        oldest_step: int = await self._writer.ask(Flush(), timeout_s=UNBOUNDED_S)
        return oldest_step

    async def _finish(self) -> None:
        if self._record.phase == pb.TRAINER_PHASE_FINISHED:
            return
        if self._record.checkpoint_step != self._record.step:
            await self._save()
        # What is measured at the end is the model that the run leaves behind.
        if self._kept_step != self._record.step:
            await self._publish(self._record.step, checkpoint=self._checkpoint)
            self._kept_step = self._record.step
        await self._source.release()
        if self._evaluator is not None:
            self._evaluator.reached(self._record.step)
        self._record.phase = pb.TRAINER_PHASE_FINISHED
        self._clock.stop()
        log.info("finished", step=self._record.step, weight_version=self._record.weight_version)

    async def _ask(self, message: Any) -> Any:
        return await self._learner.ask(message, timeout_s=UNBOUNDED_S)

    def _now_s(self) -> float:
        return self._clock.now_s()
