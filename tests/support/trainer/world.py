"""Stand-ins for everything around the training actor, which tell what it did and fail on demand."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.types import StepResult
from forge.rl.losses.stats import PolicyStats
from forge.runtime.actors.actor import Actor
from forge.runtime.actors.actor_system import ActorRef, ActorSystem
from services.trainer.actors.checkpointing import (
    CopyOut,
    FlushCheckpoints,
    Prune,
    WriteCheckpoint,
)
from services.trainer.actors.learner import CheckReaders, Restore, TakeSnapshot
from services.trainer.actors.training import Advance, Training
from services.trainer.batches.batch_source import LeasedBatch, PreparedBatch
from services.trainer.checkpoint.store import Checkpoint
from services.trainer.config import TrainerConfig
from services.trainer.learner.model_replica import Capture, Take
from services.trainer.published.publisher import Snapshot
from services.trainer.reporting.run_clock import RunClock
from services.trainer.reporting.run_record import TrainingRecord
from services.trainer.samples.samples import BatchSamples
from services.trainer.setting_tables import CheckpointSettings


@dataclass(slots=True, kw_only=True)
class World:
    """Everything around the training actor: what it did, and what is to go wrong."""

    events: list[str] = field(default_factory=list)
    faults: dict[str, Exception] = field(default_factory=dict)
    """Raised once, when that is done next; by event, or by its first word."""
    skip: str = ""
    gap: float = 0.0
    """Between the log-probs of trainer and engine."""
    retries: int = 0
    """Of the next steps, for want of memory."""
    saved: Checkpoint | None = None
    disk: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the disk answers."""
    remote: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while `checkpoint.copy_to` answers."""
    captured: Callable[[], object | None] = lambda: None
    """The newest contents of a checkpoint, as long as anything keeps them."""
    etcd: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while etcd answers."""
    batches: int = 100
    refills: int = 0
    """Claims of each batch besides its own."""
    kept: list[str] = field(default_factory=list)
    """The checkpoint that each publication was read from; "" for the learner's memory."""
    evaluated: list[str] = field(default_factory=list)
    """What the evaluator was told."""
    now_s: float = 0.0
    """Moves when something is done that takes time."""
    takes_s: dict[str, float] = field(default_factory=dict)
    """How long each event takes, by its first word."""

    def __post_init__(self) -> None:
        self.etcd.set()

    def do(self, event: str) -> None:
        self.spend(event)
        fault = self.faults.pop(event, None) or self.faults.pop(event.split()[0], None)
        if fault is not None:
            self.events.append(f"{event} fails")
            raise fault
        self.events.append(event)

    def spend(self, event: str) -> None:
        """The time of an event that is not told."""
        self.now_s += self.takes_s.get(event.split()[0], 0.0)


class Captured:
    """The contents of a checkpoint."""


class FakeLearner(Actor):
    def __init__(self, world: World) -> None:
        self._world = world

    async def receive(self, message: Any) -> Any:
        world = self._world
        match message:
            case Take():
                world.do("step")
                skipped, world.skip = world.skip, ""
                stats = PolicyStats(inference_gap_mean=world.gap)
                return StepResult(
                    loss=0.5,
                    grad_norm=1.0,
                    skipped=skipped,
                    stats=stats,
                    compute_s=world.takes_s.get("step", 0.0),
                    plan=BatchPlan(trees=(), plan_s=0.0, token_budget=64),
                    memory_retries=world.retries,
                    shortage="no memory" if world.retries else "",
                )
            case TakeSnapshot(step=step, checkpoint=checkpoint):
                world.spend("copy")
                world.kept.append(str(checkpoint or ""))
                return Snapshot(step=step, tensors=[])
            case Capture():
                world.spend("capture")
                contents = Captured()
                world.captured = weakref.ref(contents)
                return contents
            case CheckReaders():
                world.do("check_readers")
                return None
            case Restore():
                world.do("restore")
                return world.saved
        return await super().receive(message)


class FakeWriter(Actor):
    def __init__(self, world: World) -> None:
        self._world = world

    async def receive(self, message: Any) -> Any:
        match message:
            case WriteCheckpoint(step=step, weight_version=version, history=history):
                await self._world.disk.wait()
                self._world.do(f"save {step}")
                self._world.saved = Checkpoint(
                    path=Path("/saved"),
                    step=step,
                    weight_version=version,
                    history=history.until(step),
                )
                return self._world.saved.path
            case CopyOut(path=path):
                self._world.do(f"copy {path}")
                await self._world.remote.wait()
                return None
            case FlushCheckpoints() | Prune():
                return self._world.saved.step if self._world.saved else 0
        return await super().receive(message)


