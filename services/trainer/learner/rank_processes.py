"""The processes of ranks 1 and up, which compute each tree together with the learner.

Owns their start, their end and the sending of orders. Rank 0 is the learner's thread; every other
rank is a child process with its own model replica. All replicas get the same orders and so stay
equal. `forge.rl.parallel.context_parallel` splits a tree over ranks.

When one rank fails, all end: the next exchange of the others finds its connection closed. A failed
rank first writes its error to the store of the group, so the others report the cause. The
supervisor then restarts the learner with new ranks.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
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
from services.trainer.learner.model_replica import ModelReplica, Order, Take

_FOREVER = timedelta(days=3650)
"""A rank waits for its next order without a limit."""
_END_S = 5.0
_LOOK_S = 0.05
_FAILURE = "failure"
"""Key of the error of the rank that failed first."""


class RankFailed(RuntimeError):
    """Another rank failed, and with it the group; the message names the rank and its error."""


class Ranks:
    """The processes of ranks 1 and up, and the group of all ranks."""

    def __init__(self, config: TrainerConfig) -> None:
        """Returns once all ranks have joined the group; each then builds its replica.

        Raises `RuntimeError` when a rank ends before.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="forge-ranks-"))
        meeting = str(self._folder / "meeting")
        # Not forked: torch's threads and autograd do not survive a fork.
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
        """Wait until all ranks are about to join: `_join` itself does not notice a dead rank."""
        for rank, process in enumerate(self._processes, start=1):
            while not _here(meeting, rank).exists():
                process.join(_LOOK_S)
                if process.exitcode is not None:
                    raise RuntimeError(
                        f"rank {rank} ended with exit code {process.exitcode} during its start"
                    )

    def send(self, order: Order) -> None:
        """Send an order to all other ranks. Raises `RankFailed`."""
        if isinstance(order, Take):  # each rank plans the trees: they are much larger than the ids
            order = replace(order, plan=replace(order.plan, trees=()))
        with self.together():
            try:
                dist.broadcast_object_list([order], src=0, group=self.group)
            except RuntimeError as error:
                raise RankLost(str(error)) from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Context of the exchanges of rank 0 with the others. Raises `RankFailed`."""
        try:
            yield
        except RankLost as consequence:
            raise RankFailed(self._cause() or str(consequence)) from consequence

    def _cause(self) -> str:
        """The error of the rank that failed first, or the exit code of a dead one; "" if neither
        is known."""
        if self._store.check([_FAILURE]):
            failure: str = self._store.get(_FAILURE).decode()
            return f"{failure}; details are in its log; the other ranks ended as a consequence"
        for rank, process in enumerate(self._processes, start=1):
            process.join(_END_S)
            if (code := process.exitcode) is not None and code < 0:
                return f"rank {rank} failed: killed by {signal.Signals(-code).name}"
            if code:
                return f"rank {rank} failed: exit code {code}"
        return ""

    def close(self) -> None:
        """Kill the processes and remove the group."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_END_S)
        with suppress(RuntimeError):
            if dist.is_initialized():
                dist.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)


def _here(meeting: str, rank: int) -> Path:
    """The file that a rank creates when it is about to join."""
    return Path(f"{meeting}-{rank}")


def _join(meeting: str, *, rank: int, ranks: int) -> tuple[dist.ProcessGroup, FileStore]:
    _here(meeting, rank).touch()
    if sys.platform == "linux":
        # Ranks of a host accept any connection: never on the address of the host's name.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = FileStore(meeting, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_FOREVER)
    group = dist.group.WORLD
    assert group is not None
    return group, store


def _follow(rank: int, config: TrainerConfig, meeting: str) -> None:
    """The main function of a rank: returns when another rank is lost, exits when it fails."""
    # A stop signal may reach all processes of the service; the current step must still end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    configure_logging("trainer", config.instance_id, level=config.log_level, file=config.log_file)
    torch.set_num_threads(config.threads())
    group, store = _join(meeting, rank=rank, ranks=config.ranks)
    try:
        _obey(ModelReplica(config, group=group), group)
    except RankLost as consequence:
        cause = store.get(_FAILURE).decode() if store.check([_FAILURE]) else str(consequence)
        log.warning("rank_ended", rank=rank, because=cause)
    except Exception as error:
        expected = isinstance(error, ForgeError)  # its message is enough
        log.error("rank_failed", rank=rank, error=repr(error), exc_info=not expected)
        # The first failure stays.
        store.compare_set(_FAILURE, "", f"rank {rank} failed: {type(error).__name__}: {error}")
        raise SystemExit(1) from None


def _obey(replica: ModelReplica, group: dist.ProcessGroup) -> None:
    """Carry out orders until rank 0 closes its connection. Raises `RankLost` when another rank is
    lost during an order."""
    replica.check()
    orders: list[Order | None] = [None]
    while True:
        try:
            dist.broadcast_object_list(orders, src=0, group=group)
        except RuntimeError:
            return  # rank 0 has closed its connection
        (order,) = orders
        assert order is not None
        replica.obey(order)
