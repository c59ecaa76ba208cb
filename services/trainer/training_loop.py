"""Drives training from its first step to the end of the run.

Owns the errors that end the process and those that are retried: training waits out an outage of
etcd, pool and scheduler, and stops for a setting that cannot be right, another trainer, weights
that diverged, or a step that always ends with the same error of this process.
"""

from __future__ import annotations

import asyncio

from forge.core.errors import (
    ActorStopped,
    ConfigError,
    ForgeError,
    InvalidArgument,
    first_line,
)
from forge.core.extras import place_of
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.process.service import ServiceContext
from forge.runtime.telemetry import log
from forge.v1 import trainer_pb2
from services.trainer.actors.steering import ResumeHold, ReviewCanary
from services.trainer.actors.training import UNBOUNDED_S, Advance, Diverged
from services.trainer.learner.rank_processes import RankGone
from services.trainer.published.publisher import Superseded
from services.trainer.published.versions import PublishedVersions
from services.trainer.reporting.run_record import TrainingRecord

_RETRY_S = 1.0
MOST_EQUAL_FAILURES = 3
"""Attempts at a step that end with one error which no peer can mend; then the process ends."""


class StepFailed(ForgeError):
    """A step always ends with the same error; the message has step, error and place."""


class _EqualFailures:
    """Counts errors of this process that are equal, with no step between them."""

    def __init__(self) -> None:
        self._last = (0, "")
        self._count = 0

    def add(self, error: Exception, *, step: int) -> StepFailed | None:
        """Return the error that ends the process once there are `MOST_EQUAL_FAILURES`."""
        said = f"{type(error).__name__}: {first_line(error)}{place_of(error)}"
        self._count = self._count + 1 if self._last == (step, said) else 1
        self._last = (step, said)
        if self._count < MOST_EQUAL_FAILURES:
            return None
        return StepFailed(f"step {step + 1} failed {self._count} times in a row: {said}")


class TrainingLoop:
    """Advances training and reviews the canary, each in a task of its own."""

    def __init__(
        self,
        context: ServiceContext,
        training: ActorRef,
        steering: ActorRef,
        *,
        record: TrainingRecord,
        versions: PublishedVersions,
        canaries: bool,
    ) -> None:
        """`canaries` tells whether each version is published to a share of the workers first."""
        self._context = context
        self._training = training
        self._steering = steering
        self._record = record
        self._versions = versions
        self._canaries = canaries
        self._advancing = asyncio.create_task(self._advance(), name="training")
        self._reviewing = asyncio.create_task(self._review_canaries(), name="canaries")

    def pause(self) -> None:
        """Begins no further step; the present one ends by itself."""
        self._advancing.cancel()

    async def stop(self) -> None:
        """Ends both tasks."""
        await cancel_and_wait(self._advancing, self._reviewing)

    async def _advance(self) -> None:
        """Advance training until it has finished or a fatal error stops the process."""
        more, resumed, failures = True, False, _EqualFailures()
        while more:
            try:
                if not resumed:
                    # First: no worker takes the weights of a resumed run over a hold.
                    await self._steering.ask(ResumeHold(), timeout_s=UNBOUNDED_S)
                    resumed = True
                more = await self._training.ask(Advance(), timeout_s=UNBOUNDED_S)
            except ActorStopped:
                return
            except ConfigError as error:
                self._context.fail("training", error)
                return
            except (Superseded, Diverged) as error:
                log.error(type(error).__name__.lower(), error=str(error))
                self._context.stop()
                return
            except Exception as error:
                # An actor with an error outside the tree is restarted by its supervisor.
                if isinstance(error, ForgeError):
                    log.warning("training_waits", error=str(error))
                if _is_own(error):
                    failure = failures.add(error, step=self._record.step)
                    if failure is not None:
                        self._context.fail("training", failure)
                        return
                await asyncio.sleep(_RETRY_S)

    async def _review_canaries(self) -> None:
        """Let the automatic canary take its steps."""
        while True:
            await asyncio.sleep(_RETRY_S)
            if not (self._canaries or self._versions.hold.automatic):
                continue
            finished = self._record.phase == trainer_pb2.TRAINER_PHASE_FINISHED
            try:
                await self._steering.ask(ReviewCanary(finished=finished), timeout_s=UNBOUNDED_S)
            except ActorStopped:
                return
            except ForgeError as error:
                log.warning("canary_waits", error=str(error))


def _is_own(error: Exception) -> bool:
    """Whether a retry runs into the same error, whatever becomes of the peers: a wrong value or a
    fault of the code. A lost rank is a peer, too."""
    return isinstance(error, InvalidArgument) or not isinstance(error, ForgeError | RankGone)
