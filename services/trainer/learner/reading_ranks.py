"""The transport of orders to the ranks that read batches, beside training.

Owns a group of the first ranks of all data groups, and on each of them a thread that takes part in
its exchanges. An exchange is one order to each rank and its answer, so no rank waits for another
one while it reads. The threads are not those of training: a batch is read during the step before.
`services.trainer.batches.divided_reading` gives the orders.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from forge.core.errors import Unavailable
from forge.rl.parallel.world import World
from forge.runtime.process.credential_reload import reload_credentials
from forge.runtime.rpc.channel import Channels
from forge.runtime.security.bearer import Bearer
from forge.runtime.security.credentials import Security
from forge.runtime.telemetry import log
from services.trainer.batches.group_reader import GroupReader
from services.trainer.batches.read_orders import ReadAnswer, ReadOrder
from services.trainer.batches.reading import ReadersLost
from services.trainer.config import TrainerConfig
from services.trainer.learner.rank_group import FOREVER


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingGroups:
    """The groups of a world whose ranks read."""

    firsts: dist.ProcessGroup | None
    """The first ranks of all data groups; None on other ranks."""
    peers: dist.ProcessGroup | None
    """All ranks of this rank's data group; None if it is alone in it."""


def reading_groups(world: World, config: TrainerConfig) -> ReadingGroups:
    """All ranks call it, right after they have joined."""
    count, ranks = world.shape.data_groups, world.shape.ranks
    size = ranks // count
    limit = timedelta(seconds=config.mesh.join_s)
    firsts = dist.new_group(list(range(0, ranks, size)), backend="gloo", timeout=limit)
    if not world.rank % size:  # elsewhere it is no group
        _set_pg_timeout(FOREVER, firsts)
    peers = None
    for first in range(0, ranks if size > 1 else 0, size):
        made = dist.new_group(list(range(first, first + size)), backend="gloo", timeout=limit)
        if first == world.rank - world.rank % size:
            _set_pg_timeout(FOREVER, made)
            peers = made
    return ReadingGroups(firsts=None if world.rank % size else firsts, peers=peers)


class ReadChannel:
    """Rank 0's end."""

    def __init__(self, firsts: dist.ProcessGroup) -> None:
        self._group = firsts
        self._waiting: queue.SimpleQueue[tuple[Sequence[ReadOrder], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self.broken = ""
        """Reason why no exchange is possible any more; "" while one is."""
        self.count = dist.get_world_size(firsts)
        threading.Thread(target=self._run, name="reading", daemon=True).start()

    def exchange(self, orders: Sequence[ReadOrder]) -> Future[list[ReadAnswer | None]]:
        """The answers to the orders of all ranks; that of rank 0 is None. Its error is
        `ReadersLost`."""
        done: Future[list[ReadAnswer | None]] = Future()
        self._waiting.put((orders, done))
        return done

    def close(self) -> None:
        """End the thread after the exchange in progress."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (asked := self._waiting.get()) is not None:
            orders, done = asked
            if not done.set_running_or_notify_cancel():
                continue
            try:
                if self.broken:
                    raise ReadersLost(self.broken)
                done.set_result(self._exchanged(orders))
            except RuntimeError as error:
                self.broken = f"a rank that reads does not respond: {error}"
                done.set_exception(ReadersLost(self.broken))
            except ReadersLost as error:
                done.set_exception(error)

    def _exchanged(self, orders: Sequence[ReadOrder]) -> list[ReadAnswer | None]:
        own: list[Any] = [None]
        dist.scatter_object_list(own, [None, *orders[1:]], group=self._group, group_src=0)
        answers: list[Any] = [None] * self.count
        dist.gather_object(None, answers, group=self._group, group_dst=0)
        return answers


class DataGroupReaders:
    """The first ranks of all data groups, as `DataGroups`. The ranks may start again, and with them
    the channel."""

    def __init__(self, own: GroupReader, *, count: int) -> None:
        """`own` reads for rank 0."""
        self.own = own
        self._count = count
        self._channel: ReadChannel | None = None

    @property
    def count(self) -> int:
        """Data groups."""
        return self._count

    @property
    def broken(self) -> str:
        """Reason why the ranks must start again; "" if they need not."""
        return self._channel.broken if self._channel is not None else ""

    def connect(self, channel: ReadChannel | None) -> None:
        """Use this channel from now on; None: the ranks have ended."""
        before, self._channel = self._channel, channel
        if before is not None:
            before.close()

    async def exchange(self, orders: Sequence[ReadOrder]) -> Sequence[ReadAnswer]:
        """See `DataGroups`. Raises `Unavailable` while the ranks start."""
        channel = self._channel
        if channel is None:
            raise Unavailable("the ranks that read have not started")
        others = asyncio.wrap_future(channel.exchange(orders))
        own = await self.own.answer(orders[0])
        return [own, *(one for one in await others if one is not None)]


class RankReader:
    """The thread of a rank above 0 that reads for its data group."""

    def __init__(self, firsts: dist.ProcessGroup, config: TrainerConfig, *, rank: int) -> None:
        """Raises `ConfigError` for a credential or TLS files that cannot be read."""
        self._group = firsts
        self._rank = rank
        token = config.rank_token_file
        bearer = Bearer(file=token, setting="rank_token_file") if token else None
        self._security = Security.from_config(config, bearer=bearer)
        self._channels = Channels(self._security)
        self.reader = GroupReader(self._channels)
        log.info("rank_reads", rank=rank, token_file=token)
        threading.Thread(target=self._run, name="reading", daemon=True).start()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        reload = asyncio.create_task(
            reload_credentials(self._security, on_tls=self._channels.renew)
        )
        try:
            while True:
                order = await _in_thread(self._next_order)
                answer = await self.reader.answer(order)
                await _in_thread(partial(self._send, answer))
        except RuntimeError as error:
            # The group ends with rank 0, and this process with both.
            log.debug("reading_ended", rank=self._rank, error=str(error))
        finally:
            reload.cancel()

    def _next_order(self) -> ReadOrder:
        orders: list[Any] = [None]
        dist.scatter_object_list(orders, None, group=self._group, group_src=0)
        order: ReadOrder = orders[0]
        return order

    def _send(self, answer: ReadAnswer) -> None:
        dist.gather_object(answer, None, group=self._group, group_dst=0)


async def _in_thread(call: Callable[[], Any]) -> Any:
    """The result of a blocking call, on a thread that does not keep the process."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="reading-exchange", daemon=True).start()
    return await asyncio.wrap_future(done)
