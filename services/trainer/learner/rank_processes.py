"""The processes of ranks 1 and up, which take each step together with the learner.

Owns their start, their end and the sending of orders; `rank_group` forms their group. Rank 0 is the
learner's thread. The other ranks are child processes, or processes that torchrun started on this
host and others; each has its own model replica. All replicas get the same orders and so stay equal.
`forge.rl.parallel` divides model, batch and trees over them.

When one rank fails, all end: the next exchange of the others finds its connection closed. A failed
rank first writes its error to the store of the group, so the others report the cause. The
supervisor then restarts the learner with new ranks; under torchrun the process ends, and torchrun
restarts all of them.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from forge.core.errors import ConfigError, ForgeError
from forge.rl.collectives import RankLost, lost_ranks
from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.parallel.world import World
from forge.runtime.process.stop_signals import STOP_SIGNALS
from forge.runtime.telemetry import configure_logging, log
from services.trainer.checkpoint.files import named_tensors
from services.trainer.config import TrainerConfig
from services.trainer.learner.heartbeats import (
    LOST_S,
    ChildHeartbeats,
    Heartbeats,
    end_rank,
    keep_touching,
)
from services.trainer.learner.model_replica import (
    Capture,
    ModelReplica,
    Order,
    OwnTrees,
    ReadPublished,
    Take,
    TakePart,
    TakeRead,
)
from services.trainer.learner.rank_group import announcement, join, join_torchrun
from services.trainer.learner.reading_ranks import RankReader, ReadingGroups, reading_groups
from services.trainer.learner.segment_orders import SegmentRanks
from services.trainer.learner.segment_server import SegmentCopy, SegmentServer
from services.trainer.learner.shared_save import PartWriter, SharedSave
from services.trainer.torchrun_rank import report_failure, under_torchrun

_END_S = 5.0
_LOOK_S = 0.05
_MISSET = f"{ConfigError.__name__}: "
_FAILURE = "failure"
"""Key of the error of the rank that failed first."""


@dataclass(frozen=True, slots=True)
class _Scattered:
    """Announces orders that differ from rank to rank."""


class RankFailed(RuntimeError):
    """Another rank failed, and with it the group; the message names the rank and its error."""


class RankGone(RankFailed):
    """It has no error of its own: it was killed, was silent, or its host is away."""


class Ranks:
    """The processes of ranks 1 and up, and the group of all ranks."""

    def __init__(self, config: TrainerConfig) -> None:
        """Returns once all ranks have joined the group; each then builds its replica.

        Raises `RuntimeError` when a rank ends before, and under torchrun for a second group.
        """
        self._processes: list[BaseProcess] = []
        self._folder: Path | None = None
        self._saves = 0
        self._closed = False
        self._heartbeats: Heartbeats | ChildHeartbeats | None = None
        self._silent = ""
        """The error of a child that was ended because it was silent."""
        self._exchanges = 0
        self._in_exchange = False
        if under_torchrun():
            self.world, self._store = join_torchrun(config)
            self._heartbeats = _heartbeats(self.world, self._store)
        else:
            self._heartbeats = ChildHeartbeats(
                self._start(config),
                on_lost=self._end_silent,
                exchange=lambda: self._exchanges if self._in_exchange else 0,
                on_stuck=self._end_stuck,
            )
        log.info(
            "ranks_started",
            ranks=self.world.shape.ranks,
            pids=[one.pid for one in self._processes],
            dp_replicate=self.world.shape.dp_replicate,
            dp_shard=self.world.shape.dp_shard,
            cp=self.world.shape.cp,
            tp=self.world.shape.tp,
        )
        self.reading: ReadingGroups | None = None
        """The groups of the ranks that read batches; None: rank 0 reads all."""
        if config.read_from == "ranks":
            self.reading = reading_groups(self.world, config)
        self.segments: SegmentRanks | None = None
        """The ranks that hold segments of the published weights; None: rank 0 holds all."""
        if config.publish_from == "ranks":
            ranks = self.world.shape.ranks
            self.segments = SegmentRanks(self._store, ranks=ranks, lost=self._lost)

    def _start(self, config: TrainerConfig) -> list[Path]:
        """Return the files that the processes touch."""
        self._folder = Path(tempfile.mkdtemp(prefix="forge-ranks-"))
        meeting = self._folder / "meeting"
        # Not forked: torch's threads and autograd do not survive a fork.
        spawn = multiprocessing.get_context("spawn")
        self._processes = [
            spawn.Process(target=_follow_here, args=(rank, config, meeting), daemon=True)
            for rank in range(1, config.ranks)
        ]
        for process in self._processes:
            process.start()
        try:
            self._await(meeting, limit_s=config.mesh.join_s)
            self.world, self._store = join(meeting, config, rank=0)
        except BaseException:
            self.close()
            raise
        return [announcement(meeting, rank) for rank in range(1, config.ranks)]

    def _end_silent(self, rank: int) -> None:
        process = self._processes[rank - 1]
        log.error("rank_silent", rank=rank, limit_s=LOST_S, exit_code=process.exitcode)
        if process.exitcode is None:
            self._silent = f"rank {rank} failed: it sent no heartbeat for {LOST_S:.0f} s"
            process.kill()

    def _end_stuck(self, rank: int) -> None:
        """End this process and the others: nothing interrupts its exchange. A supervisor starts it
        again."""
        for process in self._processes:
            process.kill()
        end_rank(f"rank {rank} was lost, and an exchange with it does not end", rank=0)

    def _await(self, meeting: Path, *, limit_s: float) -> None:
        """Wait until all ranks are about to join: `join` itself notices a dead rank late."""
        give_up_s = time.monotonic() + limit_s
        for rank, process in enumerate(self._processes, start=1):
            while not announcement(meeting, rank).exists():
                process.join(_LOOK_S)
                if process.exitcode is not None:
                    raise RuntimeError(
                        f"rank {rank} ended with exit code {process.exitcode} during its start"
                    )
                if time.monotonic() > give_up_s:
                    raise RuntimeError(f"rank {rank} did not start within {limit_s:g} s")

    def send(self, order: Order) -> None:
        """Send an order to all other ranks. Raises `RankFailed`."""
        if isinstance(order, TakeRead):
            order = replace(order, keep=())
        if isinstance(order, Take) and isinstance(order.plan, BatchPlan):
            # Each rank plans the trees: they are much larger than the ids.
            order = replace(order, plan=replace(order.plan, trees=(), mini_batches=()), keep=())
        self._broadcast(order)

    def send_parts(self, orders: Sequence[Order]) -> None:
        """Send to each other rank the order of its data group. Raises `RankFailed`."""
        shape = self.world.shape
        by_rank = [None, *(orders[rank // shape.group_ranks] for rank in range(1, shape.ranks))]
        self._broadcast(_Scattered())
        with self.together(), lost_ranks():
            dist.scatter_object_list([None], by_rank, src=0)

    def _broadcast(self, order: Order | _Scattered) -> None:
        with self.together(), lost_ranks():
            dist.broadcast_object_list([order], src=0)

    def new_save(self) -> SharedSave:
        """Begin and return the next checkpoint that all ranks write."""
        self._saves += 1
        return SharedSave(
            self._store, number=self._saves, ranks=self.world.shape.ranks, lost=self._lost
        )

    def _lost(self) -> str:
        """Reason why the ranks no longer answer; "" if they do. torchrun ends them all, this one
        too."""
        if self._closed:
            return "the ranks have ended"
        for rank, process in enumerate(self._processes, start=1):
            if process.exitcode is not None:
                return f"rank {rank} has ended with exit code {process.exitcode}"
        return ""

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of the exchanges of rank 0 with the others. Raises as `fail`."""
        self._exchanges, self._in_exchange = self._exchanges + 1, True
        try:
            yield
        except RankLost as consequence:
            self.fail(str(consequence), consequence)
        finally:
            self._in_exchange = False

    def fail(self, because: str, consequence: BaseException | None = None) -> NoReturn:
        """Raises `RankFailed` with the error of the rank that failed first, or `ConfigError` if
        that was one; `RankGone` with the end of a dead one, or with `because`."""
        if not self._silent and self._store.check([_FAILURE]):
            failure = self._store.get(_FAILURE).decode()
            said = f"{failure}; details are in its log; the other ranks ended as a consequence"
            report_failure(said)
            raise (ConfigError if f" failed: {_MISSET}" in said else RankFailed)(said)
        cause = self._silent or self._end_of_child() or because
        report_failure(cause)
        raise RankGone(cause) from consequence

    def _end_of_child(self) -> str:
        """The signal or exit code of a dead rank; "" if none is known."""
        for rank, process in enumerate(self._processes, start=1):
            process.join(_END_S)
            if (code := process.exitcode) is not None and code < 0:
                return f"rank {rank} failed: killed by {signal.Signals(-code).name}"
            if code:
                return f"rank {rank} failed: exit code {code}"
        return ""

    def close(self) -> None:
        """Kill the processes and remove the group."""
        self._closed = True
        if self._heartbeats is not None:
            self._heartbeats.stop()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_END_S)
        with suppress(RuntimeError):
            if dist.is_initialized():
                dist.destroy_process_group()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _heartbeats(world: World, store: Store) -> Heartbeats:
    return Heartbeats(store, rank=world.rank, ranks=world.shape.ranks)


