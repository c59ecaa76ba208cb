"""What a sweep of retention looks at, and what it need not look at again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from forge.v1 import common_pb2
from services.pool import retention
from services.pool.data.removal.freed_groups import Freed
from services.pool.maintenance.backup.backup import check
from services.pool.storage.tables import Table
from services.pool.store import PoolStore
from tests.support.pool.records import make_group, make_turn
from tests.support.pool.store import append, change, put_groups, set_states
from tests.support.pool.sweeper import MAX_AGE_S, SETTLED_S, Sweeper

TRAINED = common_pb2.GROUP_STATE_TRAINED
TOMBSTONED = common_pb2.GROUP_STATE_TOMBSTONED


@pytest.fixture
def looked_at(store: PoolStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many entries of the index were read, by sweep; a test begins a new count."""
    counts = [0]
    settled = store.settled

    def counted(**which: Any) -> Any:
        page = settled(**which)
        counts[-1] += len(page)
        return page

    monkeypatch.setattr(store, "settled", counted)
    return counts


def train(store: PoolStore, *, steps: range, settled_unix_s: float = SETTLED_S) -> None:
    """Groups t<step>, each trained by its step."""
    put_groups(store, *(make_group(f"t{step}", step) for step in steps))
    changes = [change(f"t{step}", TRAINED, batch_id="b", step=step) for step in steps]
    set_states(store, *changes, now_unix_s=settled_unix_s)


async def test_groups_that_wait_for_a_checkpoint_are_read_once(
    store: PoolStore, sweeper: Sweeper, looked_at: list[int]
) -> None:
    """At any number and age; newly settled groups are read, and all of them once a checkpoint
    covers one."""
    train(store, steps=range(5, 305))
    sweeping = sweeper.retention(keep_age_s=MAX_AGE_S)
    sweeper.covered_step, sweeper.now_unix_s = 4, SETTLED_S + MAX_AGE_S
    assert await sweeping.sweep() == Freed()
    assert looked_at == [300]
    put_groups(store, make_group("late", 400))
    set_states(store, change("late", TOMBSTONED), now_unix_s=SETTLED_S + 1)
    looked_at.append(0)
    assert await sweeping.sweep() == Freed()
    assert looked_at[-1] == 1
    sweeper.now_unix_s += 1
    assert (await sweeping.sweep()).groups == 1
    sweeper.covered_step = 6
    assert (await sweeping.sweep()).groups == 2


async def test_groups_that_wait_for_their_age_are_read_until_then(
    store: PoolStore, sweeper: Sweeper
) -> None:
    """Also between groups that wait for a checkpoint; need of room may free them earlier."""
    train(store, steps=range(9, 10))
    put_groups(store, make_group("given-up", 20))
    set_states(store, change("given-up", TOMBSTONED), now_unix_s=SETTLED_S + 1)
    train(store, steps=range(10, 11), settled_unix_s=SETTLED_S + 2)
    sweeping = sweeper.retention(keep_age_s=MAX_AGE_S)
    for _ in range(2):
        assert await sweeping.sweep() == Freed()
    sweeper.now_unix_s = SETTLED_S + 1 + MAX_AGE_S
    assert (await sweeping.sweep()).groups == 1


async def test_orphans_are_freed_at_their_age_under_pressure(
    store: PoolStore, sweeper: Sweeper
) -> None:
    """Passed over until they are old, and not longer."""
    append(store, make_turn("lost:0:0"))
    sweeping = sweeper.retention(keep_age_s=MAX_AGE_S, keep_bytes=1)
    for _ in range(2):
        assert await sweeping.sweep() == Freed()
    sweeper.now_unix_s += MAX_AGE_S
    assert (await sweeping.sweep()).groups == 1


async def test_passed_over_groups_are_read_again_in_the_end(
    store: PoolStore, sweeper: Sweeper, looked_at: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set clock may have put a group where no sweep reads."""
    monkeypatch.setattr(retention, "LOOK_AGAIN_S", 60.0)
    train(store, steps=range(5, 8))
    sweeping = sweeper.retention(keep_age_s=0.0)
    for later_s, entries in ((0, 3), (0, 0), (59, 0), (1, 3)):
        looked_at.append(0)
        sweeper.now_unix_s += later_s
        await sweeping.sweep()
        assert looked_at[-1] == entries


async def test_damaged_entry_keeps_only_its_own_group(
    store: PoolStore, sweeper: Sweeper, tmp_path: Path
) -> None:
    """Damaged in value or key: later groups are freed, it is reported once, and `forge pool check`
    names it."""
    put_groups(store, make_group("damaged"), make_group("whole", 1))
    for number, task_id in enumerate(("damaged", "whole")):
        set_states(store, change(task_id, TOMBSTONED), now_unix_s=SETTLED_S + number)
    (key, _), _ = store.read(lambda records: list(records.scan_checksummed(Table.SETTLED)))
    store.write(lambda records: records.put_checksummed(Table.SETTLED, key, b"no checksum"))
    store.write(lambda records: records.put_checksummed(Table.SETTLED, b"\xff\xfe", b"no key"))
    sweeping = sweeper.retention(keep_age_s=0.0)
    sweeper.now_unix_s = SETTLED_S + 1
    with capture_logs() as logs:
        assert (await sweeping.sweep()).groups == 1
        sweeper.now_unix_s += retention.LOOK_AGAIN_S
        assert (await sweeping.sweep()).groups == 0
    told = [line["key"] for line in logs if line["event"] == "settled_entry_damaged"]
    assert told == [key.hex(), "fffe"]
    store.close()
    found = await asyncio.to_thread(lambda: list(check(tmp_path / "shard", lambda done, of: None)))
    assert [str(damage) for damage in found] == [
        "settled damaged (settled at 100.000): the checksum does not match",
        "settled key fffe: the checksum does not match",
    ]