class FakeSource:
    def __init__(self, world: World) -> None:
        self._world = world

    async def take_batch(self, *, wait_s: float) -> PreparedBatch | None:
        if not self._world.batches:
            return None
        self._world.batches -= 1
        self._world.do("take")
        idle = asyncio.create_task(asyncio.sleep(0))
        samples = BatchSamples(
            samples=(), outcomes={"code": [1.0]}, groups=1, trajectories=1,
            flat_groups=0, excluded=0,
        )  # fmt: skip
        return PreparedBatch(
            claim=LeasedBatch(batch_id="b", task_ids=("t",), renewal=idle),
            refills=tuple(
                LeasedBatch(batch_id=f"r{number}", task_ids=(f"t{number}",), renewal=idle)
                for number in range(self._world.refills)
            ),
            samples=samples,
            plan=BatchPlan(trees=(), plan_s=0.0),
        )

    def prepare(self) -> None:
        self._world.do("prepare")

    async def commit(self, claim: LeasedBatch, *, step: int) -> None:
        self._world.do(f"{'commit' if claim.batch_id == 'b' else 'commit_refill'} {step}")

    async def tombstone(self, claim: LeasedBatch, reason: str) -> None:
        self._world.do(f"tombstone {reason}")

    async def trained_groups(self) -> int:
        return 0

    async def rewind(self, step: int, *, fence: int) -> None:
        self._world.do(f"rewind {step}")

    async def release(self) -> None:
        self._world.do("release")

    async def drop(self) -> None:
        pass


class FakePublisher:
    def __init__(self, world: World, floor: int) -> None:
        self._world = world
        self.version = floor

    @property
    def next_version(self) -> int:
        return self.version + 1

    async def publish(self, snapshot: Snapshot) -> int:
        await self._world.etcd.wait()
        self._world.do(f"publish {snapshot.step}")
        self.version += 1
        return self.version


class FakeLineage:
    name = "lineage"
    fence = began_fence = 1
    recorded_step = 0

    async def begin(self, checkpoint: Checkpoint | None, trained_groups: Any) -> int:
        return checkpoint.weight_version if checkpoint else 0

    def require_leadership(self) -> None:
        pass

    async def saved(self, path: Path, *, step: int, weight_version: int) -> None:
        pass


class FakeEvaluator:
    def __init__(self, world: World) -> None:
        self._world = world

    def resumed(self) -> None:
        self._world.evaluated.append("resumed")

    def reached(self, step: int, *, published: bool = True) -> None:
        self._world.evaluated.append(f"{step} {'published' if published else 'not published'}")


@dataclass(slots=True, kw_only=True)
class Run:
    """A training actor in its world."""

    world: World
    record: TrainingRecord
    training: ActorRef
    writer: ActorRef

    async def advance(self, times: int = 1) -> list[str]:
        """What was done, in order, down to the disk if it answers."""
        self.world.events.clear()
        for _ in range(times):
            await self.training.ask(Advance(), timeout_s=30)
            if self.world.disk.is_set():
                await self.writer.ask(FlushCheckpoints(), timeout_s=30)
        return list(self.world.events)


@asynccontextmanager
async def run_in(
    world: World, *, max_steps: int, clock: RunClock | None = None, copy_to: str = ""
) -> AsyncIterator[Run]:
    """One trainer process, which saves a checkpoint every second step."""
    actors = ActorSystem("test")
    record = TrainingRecord(max_steps=max_steps, metrics_file="")
    learner = await actors.spawn(lambda: FakeLearner(world), name="learner")
    writer = await actors.spawn(lambda: FakeWriter(world), name="checkpoints")
    source: Any = FakeSource(world)
    publisher: Any = lambda floor: FakePublisher(world, floor)  # noqa: E731
    evaluator: Any = FakeEvaluator(world)
    lineage: Any = FakeLineage()
    training = await actors.spawn(
        lambda: Training(
            TrainerConfig(
                max_steps=max_steps, checkpoint=CheckpointSettings(every_steps=2, copy_to=copy_to)
            ),
            learner=learner,
            writer=writer,
            source=source,
            record=record,
            lineage=lineage,
            make_publisher=publisher,
            evaluator=evaluator,
            clock=clock,
        ),
        name="training",
    )
    yield Run(world=world, record=record, training=training, writer=writer)
    await actors.stop()
