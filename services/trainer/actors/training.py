"""The order of operations in training, and the recovery from a failure between them.

    resume    restore the newest checkpoint (step k), Rewind(k), publish
    advance   take a batch, step, commit, begin to publish, now and then begin a checkpoint
    finish    at max_steps: last checkpoint written, its kept model published

Owns the order alone. Invariant: the learner is ahead of the scheduler only between a step and its
commit, and a checkpoint of step k is written only after the commit of step k. Recovery from every
failure is the same: resume.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forge.core.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from forge.rl.learner.types import StepResult
from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2 as pb
from services.trainer import metrics
from services.trainer.actors.checkpointing import CopyOut, FlushCheckpoints, Prune, WriteCheckpoint
from services.trainer.actors.learner import CheckReaders, Restore
from services.trainer.actors.publications import Publications
from services.trainer.actors.token_values import KeptTokenValues
from services.trainer.batches.batch_source import BatchSource, PreparedBatch
from services.trainer.batches.reading import ReadersLost
from services.trainer.batches.traced_calls import report_step
from services.trainer.checkpoint.store import Checkpoint
from services.trainer.config import TrainerConfig
from services.trainer.evaluation import Evaluator
from services.trainer.leadership.lineage import Lineage
from services.trainer.learner.model_replica import Capture, Take
from services.trainer.published.publisher import Publisher
from services.trainer.published.quality import Qualities
from services.trainer.reporting import step_metrics
from services.trainer.reporting.run_clock import RunClock
from services.trainer.reporting.run_record import TrainingRecord

UNBOUNDED_S = 7 * 24 * 3600.0
"""Deadline of a step or a checkpoint, whose duration depends on the model."""
_BATCH_WAIT_S = 1.0


class Diverged(FailedPrecondition):
    """Too many batches in a row gave no usable gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """Do the next operation; answered by True until training has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCheckpoint:
    """Save a checkpoint now; answered by (step, path)."""


class Training(Actor):
    """One training run, from resume to finish."""

    def __init__(  # noqa: PLR0913 - the parts of a run
        self,
        config: TrainerConfig,
        *,
        learner: ActorRef,
        writer: ActorRef,
        source: BatchSource,
        record: TrainingRecord,
        lineage: Lineage,
        make_publisher: Callable[[int], Publisher],
        evaluator: Evaluator | None,
        clock: RunClock | None,
        qualities: Qualities | None = None,
        values: KeptTokenValues | None = None,
    ) -> None:
        """`make_publisher` takes the highest weight version that may be in use."""
        self._config = config
        self._learner = learner
        self._writer = writer
        self._source = source
        self._record = record
        self._lineage = lineage
        self._publications = Publications(
            record, lineage, make_publisher=make_publisher, copy=self._ask
        )
        self._evaluator = evaluator
        self._clock = clock or RunClock()
        self._qualities = qualities or Qualities()
        self._values = values or KeptTokenValues()
        self._consistent = False
        """Learner and scheduler agree on the step; otherwise the next operation is resume."""
        self._kept_step = -1
        """Step of the weights that were published from a checkpoint's files."""
        self._checkpoint: Path | None = None
        """Path of the checkpoint of `record.checkpoint_step`."""
        self._saving: asyncio.Task[Path] | None = None
        """A checkpoint being written during training."""
        self._skipped = 0
        """Batches skipped in a row."""
        self._failing = False
        """The newest checkpoint could not be written; this was logged."""
        self._idle_since_s = 0.0
        self._capture_s = 0.0
        """Time spent copying for checkpoints since the newest step."""

    async def stopped(self) -> None:
        """Stops the publication in progress and the renewals of batches; a checkpoint in progress
        is still written."""
        await self._publications.stop()
        if self._saving is not None:
            self._saving.cancel()  # the waiting, not the writing
        await self._source.drop()

    async def receive(self, message: Any) -> Any:
        """Handles `Advance` and `SaveCheckpoint`."""
        match message:
            case Advance():
                return await self._advance()
            case SaveCheckpoint():
                return await self._save()
        return await super().receive(message)

    async def _advance(self) -> bool:
        self._publications.check()
        if not self._consistent:
            await self._resume()
        elif self._config.max_steps and self._record.step >= self._config.max_steps:
            await self._finish()
            return False
        else:
            self._record.phase = pb.TRAINER_PHASE_WAITING
            await self._train_next()
        return True

    async def _train_next(self) -> None:
        try:
            batch = await self._source.take_batch(wait_s=_BATCH_WAIT_S)
        except ReadersLost:
            await self._ask(CheckReaders())
            raise
        if batch is not None:
            await self._train(batch)

    async def _resume(self) -> None:
        self._record.phase = pb.TRAINER_PHASE_LOADING
        self._record.oldest_checkpoint_step = 0
        # A checkpoint that is still being written is of a committed step: it counts.
        await self._flush()
        checkpoint: Checkpoint | None = await self._ask(Restore())
        floor = await self._lineage.begin(checkpoint, self._source.trained_groups)
        self._record.rewind(checkpoint.history if checkpoint else [])
        self._values.rewound(self._record.step)
        self._record.checkpoint_step = checkpoint.step if checkpoint else 0
        self._checkpoint = checkpoint.path if checkpoint else None
        await self._source.rewind(self._record.step, fence=self._lineage.fence)
        self._publications.prepare(floor)
        await self._publications.publish(self._record.step)
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
        wait_s, began_unix_s = self._now_s() - self._idle_since_s, time.time()
        if step != self._config.max_steps:
            self._source.prepare()
        self._consistent = False
        version = self._record.weight_version
        keep = self._values.chosen(batch.samples, step=step)
        take = Take(plan=batch.plan, weight_version=version, keep=keep)
        result: StepResult = await self._ask(take)
        if result.skipped:
            await self._give_up(batch, result, step)
        elif await self._committed(batch, step):
            self._values.keep(result.token_values, batch.samples, step=step, version=version)
            report_step(
                batch.traceparents,
                step=step,
                weight_version=self._record.weight_version,
                began_unix_s=began_unix_s,
            )
            publish_began_s = self._now_s()
            await self._publications.begin(step)
            times = step_metrics.StepTimes(
                step_s=result.compute_s,
                wait_s=wait_s,
                publish_s=self._now_s() - publish_began_s,
                checkpoint_s=self._capture_s,
                run_s=self._clock.run_s(),
            )
            self._capture_s = 0.0
            self._report(batch, result, step, times)
            self._consistent = True
            self._skipped = 0
            await self._save_if_due(step)
            # The evaluation of the last step begins once its weights are surely published.
            if self._evaluator is not None and step != self._config.max_steps:
                self._publications.when_ended(partial(self._evaluate, step))
        self._idle_since_s = self._now_s()

    async def _give_up(self, batch: PreparedBatch, result: StepResult, step: int) -> None:
        """Tombstone a batch that left the weights unchanged."""
        log.error(
            "batch_skipped",
            step=step,
            batch_id=batch.claim.batch_id,
            task_ids=batch.task_ids,
            reason=result.skipped,
        )
        for claim in batch.claims:
            await self._source.tombstone(claim, f"step {step} skipped: {result.skipped}")
        step_metrics.warn_of_untrained_domains(batch.samples, batch.claim.batch_id, step)
        metrics.show_skipped(batch.samples)
        self._consistent = True
        self._skipped += 1
        if self._skipped == self._config.max_skipped_batches:
            # More steps would only consume the queue.
            raise Diverged(
                f"{self._skipped} batches in a row were skipped, last reason: {result.skipped}"
            )

    async def _committed(self, batch: PreparedBatch, step: int) -> bool:
        try:
            # A step whose commits end in the middle is undone by the rewind of the resume.
            for claim in batch.claims:
                await self._source.commit(claim, step=step)
        except (NotFound, FailedPrecondition) as error:
            # Its groups belong to another batch now: the step must be taken back.
            log.error("step_discarded", step=step, batch_id=batch.claim.batch_id, error=str(error))
            return False
        return True

    def _report(
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
        step_metrics.warn_of_untrained_domains(batch.samples, batch.claim.batch_id, step)
        self._record.append(done)
        if batch.rollouts and step % self._config.logged_rollouts_every_steps == 0:
            self._record.show_rollouts(batch.rollouts)
        self._qualities.add(batch.samples.outcomes_by_version, result.stats.gaps)
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
            refill_groups=batch.samples.refill_groups,
        )

    def _warn(self, result: StepResult, step: int, batch_id: str) -> None:
        """Log warnings about a step that was taken."""
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
            log.warning("updates_cut_short", step=step, reason=result.cut_short)

    def _evaluate(self, step: int, published: bool) -> None:
        if self._evaluator is not None:
            self._evaluator.reached(step, published=published)

    async def _save(self) -> tuple[int, str]:
        """Save a checkpoint of the newest step, durable on return."""
        if not self._consistent:
            raise Unavailable("training is being resumed: no consistent state to save yet")
        await self._flush()
        await self._publications.settle()
        step = self._record.step
        return step, str(await (await self._begin_save(step)))

    async def _save_if_due(self, step: int) -> None:
        if step - self._record.checkpoint_step < self._config.checkpoint.every_steps:
            return
        # One at a time: host memory has room for two copies.
        if self._saving is None or self._saving.done():
            await self._begin_save(step)

    async def _begin_save(self, step: int) -> asyncio.Task[Path]:
        """Copy the state to save; the write runs beside training."""
        began_s = self._now_s()
        contents = await self._ask(Capture())
        self._capture_s += self._now_s() - began_s
        write = WriteCheckpoint(
            contents=contents,
            step=step,
            weight_version=self._record.weight_version,
            history=self._record.history,
            lineage=self._lineage.name,
            fence=self._lineage.began_fence,
        )
        self._saving = asyncio.create_task(self._written(write))
        # A caller that does not wait for the task finds its error in the log.
        self._saving.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._saving

    async def _written(self, write: WriteCheckpoint) -> Path:
        began_s, step, version = self._now_s(), write.step, write.weight_version
        try:
            path: Path = await self._writer.ask(write, timeout_s=UNBOUNDED_S)
        except ResourceExhausted as error:
            # Training continues; the next step retries, and the line is not repeated.
            if not self._failing:
                log.error("checkpoint_failed", step=step, error=str(error))
            self._failing = True
            metrics.CHECKPOINT_FAILING.set(1)
            raise
        # Not kept during the copy: the next checkpoint uses its memory.
        del write
        self._failing = False
        self._record.checkpoint_step = step
        self._checkpoint = path
        await self._lineage.saved(path, step=step, weight_version=version)
        # Only now: until then the record names an older checkpoint.
        prune = Prune(recorded=self._lineage.recorded_step)
        self._record.oldest_checkpoint_step = await self._writer.ask(prune, timeout_s=UNBOUNDED_S)
        write_s = self._now_s() - began_s
        metrics.show_checkpoint(step, write_s)
        log.info("checkpoint_saved", step=step, path=str(path), write_s=round(write_s, 3))
        if self._config.checkpoint.copy_to:
            await self._writer.ask(CopyOut(path=path), timeout_s=UNBOUNDED_S)
        return path

    async def _flush(self) -> int:
        flush = FlushCheckpoints(recorded=self._lineage.recorded_step)
        oldest_step: int = await self._writer.ask(flush, timeout_s=UNBOUNDED_S)
        return oldest_step

    async def _finish(self) -> None:
        if self._record.phase == pb.TRAINER_PHASE_FINISHED:
            return
        if self._record.checkpoint_step != self._record.step:
            await self._save()
        # The final measurement must be of the kept model.
        if self._kept_step != self._record.step:
            await self._publications.publish(self._record.step, checkpoint=self._checkpoint)
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
