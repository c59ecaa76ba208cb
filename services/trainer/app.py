"""Builds and connects the parts of a trainer process: actors, batch source, servicers."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from forge.client.operator import Operator
from forge.client.stored.rollout_tables import note_tables
from forge.client.task_files import read_tasks
from forge.core.errors import Unavailable
from forge.core.routes import RouteShape
from forge.runtime import weights
from forge.runtime.actors.actor_system import ActorRef
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination import Instance
from forge.runtime.process.gpu_watch import watch_gpus
from forge.runtime.process.service import ServiceContext
from forge.runtime.weights.bulk import BulkClient, BulkServer
from forge.runtime.weights.client import WeightClient
from forge.runtime.weights.delta import DeltaEncoder
from forge.runtime.weights.group_process import GroupProcess
from forge.v1 import (
    inference_pb2_grpc,
    pool_pb2_grpc,
    scheduler_pb2_grpc,
    trainer_pb2_grpc,
)
from services.trainer import metrics
from services.trainer.actors.checkpointing import CheckpointWriter
from services.trainer.actors.learner import DescribeRoutes, LearnerActor
from services.trainer.actors.steering import Steering
from services.trainer.actors.token_values import DIRECTORY, KeptTokenValues, TokenValueStore, expire
from services.trainer.actors.training import UNBOUNDED_S, SaveCheckpoint, Training
from services.trainer.batches.batch_source import BatchSource, SourceSettings
from services.trainer.batches.group_reader import GroupReader
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.config import TrainerConfig
from services.trainer.evaluation import DEFAULTS, Evaluator, run_id_in
from services.trainer.leadership.checkpoint_follower import CheckpointSource
from services.trainer.leadership.election import TrainerElection
from services.trainer.leadership.lineage import WORKERS, Lineage
from services.trainer.learner.batch_reading import batch_reading
from services.trainer.learner.reading_ranks import DataGroupReaders
from services.trainer.model.placement import computed_type
from services.trainer.published.files import HELD_DIRECTORY, HeldFiles, VersionNumber
from services.trainer.published.groups import WeightGroups
from services.trainer.published.local_copies import LocalCopies
from services.trainer.published.publisher import Publisher
from services.trainer.published.recovery import SILENCE_S, ServedVersions
from services.trainer.published.versions import PublishedVersions
from services.trainer.reporting.run_clock import FILE_NAME, RunClock
from services.trainer.reporting.run_record import TrainingRecord
from services.trainer.reporting.sinks import make_sinks, rollout_tables
from services.trainer.samples.speed import speed_baselines
from services.trainer.service import AUDITED, FULL_NAME, SCOPES, TrainerServicer
from services.trainer.training_loop import TrainingLoop


class TrainerApp:
    """One trainer process."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._config: TrainerConfig = context.config
        self._versions = PublishedVersions(kept=self._config.kept_versions)
        self._groups = self._make_groups()
        self._copies = LocalCopies(
            workers=self._workers, directory=self._config.weights_dir, groups=self._groups
        )
        self._record = TrainingRecord(
            max_steps=self._config.max_steps,
            metrics_file=self._config.metrics_file,
            sinks=make_sinks(self._config),
        )
        self._address = ""
        self._election: TrainerElection | None = None
        self._training: ActorRef | None = None
        self._loop: TrainingLoop | None = None
        self._starting: asyncio.Task[None] | None = None
        self._batches: BatchSource | None = None
        self._readers: DataGroupReaders | None = None
        """The ranks that read batches; None: this process reads all."""
        self._evaluator: Evaluator | None = None
        self._clock = RunClock(Path(self._config.checkpoint.dir) / FILE_NAME)

    async def start(self) -> None:
        """Starts actors, servicers and training, once this trainer leads."""
        config, context = self._config, self._context
        self._evaluator = self._make_evaluator()
        context.metadata["incarnation"] = secrets.token_hex(8)
        watch_gpus(context, device=config.device)
        self._election = TrainerElection(context, config)
        store, copies = await self._election.won()
        context.metadata["dtype"] = computed_type(config)
        await note_tables(context.coordinator, rollout_tables(config))
        sent = self._election.checkpoints_sent
        writer = await context.actors.spawn(
            lambda: CheckpointWriter(store, sent.sending, copies), name="checkpoints"
        )
        learner = await self._spawn_learner(store)
        values = await self._spawn_values()
        self._training = await self._spawn_training(learner, writer, values)
        steering = await self._spawn_steering(self._election.lineage)
        metrics.follow_qualities(self._versions.quality_of)
        self._serve(steering, values, sent)
        self._election.watch()
        self._starting = asyncio.create_task(self._drive(self._training, steering), name="start")

    async def drain(self) -> None:
        """Finish the current step and save a checkpoint, so no step is lost."""
        await cancel_and_wait(self._starting)
        if self._loop is not None:
            self._loop.pause()
        if self._evaluator is not None:
            await self._evaluator.stop()
        self._record.close()
        if self._batches is not None:
            self._batches.hurry()
        election = self._election
        if self._training is not None and election is not None and not election.superseded:
            give_up_s = time.monotonic() + self._config.drain_s
            step, _ = await self._training.ask(SaveCheckpoint(), timeout_s=self._config.drain_s)
            self._clock.stop()
            await election.hand_over(step, give_up_s=give_up_s)

    async def stop(self) -> None:
        """Stops training, closes the metric sinks and resigns."""
        await cancel_and_wait(self._starting)
        if self._loop is not None:
            await self._loop.stop()
        self._copies.keep(())
        if self._election is not None:
            await self._election.resign()
        await asyncio.to_thread(self._record.close_sinks)

    async def _spawn_learner(self, store: CheckpointStore) -> ActorRef:
        if self._config.read_from == "ranks":
            groups = self._config.mesh_shape.data_groups
            self._readers = DataGroupReaders(GroupReader(self._context.channels), count=groups)
        return await self._context.actors.spawn(
            lambda: LearnerActor(self._config, store, self._readers), name="learner"
        )

    async def _spawn_training(
        self, learner: ActorRef, writer: ActorRef, values: ActorRef
    ) -> ActorRef:
        assert self._election is not None
        lineage = self._election.lineage
        model = await asyncio.to_thread(AutoConfig.from_pretrained, self._config.model_path)
        routes = await learner.ask(DescribeRoutes(), timeout_s=UNBOUNDED_S)
        return await self._context.actors.spawn(
            lambda: Training(
                self._config,
                learner=learner,
                writer=writer,
                source=self._source(model, routes),
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

    async def _spawn_steering(self, lineage: Lineage) -> ActorRef:
        files = HeldFiles(Path(self._config.checkpoint.dir) / HELD_DIRECTORY)
        bulk = BulkClient(self._context.security, enabled=self._config.bulk.enabled)
        client = WeightClient(self._context.channels, bulk, silence_s=SILENCE_S)
        return await self._context.actors.spawn(
            lambda: Steering(
                self._context.coordinator,
                self._versions,
                files,
                source=lambda: self._address,
                fence=lambda: lineage.fence,
                workers=self._workers,
                served=ServedVersions(client),
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

    def _serve(self, steering: ActorRef, values: ActorRef, sent: CheckpointSource) -> None:
        assert self._training is not None
        server = self._context.server
        bulk = BulkServer(self._context.security, self._config.bulk, host=self._config.host)
        self._context.undo.callback(bulk.close)
        if self._groups is not None:
            self._groups.start()
            self._context.undo.push_async_callback(self._groups.close)
        server.add_service(
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
            TrainerServicer(
                self._record,
                self._training,
                sent,
                steering=steering,
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
                join=self._groups.join if self._groups is not None else None,
                deltas=DeltaEncoder(),
                bulk=bulk,
                sent=metrics.WEIGHT_SENT_BYTES.labels("0").inc,
            ),
            full_name=weights.FULL_NAME,
        )

    async def _drive(self, training: ActorRef, steering: ActorRef) -> None:
        """Trains once this process is registered: workers fetch weights from its address."""
        self._address = await self._own_address()
        self._loop = TrainingLoop(
            self._context,
            training,
            steering,
            record=self._record,
            versions=self._versions,
            canaries=bool(self._config.canary.share),
        )

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
            coordinator,
            self._versions,
            source=self._address,
            floor=floor,
            copies=self._copies,
            number=VersionNumber(Path(self._config.checkpoint.dir)),
        )

    def _make_groups(self) -> WeightGroups | None:
        config = self._config
        if config.weight_group.backend == "off":
            return None
        host = (config.advertise_host or config.host).strip("[]")
        process = GroupProcess(config.weight_group, host=host, device=config.device)
        return WeightGroups(process, host=host, workers=self._workers)

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

    def _source(self, model: PretrainedConfig, route_shape: RouteShape | None) -> BatchSource:
        config = self._config
        self._batches = BatchSource(
            self._context.remote("scheduler", scheduler_pb2_grpc.SchedulerServiceStub),
            batch_reading(
                config,
                self._context.remote("pool", pool_pb2_grpc.PoolServiceStub),
                self._readers,
                model=model,
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
