"""Further processes on this machine that compute each tree together with the learner.

Owns their life and the way of an order to them. Rank 0 is the learner's own thread; every other
rank is a child process with a replica of its own, which is built, stepped and restored by the same
orders, so that all replicas stay the same. How a tree is shared is
`forge.rl.parallel.context_parallel`.

A rank that fails ends all of them: the others meet its closed connection in their next exchange.
Before it closes it leaves its error where all ranks met, so that who ends in consequence names the
cause. The learner's actor is then restarted like after any crash, with new ranks.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from forge.core.errors import ForgeError
from forge.rl.collectives import RankLost
from forge.runtime.telemetry import configure_logging, log
from services.trainer.config import TrainerConfig
from services.trainer.learner.model_replica import Order, Replica, Take

_FOREVER = timedelta(days=3650)
"""A rank waits for orders as long as there are none."""
_END_S = 5.0
_LOOK_S = 0.05
_FAILURE = "failure"
"""Key of the first rank's error."""


class RankFailed(RuntimeError):
    """A further rank failed, and with it the group: which one, and of what."""


class Ranks:
    """The ranks after the first, and the group they are in with it."""

    def __init__(self, config: TrainerConfig) -> None:
        """Returns once all have met; each then builds its replica.

        Raises `RuntimeError` when one ends before.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="forge-ranks-"))
        meeting = str(self._folder / "meeting")
        # Not forked: torch's threads and autograd do not survive that.
        spawn = multiprocessing.get_context("spawn")
        self._processes = [
            spawn.Process(target=_follow, args=(rank, config, meeting), daemon=True)
            for rank in range(1, config.ranks)
        ]
        for process in self._processes:
            process.start()
        try:
            self._await(meeting)
            self.group, self._store = _join(meeting, rank=0, ranks=config.ranks)
        except BaseException:
            self.close()
            raise
        log.info("ranks_started", ranks=config.ranks, pids=[one.pid for one in self._processes])

    def _await(self, meeting: str) -> None:
        """Until all are about to join: once in `_join`, nobody looks after the others any more."""
        for rank, process in enumerate(self._processes, start=1):
            while not _here(meeting, rank).exists():
                process.join(_LOOK_S)
                if process.exitcode is not None:
                    raise RuntimeError(f"rank {rank} ended with {process.exitcode} as it began")

    def tell(self, order: Order) -> None:
        """To all others. Raises `RankFailed` when one of them is gone."""
        if isinstance(order, Take):  # ids travel and are planned anew: trees are many times larger
            order = replace(order, plan=replace(order.plan, trees=()))
        with self.together():
            try:
                dist.broadcast_object_list([order], src=0, group=self.group)
            except RuntimeError as error:
                raise RankLost(str(error)) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """What rank 0 does with the others. Raises `RankFailed` when one of them is gone."""
        try:
            yield
        except RankLost as consequence:
            raise RankFailed(self._cause() or str(consequence)) from consequence

    def _cause(self) -> str:
        """What the first rank that failed said, or how one ended that could not; "" if neither."""
        if self._store.check([_FAILURE]):
            said: str = self._store.get(_FAILURE).decode()
            return f"{said}; its log has more, other ranks ended in consequence"
        for rank, process in enumerate(self._processes, start=1):
            process.join(_END_S)
            if (code := process.exitcode) is not None and code < 0:
                return f"rank {rank} failed: {signal.Signals(-code).name} ended it"
            if code:
                return f"rank {rank} failed: it ended with {code}"
        return ""

    def close(self) -> None:
        """End them, whatever they do."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_END_S)
        with suppress(RuntimeError):
            if dist.is_initialized():
                dist.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)


def _here(meeting: str, rank: int) -> Path:
    """What a rank leaves to say that it has begun."""
    return Path(f"{meeting}-{rank}")


def _join(meeting: str, *, rank: int, ranks: int) -> tuple[dist.ProcessGroup, FileStore]:
    _here(meeting, rank).touch()
    store = FileStore(meeting, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_FOREVER)
    group = dist.group.WORLD
    assert group is not None
    return group, store


def _follow(rank: int, config: TrainerConfig, meeting: str) -> None:
    """The life of a rank: until it is killed, it fails, or rank 0 is gone."""
    # Whoever stops the service may signal all its processes; the step in hand is still to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    configure_logging("trainer", config.instance_id, level=config.log_level, file=config.log_file)
    torch.set_num_threads(config.threads())
    group, store = _join(meeting, rank=rank, ranks=config.ranks)
    try:
        _obey(Replica(config, group=group), group)
    except RankLost as consequence:
        cause = store.get(_FAILURE).decode() if store.check([_FAILURE]) else str(consequence)
        log.warning("rank_ended", rank=rank, because=cause)
    except Exception as error:
        known = isinstance(error, ForgeError)  # its one line says it all
        log.error("rank_failed", rank=rank, error=repr(error), exc_info=not known)
        # Unless another one came first.
        store.compare_set(_FAILURE, "", f"rank {rank} failed: {type(error).__name__}: {error}")
        raise SystemExit(1) from None


def _obey(replica: Replica, group: dist.ProcessGroup) -> None:
    """Order by order, until rank 0 is gone. Raises `RankLost` when any rank is in between."""
    replica.check()
    orders: list[Order | None] = [None]
    while True:
        try:
            dist.broadcast_object_list(orders, src=0, group=group)
        except RuntimeError:
            return  # rank 0 has closed its connection, however it ended
        (order,) = orders
        assert order is not None
        replica.obey(order)
