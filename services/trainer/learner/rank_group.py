"""The group of a trainer's ranks: how it forms, within a limit.

Owns the meeting of the ranks and the process group that they make; `rank_processes` starts them
and sends orders. Ranks on one host meet at a file, ranks of torchrun at its store. Each phase has a
limit, since a rank may end or freeze in the middle of it: then the start fails with one line, and
the supervisor repeats it.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from forge.rl.device import device_of
from forge.rl.parallel.world import World, make_world
from services.trainer.config import TrainerConfig
from services.trainer.learner.heartbeats import end_rank

FOREVER = timedelta(days=3650)
"""A rank of a group waits for its next order without a limit; heartbeats notice a lost rank."""
_LOOK_S = 0.05
_INTERFACE = "GLOO_SOCKET_IFNAME"
_JOINED: list[bool] = []
"""Not empty once this process has joined a group of torchrun, which has one group."""


@dataclass(slots=True, kw_only=True)
class Meeting:
    """One rank's attempt to meet the others under torchrun."""

    rank: int
    limit_s: float
    awaits: str = "torchrun's store does not answer"
    """Reason why the ranks have not met yet."""

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Context that ends this process at the limit: nothing interrupts a connection."""
        timer = threading.Timer(self.limit_s, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        said = f"the ranks did not meet within {self.limit_s:g} s: {self.awaits}"
        end_rank(said, rank=self.rank)


def announcement(meeting: Path, rank: int) -> Path:
    """The file that a rank creates when it is about to join the others of its host."""
    return meeting.with_name(f"{meeting.name}-{rank}")


def join(meeting: Path, config: TrainerConfig, *, rank: int) -> tuple[World, Store]:
    """Join the ranks of this host at the file `meeting`. Raises `RuntimeError` after `join_s`."""
    announcement(meeting, rank).touch()
    with _on_loopback():
        return _group(config, FileStore(str(meeting), config.ranks), rank=rank, local_rank=rank)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Context in which gloo listens on loopback: ranks of a host accept any connection, so never on
    the address of the host's name. Other parts of the process keep its environment."""
    before = os.environ.get(_INTERFACE)
    if sys.platform == "linux":
        os.environ[_INTERFACE] = "lo"
    try:
        yield
    finally:
        os.environ.pop(_INTERFACE, None)
        if before is not None:
            os.environ[_INTERFACE] = before


def join_torchrun(config: TrainerConfig) -> tuple[World, Store]:
    """Join the ranks that torchrun started; ends the process after `join_s`.

    Raises `RuntimeError` for a second group, and when torchrun's store ends.
    """
    if _JOINED:
        raise RuntimeError("the group of ranks has ended: torchrun starts a new one")
    _JOINED.append(True)
    meeting = Meeting(rank=int(os.environ["RANK"]), limit_s=config.mesh.join_s)
    with meeting.limited():
        limit = timedelta(seconds=meeting.limit_s)
        kept, rank, ranks = next(rendezvous("env://", timeout=limit))
        store = own_store(kept, meeting, ranks=ranks)
        meeting.awaits = f"connections between them are missing; see {_INTERFACE}"
        world, store = _group(config, store, rank=rank, local_rank=int(os.environ["LOCAL_RANK"]))
        # NCCL connects in the first exchange, for which one rank may load its weights much longer.
        store.set_timeout(FOREVER)
        return world, store


def own_store(kept: Store, meeting: Meeting, *, ranks: int) -> Store:
    """The part of a store that these processes share.

    torchrun keeps its store when it restarts ranks: without this, a rank would connect to the
    address of a process that has ended. Rank 0 announces a new name with the tokens of the others
    until each has found its own there.
    """
    token = secrets.token_hex(8)
    kept.set(f"token/{meeting.rank}", token)
    if meeting.rank:
        meeting.awaits = "missing: rank 0"
        return PrefixStore(_announced(kept, token, meeting.rank), kept)
    while missing := [one for one in range(1, ranks) if not kept.check([f"found/{token}/{one}"])]:
        meeting.awaits = f"missing: rank {', '.join(map(str, missing))}"
        here = [one for one in range(1, ranks) if kept.check([f"token/{one}"])]
        tokens = {str(one): kept.get(f"token/{one}").decode() for one in here}
        kept.set("announced", json.dumps([token, tokens]))
        time.sleep(_LOOK_S)
    return PrefixStore(token, kept)


def _announced(kept: Store, token: str, rank: int) -> str:
    """The name that rank 0 announces together with this rank's token."""
    while True:
        if kept.check(["announced"]):
            name, tokens = json.loads(kept.get("announced"))
            if tokens.get(str(rank)) == token:
                kept.set(f"found/{name}/{rank}", "")
                return str(name)
        time.sleep(_LOOK_S)


def _group(
    config: TrainerConfig, store: Store, *, rank: int, local_rank: int
) -> tuple[World, Store]:
    shape = config.mesh_shape
    device = device_of(config.device, rank=local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=shape.ranks,
        timeout=timedelta(seconds=config.mesh.join_s),
    )
    world = make_world(shape, device)
    _set_pg_timeout(FOREVER)
    return world, store
