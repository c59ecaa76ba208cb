"""Builds and connects the parts of a trainer process: actors, batch source, servicers."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from transformers import AutoConfig

from forge.client.operator import Operator
from forge.client.rollout_tables import note_tables
from forge.client.task_files import read_tasks
from forge.core.errors import ActorStopped, ConfigError, ForgeError, Unavailable
from forge.core.routes import RouteShape
from forge.rl.model.policy import attention_channels
from forge.runtime import weights
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination import Instance
from forge.runtime.process.gpu_watch import watch_gpus
from forge.runtime.process.service import ServiceContext
from forge.runtime.settings.agreed import agreed_model
from forge.runtime.telemetry import log
from forge.runtime.weights import TRAINER_STANDBYS
from forge.runtime.weights.delta import DeltaEncoder
from forge.v1 import (
    inference_pb2_grpc,
    pool_pb2_grpc,
    scheduler_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)
from services.trainer import metrics
from services.trainer.actors.checkpointing import CheckpointWriter
from services.trainer.actors.learner import DescribeRoutes, LearnerActor
from services.trainer.actors.steering import ResumeHold, ReviewCanary, Steering
from services.trainer.actors.token_values import DIRECTORY, KeptTokenValues, TokenValueStore, expire
from services.trainer.actors.training import (
    UNBOUNDED_S,
    Advance,
    Diverged,
    SaveCheckpoint,
    Training,
)
from services.trainer.checkpoint.remote_copies import RemoteCopies, newest_step
from services.trainer.checkpoint.retention import Retention
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.checkpoint_follower import CheckpointFollower, CheckpointSource
from services.trainer.config import TrainerConfig
from services.trainer.data.batch_source import BatchSource, SourceSettings
from services.trainer.data.group_reader import GroupReader
from services.trainer.data.speed import speed_baselines
from services.trainer.evaluation import DEFAULTS, Evaluator, run_id_in
from services.trainer.learner.batch_reading import batch_reading
from services.trainer.learner.reading_ranks import Readers
from services.trainer.lineage import WORKERS, Lineage
from services.trainer.model.placement import computed_type
from services.trainer.published.files import HeldFiles
from services.trainer.published.local_ways import LocalWays
from services.trainer.published.recovery import ServedVersions
from services.trainer.published.versions import PublishedVersions
from services.trainer.reporting.run_clock import FILE_NAME, RunClock
from services.trainer.reporting.run_record import TrainingRecord
from services.trainer.reporting.sinks import make_sinks, rollout_tables
from services.trainer.service import AUDITED, FULL_NAME, SCOPES, TrainerServicer
from services.trainer.weight_publisher import Publisher, Superseded

_RETRY_S = 1.0


class TrainerApp:
    """One trainer process."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._config: TrainerConfig = context.config
        self._versions = PublishedVersions(kept=self._config.kept_versions)
        self._ways = LocalWays(workers=self._workers, directory=self._config.weights_dir)
        self._record = TrainingRecord(
            max_steps=self._config.max_steps,
            metrics_file=self._config.metrics_file,
            sinks=make_sinks(self._config),
        )
        self._address = ""
        self._training: ActorRef | None = None
        self._steering: ActorRef | None = None
        self._driver: asyncio.Task[None] | None = None
        self._batches: BatchSource | None = None
        self._readers: Readers | None = None
        """The ranks that read batches; None: this process reads all."""
        self._lineage: Lineage | None = None
        self._following: asyncio.Task[None] | None = None
        self._canaries: asyncio.Task[None] | None = None
        self._superseded = False
        kept = self._config.checkpoint
        self._retention = Retention(last=kept.keep_last, every_steps=kept.keep_every_steps)
        self._source_of_checkpoints = CheckpointSource(Path(self._config.checkpoint.dir))
        self._evaluator: Evaluator | None = None
        self._clock = RunClock(Path(self._config.checkpoint.dir) / FILE_NAME)

    async def start(self) -> None:
        """Starts actors, servicers and training."""
        self._evaluator = self._make_evaluator()
        self._context.metadata["incarnation"] = secrets.token_hex(8)
        watch_gpus(self._context, device=self._config.device)
        lineage = await self._elected()
        self._context.metadata["dtype"] = computed_type(self._config)
        await note_tables(self._context.coordinator, rollout_tables(self._config))
        actors = self._context.actors
        copies = await self._fetched_copies(lineage)
        store = CheckpointStore(Path(self._config.checkpoint.dir), self._retention)
        await lineage.check(store)
        sending = self._source_of_checkpoints.sending
        writer = await actors.spawn(
            lambda: CheckpointWriter(store, sending, copies), name="checkpoints"
        )
        if self._config.read_from == "ranks":
            groups = self._config.mesh_shape.data_groups
            self._readers = Readers(GroupReader(self._context.channels), count=groups)
        learner = await actors.spawn(
            lambda: LearnerActor(self._config, store, self._readers), name="learner"
        )
        values = await self._spawn_values()
        source = partial(
            self._source,
            await asyncio.to_thread(self._attention_channels),
            await learner.ask(DescribeRoutes(), timeout_s=UNBOUNDED_S),
        )
        self._training = await actors.spawn(
            lambda: Training(
                self._config,
                learner=learner,
                writer=writer,
                source=source(),
                record=self._record,
                lineage=lineage,
                make_publisher=self._make_publisher,
                evaluator=self._evaluator,
                clock=self._clock,
                qualities=self._versions.qualities,
                values=KeptTokenValues(values, self._config.token_values),
            ),
            name="training",
        )
        self._steering = await self._spawn_steering(lineage)
        metrics.follow_qualities(self._versions.quality_of)
        server = self._context.server
        server.add_service(
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
            TrainerServicer(
                self._record,
                self._training,
                self._source_of_checkpoints,
                steering=self._steering,
                values=values,
                versions=self._versions,
                workers=self._workers,
            ),
            full_name=FULL_NAME,
            scopes=SCOPES,
            audited=AUDITED,
        )
        server.add_service(
            inference_pb2_grpc.add_WeightServiceServicer_to_server,
            weights.WeightServicer(
                lambda: self._versions.weights,
                deltas=DeltaEncoder(),
                sent=metrics.WEIGHT_SENT_BYTES.labels("0").inc,
            ),
            full_name=weights.FULL_NAME,
        )
        self._driver = asyncio.create_task(self._drive(self._training, self._steering))
        self._canaries = asyncio.create_task(self._review_canaries(self._steering), name="canaries")
        self._following = asyncio.create_task(self._until_superseded(lineage), name="leadership")

    async def drain(self) -> None:
        """Finish the current step and save a checkpoint, so no step is lost."""
        if self._driver is not None:
            self._driver.cancel()
        if self._evaluator is not None:
            await self._evaluator.stop()
        self._record.close()
        if self._batches is not None:
            self._batches.hurry()
        if self._training is not None and not self._superseded:
            give_up_s = time.monotonic() + self._config.drain_s
            step, _ = await self._training.ask(SaveCheckpoint(), timeout_s=self._config.drain_s)
            self._clock.stop()
            await self._hand_over(step, give_up_s=give_up_s)

    async def stop(self) -> None:
        """Stops training, closes the metric sinks and resigns."""
        await cancel_and_wait(self._driver, self._following, self._canaries)
        self._ways.keep(())
        if self._lineage is not None:
            await self._lineage.resign()
        await asyncio.to_thread(self._record.close_sinks)

    async def _elected(self) -> Lineage:
        """Waits until this trainer leads; before, it opens no checkpoint and loads no model."""
        config, context = self._config, self._context
        self._lineage = Lineage(
            context.coordinator,
            trainer=f"{config.instance_id} {context.metadata['incarnation']}",
            location=f"{socket.gethostname()}:{Path(config.checkpoint.dir).resolve()}",
            start_over=config.start_over,
            ttl_s=config.lease_ttl_s,
            model=agreed_model(config.model_path),
        )
        await self._campaign(self._lineage)
        return self._lineage

    async def _fetched_copies(self, lineage: Lineage) -> RemoteCopies | None:
        """The copies at `checkpoint.copy_to`; fetches the newest one if this host lacks it.

        Raises `ConfigError` for an invalid URL, `Unavailable` if it does not answer.
        """
        kept = self._config.checkpoint
        if not kept.copy_to:
            return None
        directory = Path(kept.dir)
        copies = RemoteCopies(kept.copy_to, self._retention)
        here = newest_step(directory)
        lacking = await lineage.lacks(here)
        if lacking is not None:
            fetch = partial(copies.fetch_newer, directory, lineage=lacking, after=here)
            if step := await asyncio.to_thread(fetch):
                log.info("checkpoint_fetched", step=step, source=kept.copy_to)
        return copies

    async def _campaign(self, lineage: Lineage) -> None:
        """Until elected, fetches the checkpoints of the leader."""
        context, directory = self._context, Path(self._config.checkpoint.dir)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                context.fail("checkpoint-follower", error)

        follower = CheckpointFollower(context, directory, self._retention)
        following = asyncio.create_task(follower.follow())
        following.add_done_callback(ended)
        try:
            await lineage.campaign(context.stand_by)
            await follower.arrived()
        finally:
            await cancel_and_wait(following)

    async def _hand_over(self, step: int, *, give_up_s: float) -> None:
        """Waits until standbys on other hosts have the last checkpoint."""
        with suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(max(0.0, give_up_s - time.monotonic())):
                standbys = len(await self._context.coordinator.values(TRAINER_STANDBYS))
                await self._source_of_checkpoints.handed_over(step, standbys=standbys)

    async def _until_superseded(self, lineage: Lineage) -> None:
        """Ends the process, without a checkpoint, once another trainer leads."""
        await lineage.superseded()
        self._superseded = True
        log.error("superseded", error="another trainer leads: one policy has one trainer")
        self._context.stop()

    async def _drive(self, training: ActorRef, steering: ActorRef) -> None:
        """Advance training until it has finished or a fatal error stops the process."""
        self._address = await self._own_address()
        more, resumed = True, False
        while more:
            try:
                if not resumed:
                    # First: no worker takes the weights of a resumed run over a hold.
                    await steering.ask(ResumeHold(), timeout_s=UNBOUNDED_S)
                    resumed = True
                more = await training.ask(Advance(), timeout_s=UNBOUNDED_S)
            except ActorStopped:
                return
            except ConfigError as error:
                self._context.fail("training", error)
                return
            except (Superseded, Diverged) as error:
                log.error(type(error).__name__.lower(), error=str(error))
                self._context.stop()
                return
            except ForgeError as error:
                log.warning("training_waits", error=str(error))
                await asyncio.sleep(_RETRY_S)
            except Exception:
                # The actor's supervisor restarts it or ends the process.
                await asyncio.sleep(_RETRY_S)

    async def _review_canaries(self, steering: ActorRef) -> None:
        """Let the automatic canary take its steps."""
        while True:
            await asyncio.sleep(_RETRY_S)
            if not (self._config.canary.share or self._versions.hold.automatic):
                continue
            finished = self._record.phase == trainer_pb2.TRAINER_PHASE_FINISHED
            try:
                await steering.ask(ReviewCanary(finished=finished), timeout_s=UNBOUNDED_S)
            except ActorStopped:
                return
            except ForgeError as error:
                log.warning("canary_waits", error=str(error))

    async def _own_address(self) -> str:
        """The address under which this process is registered; waits for the registration."""
        incarnation = self._context.metadata["incarnation"]
        discovery = self._context.coordinator.discover("trainer")
        while True:
            with suppress(Unavailable):
                # An entry with the same id may belong to a process just killed.
                (own, *_) = await discovery.wait(
                    timeout_s=self._config.lease_ttl_s,
                    where=lambda found: found.metadata.get("incarnation") == incarnation,
                )
                return own.address

    def _make_publisher(self, floor: int) -> Publisher:
        coordinator = self._context.coordinator
        return Publisher(
            coordinator, self._versions, source=self._address, floor=floor, ways=self._ways
        )

    async def _spawn_steering(self, lineage: Lineage) -> ActorRef:
        files = HeldFiles(Path(self._config.checkpoint.dir) / "held")
        return await self._context.actors.spawn(
            lambda: Steering(
                self._context.coordinator,
                self._versions,
                files,
                source=lambda: self._address,
                fence=lambda: lineage.fence,
                workers=self._workers,
                served=ServedVersions(self._context.channels),
                canary=self._config.canary,
            ),
            name="steering",
        )

    async def _spawn_values(self) -> ActorRef:
        directory = Path(self._config.checkpoint.dir) / DIRECTORY
        settings = self._config.token_values
        store = await self._context.actors.spawn(
            lambda: TokenValueStore(directory, settings), name="token-values"
        )
        self._context.keep_running(expire(store), name="age of token values")
        return store

    async def _workers(self) -> list[Instance]:
        """The workers in discovery."""
        found: list[Instance] = []
        for kind in WORKERS:
            discovery = self._context.coordinator.discover(kind)
            await discovery.known()
            found += discovery.instances
        return sorted(found, key=lambda one: (one.kind, one.instance_id))

    def _make_evaluator(self) -> Evaluator | None:
        """Raises `InvalidArgument` that names file, line and field of an invalid task."""
        config = self._config
        if not config.evaluation.tasks:
            return None
        return Evaluator(
            Operator(self._context.coordinator, self._context.channels),
            self._record,
            tasks=read_tasks(Path(config.evaluation.tasks), DEFAULTS),
            settings=config.evaluation,
            max_steps=config.max_steps,
            run_id=run_id_in(Path(config.checkpoint.dir)),
        )

    def _source(self, channels: int, route_shape: RouteShape | None) -> BatchSource:
        config = self._config
        self._batches = BatchSource(
            self._context.remote("scheduler", scheduler_pb2_grpc.SchedulerServiceStub),
            batch_reading(
                config,
                self._context.remote("pool", pool_pb2_grpc.PoolServiceStub),
                self._readers,
                channels=channels,
                route_shape=route_shape,
            ),
            baselines_s=lambda: speed_baselines(self._record.steps),
            settings=SourceSettings(
                trainer_id=config.instance_id,
                max_groups=config.batch_groups,
                patience_s=config.patience_s,
                refill_groups=config.advantages.refill_groups,
                refill_wait_s=config.advantages.refill_wait_s,
            ),
        )
        return self._batches

    def _attention_channels(self) -> int:
        return attention_channels(AutoConfig.from_pretrained(self._config.model_path))