def follow_torchrun(config: TrainerConfig) -> None:
    """The main function of a rank above 0 under torchrun; returns when the group ends."""

    def join_others() -> tuple[World, Store]:
        world, store = join_torchrun(config)
        _heartbeats(world, store)
        return world, store

    _follow(config, join_others)


def _follow_here(rank: int, config: TrainerConfig, meeting: Path) -> None:
    """The main function of a child process."""

    def join_others() -> tuple[World, Store]:
        joined = join(meeting, config, rank=rank)
        keep_touching(announcement(meeting, rank))
        return joined

    _follow(config, join_others)


def _follow(config: TrainerConfig, join_others: Callable[[], tuple[World, Store]]) -> None:
    """Returns when another rank is lost, exits when this one fails."""
    # A stop signal may reach all processes of the service; the current step must still end.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    configure_logging("trainer", config.instance_id, level=config.log_level, file=config.log_file)
    torch.set_num_threads(config.threads())
    try:
        world, store = join_others()
    except RuntimeError as error:
        report_failure(f"it could not join the others: {error}")
        raise
    try:
        _obey(config, world, store)
    except RankLost as consequence:
        cause = store.get(_FAILURE).decode() if store.check([_FAILURE]) else str(consequence)
        log.warning("rank_ended", rank=world.rank, reason=cause)
    except Exception as error:
        rank = world.rank
        expected = isinstance(error, ForgeError)  # its message is enough
        log.error("rank_failed", rank=rank, error=repr(error), exc_info=not expected)
        said = f"{type(error).__name__}: {error}"
        report_failure(said)
        # The first failure stays.
        store.compare_set(_FAILURE, "", f"rank {rank} failed: {said}")
        raise SystemExit(1) from None


