"""What an instance that stands by keeps of the shards, and when it throws that away."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from forge.core.errors import FailedPrecondition, Unavailable
from forge.core.queue.groups import Phase
from forge.v1 import common_pb2, pool_pb2
from services.pool import store as store_module
from services.pool.data.commands import DiscardCopy
from services.pool.store import PoolStore
from services.scheduler.leadership import standby
from services.scheduler.leadership.recovery import register_shards
from services.scheduler.leadership.standby import ShardCopies
from services.scheduler.shards.pool_shards import ShardScans
from services.scheduler.state.stored_group import StoredGroup
from tests.support.pool.records import make_group, make_reward
from tests.support.pool.store import change, commit, put_groups, reward, seal, set_states
from tests.support.runtime.waiting import until
from tests.support.scheduler.standby import StoreScans

TRAINED = common_pb2.GROUP_STATE_TRAINED


@pytest.fixture
def scans(tmp_path: Path) -> Any:
    """Two shards, of which one holds three groups."""
    scans = StoreScans({name: PoolStore(tmp_path / name, shard=name) for name in ("s0", "s1")})
    put_groups(scans.stores["s0"], *(make_group(name, index) for index, name in enumerate("abc")))
    yield scans
    for store in scans.stores.values():
        store.close()


def names(groups: list[StoredGroup]) -> list[str]:
    return [stored.group.spec.task_id for stored in groups]


async def test_standby_scans_only_changed_groups(scans: StoreScans) -> None:
    """The first scan reads everything, later ones the changes, also if there are none."""
    copies = ShardCopies(scans, most_settled=99)
    store = scans.stores["s0"]
    await copies.refresh("s0")
    await copies.refresh("s0")
    set_states(store, change("b", TRAINED, batch_id="x", step=1))
    put_groups(store, make_group("d", 3))
    await copies.refresh("s0")
    await copies.refresh("s0")
    await copies.refresh("s0", count=True)
    assert scans.sent == [3, 0, 2, 0, 0]
    assert names(copies.hand_over(["s0"]).groups) == ["a", "b", "c", "d"]


async def test_discarded_copy_of_an_import_leaves_the_standby(scans: StoreScans) -> None:
    """A later leader would have the group of an aborted move twice: here, and at its source."""
    copies = ShardCopies(scans, most_settled=99)
    await copies.refresh("s0")
    commit(scans.stores["s0"], DiscardCopy(task_id="b", fence=1))
    await copies.refresh("s0", count=True)
    assert names(copies.hand_over(["s0"]).groups) == ["a", "c"]


async def test_shard_of_another_process_is_scanned_whole(scans: StoreScans, tmp_path: Path) -> None:
    """After a restart, a failover or a restored backup no part of the copy is kept."""
    copies = ShardCopies(scans, most_settled=99)
    await copies.refresh("s0")
    scans.stores["s0"].close()
    scans.stores["s0"] = PoolStore(tmp_path / "restored", shard="s0")
    put_groups(scans.stores["s0"], make_group("older", 0))
    await copies.refresh("s0", count=True)
    assert names(copies.hand_over(["s0"]).groups) == ["older"]


async def test_standby_logs_whole_scans_only(scans: StoreScans) -> None:
    """Not each scan of an empty shard, or of one where all groups changed."""
    copies = ShardCopies(scans, most_settled=99)
    with capture_logs() as logged:
        for _ in range(3):
            await copies._follow("s0")
            await copies._follow("s1")
            every = [change(name, TRAINED, batch_id="x", step=1) for name in "abc"]
            set_states(scans.stores["s0"], *every)
    assert [(line["event"], line["groups"]) for line in logged] == [
        ("pool_shard_scanned", 3),
        ("pool_shard_scanned", 0),
    ]


async def test_interrupted_scan_changes_nothing(scans: StoreScans) -> None:
    """The copy stays at its mark: the changes are requested again."""
    copies = ShardCopies(scans, most_settled=99)
    await copies.refresh("s0")
    set_states(scans.stores["s0"], change("a", TRAINED, step=1), change("b", TRAINED, step=1))
    scans.break_after = 2
    with pytest.raises(Unavailable):
        await copies.refresh("s0")
    scans.break_after = None
    assert await copies.refresh("s0", count=True) == 2
    assert [stored.group.step for stored in copies.hand_over(["s0"]).groups] == [1, 1, 0]


async def test_interrupted_first_scan_leaves_no_copy(scans: StoreScans) -> None:
    """Half a shard is none."""
    copies = ShardCopies(scans, most_settled=99)
    scans.break_after = 2
    with pytest.raises(Unavailable):
        await copies.refresh("s0")
    scans.break_after = None
    assert await copies.refresh("s0") == 3


async def test_copied_groups_are_used_by_one_term(scans: StoreScans) -> None:
    """A term changes them: an instance that stands again afterwards scans everything."""
    copies = ShardCopies(scans, most_settled=99)
    await copies.refresh("s0", count=True)
    copies.hand_over(["s0"])
    assert await copies.refresh("s0") == 3


async def test_copy_of_a_settled_group_is_small(scans: StoreScans) -> None:
    """No payload, no rollouts, no messages; late rewards count all the same."""
    store = scans.stores["s0"]
    group = make_group("big", 9, payload_json='{"x": "' + 10_000 * "x" + '"}')
    group.task_digest = b"digest"
    put_groups(store, group)
    seal(store, "big:0:0", turns=0, rewards=[])
    seal(store, "big:1:7", turns=0, rewards=[make_reward(value=0.5)], now_unix_s=200.0)
    set_states(store, change("big", TRAINED, batch_id="x", step=1))
    copies = ShardCopies(scans, most_settled=99)
    await copies.refresh("s0")
    reward(store, make_reward(value=0.375), trajectory_id="big:0:0")
    await copies.refresh("s0", count=True)
    found = copies.hand_over(["s0"])
    *_, stored = found.groups
    assert len(stored.entry.task) < 100
    assert stored.entry.digest == b"digest"
    assert not stored.group.rollouts
    assert stored.group.counted == (0, 7)
    assert stored.at_rest
    assert not stored.outcomes
    (left_out,) = found.left_out
    assert list(left_out.recent["code"]) == [200.0, 0.5, 100.0, 0.375]


class OlderScans(ShardScans):
    """A shard that returns no marks."""

    def __init__(self) -> None: ...

    def live(self) -> frozenset[str]:
        return frozenset({"s0"})

    async def scan(self, shard: str, **_: Any) -> AsyncGenerator[pool_pb2.ScanGroupsResponse, None]:
        yield pool_pb2.ScanGroupsResponse(group=make_group())


async def test_pool_of_an_earlier_version_is_named() -> None:
    """It ignores the mark: its answer looks like a whole scan."""
    with pytest.raises(
        FailedPrecondition, match="pool shard s0 returns no marks: upgrade it first"
    ):
        await ShardCopies(OlderScans(), most_settled=99).refresh("s0")


class FencedScans(StoreScans):
    """Shards whose last leader writes until its fence is stale."""

    async def raise_fence(self, shard: str, *, term: int) -> None:
        set_states(self.stores[shard], change("c", TRAINED, batch_id="x", step=1), fence=1)
        set_states(self.stores[shard], fence=2)


async def test_last_write_of_the_earlier_leader_is_read(scans: StoreScans) -> None:
    """The fence is raised before the final scan, however recent the copy."""
    fenced = FencedScans({"s0": scans.stores["s0"]})
    copies = ShardCopies(fenced, most_settled=99)
    await copies.refresh("s0")
    found = (await register_shards(fenced, ["s0"], copies, term=0)).groups
    assert names(found) == ["a", "b", "c"]
    assert found[2].group.batch_id == "x"
    assert fenced.sent == [3, 1]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "FOLLOW_S", 0.0)
    monkeypatch.setattr(standby, "RETRY_S", 0.0)


async def test_standby_follows_joining_and_leaving_shards(scans: StoreScans, quick: None) -> None:
    """A shard that leaves is forgotten, one that joins is scanned, one that fails is tried again;
    the garbage collector runs in between."""
    gone = scans.stores.pop("s1")
    copies = ShardCopies(scans, most_settled=99)
    scans.break_after = 1
    following = asyncio.create_task(copies.follow())
    await until(lambda: len(scans.sent) > 2)
    scans.break_after = None
    await until(lambda: "s0" in copies._copies)
    scans.stores["s1"] = gone
    await until(lambda: "s1" in copies._copies)
    away = scans.stores.pop("s0")
    await until(lambda: "s0" not in copies._copies)
    scans.stores["s0"] = away
    await until(lambda: "s0" in copies._copies)
    following.cancel()
    await asyncio.wait({following})
    assert following.cancelled()
    assert gc.isenabled()
    for shard in ("s0", "s1"):
        await copies.refresh(shard, count=True)
    assert names(copies.hand_over(["s0", "s1"]).groups) == ["a", "b", "c"]


def settle_all(store: PoolStore, count: int, *, at: int = 100) -> None:
    """So many groups, each trained by a step of its own, and as many that were given up."""
    put_groups(store, *(make_group(f"t{number}", at + number) for number in range(count)))
    put_groups(store, *(make_group(f"g{number}", at + count + number) for number in range(count)))
    for number in range(count):
        trained = change(f"t{number}", TRAINED, batch_id=f"batch-0-{number}", step=number + 1)
        given_up = change(f"g{number}", common_pb2.GROUP_STATE_TOMBSTONED, reason="died")
        set_states(store, trained, given_up, now_unix_s=1000.0 + number)


@pytest.mark.parametrize("settled", [20, 60])
async def test_election_reads_a_bounded_number_of_groups(scans: StoreScans, settled: int) -> None:
    """The pending and the newest settled groups; the others are counted."""
    settle_all(scans.stores["s0"], settled)
    copies = ShardCopies(scans, most_settled=8)
    for shard in ("s0", "s1"):
        await copies.refresh(shard, count=True)
    found = copies.hand_over(["s0", "s1"])
    assert scans.sent == [3 + 4 + 4, 0]
    # Each of two shards has its half of the bound.
    newest = range(settled - 4, settled)
    assert names(found.groups) == [
        *("a", "b", "c"),
        *(f"t{number}" for number in newest),
        *(f"g{number}" for number in newest),
    ]
    first, second = found.left_out
    assert first.counts == {
        (False, Phase.TRAINED): settled - 4,
        (False, Phase.TOMBSTONED): settled - 4,
    }
    assert not any(second.counts.values())
    assert first.last_step == settled - 4
    assert first.next_index == 100 + 2 * settled


async def test_copy_stays_bounded_while_groups_are_settled(scans: StoreScans) -> None:
    """Each scan leaves out the groups beyond the bound, also changed ones."""
    store = scans.stores["s0"]
    copies = ShardCopies(scans, most_settled=4)
    settle_all(store, 1)
    await copies.refresh("s0")
    settle_all(store, 30, at=200)
    await copies.refresh("s0")
    assert copies.size("s0") == 3 + 2 + 2
    reward(store, make_reward("late"), trajectory_id="t3:0:0")
    seal(store, "t3:0:0", turns=0)
    seal(store, "g3:0:0", turns=0)
    assert await copies.refresh("s0", count=True) == 2
    assert copies.size("s0") == 3 + 2 + 2
    (left_out,) = copies.hand_over(["s0"]).left_out
    assert left_out.counts[False, Phase.TRAINED] == 28
    assert left_out.completed["code"] == 2


async def test_rewound_group_returns_to_the_copy(scans: StoreScans) -> None:
    """A left-out group is pending after a rewind: the next scan has it."""
    store = scans.stores["s0"]
    settle_all(store, 10)
    copies = ShardCopies(scans, most_settled=2)
    await copies.refresh("s0")
    set_states(store, change("t2", common_pb2.GROUP_STATE_PENDING))
    await copies.refresh("s0", count=True)
    found = copies.hand_over(["s0"])
    assert names(found.groups) == ["a", "b", "c", "t2", "t9", "g9"]
    (left_out,) = found.left_out
    assert left_out.counts[False, Phase.TRAINED] == 8


async def test_shard_that_cannot_count_is_read_whole(
    scans: StoreScans, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its counters are damaged, no group is left out."""
    settle_all(scans.stores["s0"], 10)
    copies = ShardCopies(scans, most_settled=2)
    await copies.refresh("s0")
    assert copies.size("s0") == 3 + 1 + 1
    monkeypatch.setattr(store_module, "count_settled", lambda records, found: False)
    await copies.refresh("s0", count=True)
    found = copies.hand_over(["s0"])
    assert (len(found.groups), found.left_out, found.unbounded) == (23, [], frozenset({"s0"}))
