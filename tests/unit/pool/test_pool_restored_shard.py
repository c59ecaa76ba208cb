"""Groups trained since the backup that a shard was restored from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from forge.core.errors import Unavailable
from forge.runtime.rpc.remote import Remote
from forge.v1 import common_pb2, trainer_pb2
from services.pool import restored_shard
from services.pool.maintenance.backup.backup import backup
from services.pool.maintenance.backup.restore import restore
from services.pool.metrics import TRAINED_SINCE_BACKUP
from services.pool.restored_shard import FILE, note_restored, watch_restored
from services.pool.store import PoolStore
from services.pool.trainer_status import trained_step
from tests.support.pool.records import make_group
from tests.support.pool.store import change, put_groups, set_states

LOADING, WAITING = trainer_pb2.TRAINER_PHASE_LOADING, trainer_pb2.TRAINER_PHASE_WAITING


def quiet(done: int, total: int) -> None:
    """No progress."""


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restored_shard, "PERIOD_S", 0.0)


async def watched(directory: Path, steps: list[int | None]) -> list[dict[str, Any]]:
    """The log of a watch while the trainers are at these steps, one after the other."""
    left = iter(steps)

    async def trained_step() -> int | None:
        try:
            return next(left)
        except StopIteration:
            raise asyncio.CancelledError from None

    with structlog.testing.capture_logs() as lines, contextlib.suppress(asyncio.CancelledError):
        await watch_restored(directory, "s0", trained_step)
    return [dict(line) for line in lines]


async def test_trainer_beyond_the_backup_is_an_error_until_it_returns(tmp_path: Path) -> None:
    """Told once, with both steps; also after a restart of the pool. A trainer at a step of the
    backup ends it for good."""
    note_restored(tmp_path, 7)
    for _ in range(2):
        (line,) = await watched(tmp_path, [None, 9, 10])
        assert (line["event"], line["backup_step"], line["trained_step"]) == (
            "trained_since_backup",
            7,
            9,
        )
        assert TRAINED_SINCE_BACKUP._value.get() == 2
    assert [line["event"] for line in await watched(tmp_path, [9, None, 7])] == [
        "trained_since_backup",
        "restored_shard_fits",
    ]
    assert TRAINED_SINCE_BACKUP._value.get() == 0
    assert await watched(tmp_path, [99]) == []


async def test_restore_notes_the_newest_step_of_the_backup(
    open_store: Callable[..., PoolStore], tmp_path: Path
) -> None:
    """A shard that was never restored has no such file."""
    store = open_store(shard="s0")
    put_groups(store, make_group("a", 0), make_group("b", 1))
    set_states(store, change("a", common_pb2.GROUP_STATE_TRAINED, batch_id="x", step=3))
    store.close()
    backup(tmp_path / "shard", tmp_path / "copy", quiet)
    assert not (tmp_path / "shard" / FILE).exists()
    assert restore(tmp_path / "copy", tmp_path / "restored", quiet) == []
    (line,) = await watched(tmp_path / "restored", [4])
    assert (line["backup_step"], line["trained_step"]) == (3, 4)


@dataclass(frozen=True)
class Trainer:
    """Stands in for an instance and its stub."""

    status: trainer_pb2.GetTrainerStatusResponse | None
    instance_id: str = "trainer"

    async def GetTrainerStatus(
        self, request: Any, *, timeout: float
    ) -> trainer_pb2.GetTrainerStatusResponse:
        if self.status is None:
            raise Unavailable("the trainer is gone")
        return self.status


@dataclass(frozen=True)
class Trainers(Remote[Any]):
    """Stands in for a Remote."""

    found: tuple[Trainer, ...]

    def instances(self) -> tuple[Any, ...]:
        return self.found

    def stub(self, instance: Any) -> Any:
        return instance


async def test_trainer_that_loads_or_is_silent_has_no_step() -> None:
    """Its step is not that of its checkpoint yet."""

    def at(step: int, phase: trainer_pb2.TrainerPhase.ValueType) -> Trainer:
        return Trainer(trainer_pb2.GetTrainerStatusResponse(step=step, phase=phase))

    assert await trained_step(Trainers((Trainer(None), at(0, LOADING)))) is None
    assert await trained_step(Trainers((Trainer(None), at(0, LOADING), at(5, WAITING)))) == 5