def _obey(config: TrainerConfig, world: World, store: Store) -> None:
    """Carry out orders until rank 0 closes its connection. Raises `RankLost` when another rank is
    lost during an order."""
    # First: wrong files and a port in use are known before the model is loaded.
    trees = _own_trees(config, world)
    with _serving_segments(store, config, rank=world.rank) as segments:
        replica = ModelReplica(config, world=world, trees=trees)
        replica.check()
        _obey_orders(replica, world, PartWriter(store, rank=world.rank), segments)


def _own_trees(config: TrainerConfig, world: World) -> OwnTrees | None:
    """Starts to read if this rank is the first of its data group; None: rank 0 reads all."""
    if config.read_from != "ranks":
        return None
    groups = reading_groups(world, config)
    if groups.firsts is None:
        return OwnTrees(taken=None, peers=groups.peers)
    reading = RankReader(groups.firsts, config, rank=world.rank)
    return OwnTrees(taken=reading.reader.taken, peers=groups.peers)


@contextmanager
def _serving_segments(
    store: Store, config: TrainerConfig, *, rank: int
) -> Iterator[SegmentServer | None]:
    """Context of a rank above 0 in which it sends its segments; None: rank 0 sends all."""
    if config.publish_from != "ranks":
        yield None
        return
    server = SegmentServer(store, config, rank=rank)
    try:
        yield server
    finally:
        server.stop()


def _obey_orders(
    replica: ModelReplica, world: World, parts: PartWriter, segments: SegmentServer | None
) -> None:
    while True:
        try:
            order = _next_order()
        except RuntimeError:
            return  # rank 0 has closed its connection
        if isinstance(order, TakePart):
            log.debug("batch_part", rank=world.rank, tree_tokens=order.part.tree_tokens)
        answer = replica.obey(order)
        if isinstance(order, Capture):
            parts.start(answer, number=order.number)
        elif isinstance(order, ReadPublished) and order.number and segments is not None:
            segments.hold(order.number, _copy_of(replica, answer[0]))
        answer = None  # the thread alone keeps the copy, until it is written


def _copy_of(replica: ModelReplica, tensors: Mapping[str, Tensor]) -> SegmentCopy:
    return SegmentCopy(
        tensors=named_tensors(tensors),
        segment=replica.segment(),
        sizes=replica.sizes(),
        aliases=replica.tied_names(),
    )


def _next_order() -> Order:
    orders: list[Any] = [None]
    dist.broadcast_object_list(orders, src=0)
    if isinstance(orders[0], _Scattered):
        dist.scatter_object_list(orders, None, src=0)
    order: Order = orders[0]
    return order
