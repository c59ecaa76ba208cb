"""Further processes on this machine that compute each tree together with the learner.

Owns their life and the way of an order to them. Rank 0 is the learner's own thread; every other
rank is a child process with a replica of its own, which is built, stepped and restored by the same
orders, so that all replicas stay the same. How a tree is shared is `forge.rl.context_parallel`.

A rank that fails ends all of them: the others meet its closed connection in their next exchange.
The learner's actor is then restarted like after any crash, with new ranks.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import tempfile
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from forge.runtime.telemetry import log
from services.trainer.config import TrainerConfig
from services.trainer.replica import Order, Replica, Take

_FOREVER = timedelta(days=3650)
"""A rank waits for orders as long as there are none."""
_END_S = 5.0
_LOOK_S = 0.05


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
            self.group = _join(meeting, rank=0, ranks=config.ranks)
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
        """To all others. Raises `RuntimeError` when one of them is gone."""
        if isinstance(order, Take):  # ids travel and are planned anew: trees are many times larger
            order = replace(order, plan=replace(order.plan, trees=()))
        dist.broadcast_object_list([order], src=0, group=self.group)

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


def _join(meeting: str, *, rank: int, ranks: int) -> dist.ProcessGroup:
    _here(meeting, rank).touch()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=ranks,
        timeout=_FOREVER,
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def _follow(rank: int, config: TrainerConfig, meeting: str) -> None:
    """The life of a rank: until it is killed, or rank 0 is gone."""
    # Whoever stops the service may signal all its processes; the step in hand is still to end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(config.threads())
    group = _join(meeting, rank=rank, ranks=config.ranks)
    replica = Replica(config, group=group)
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
