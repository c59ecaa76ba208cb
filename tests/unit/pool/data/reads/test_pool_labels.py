"""Queries by tag, scaffold, user and metadata, and the index that finds them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forge.client.stored.filters import check_filter
from forge.core.errors import InvalidArgument
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import EraseTasks, MendIndex
from services.pool.data.reads import query
from services.pool.data.repair.index_mending import MENDED, wrong_entries
from services.pool.storage.environment.lmdb_env import Environment
from services.pool.storage.environment.migrations import SCHEMA_VERSION, stored_version
from services.pool.storage.groups.labels import has_labels, label_prefixes
from services.pool.storage.keys import task_prefix
from services.pool.storage.records import DamagedRecord
from services.pool.storage.tables import Key, Table
from services.pool.store import PoolStore
from tests.support.pool.damage import delete_record, flip_key, put_raw
from tests.support.pool.records import make_group
from tests.support.pool.store import (
    as_version_4,
    change,
    commit,
    damage_of,
    put_groups,
    seal,
    set_states,
)

MIB = 1 << 20
TASKS = ("a", "a-b", "a.b", "aa", "b", "b9", "b_", "c")
"""Ids that begin with each other: their order as ids is not that of their trajectories."""


def labeled(task_id: str, index: int, **labels: Any) -> common_pb2.GroupRecord:
    group = make_group(task_id, index)
    metadata = labels.pop("metadata", {})
    group.task.MergeFrom(common_pb2.Task(metadata=metadata, **labels))
    return group


def fill(store: PoolStore) -> list[common_pb2.GroupRecord]:
    """Groups with every combination of a few labels, two trajectories each; one task without a
    group."""
    rng = random.Random(7)
    groups = [
        labeled(
            task_id,
            index,
            tag=rng.choice(["", "before", "after"]),
            scaffold=rng.choice(["whitebox", "blackbox"]),
            user=rng.choice(["", "ada"]),
            metadata={"level": str(rng.randrange(2)), "source": rng.choice(["x", "y"])},
        )
        for index, task_id in enumerate(TASKS)
    ]
    put_groups(store, *groups)
    for rollout in range(2):
        for task_id in (*TASKS, "orphan"):
            seal(store, f"{task_id}:{rollout}:0", turns=0, now_unix_s=10.0 + rollout)
    return groups


def found(
    store: PoolStore, *, size: int = 0, name_damaged: bool = False, **wanted: Any
) -> list[str]:
    """Ids over all pages."""
    ids: list[str] = []
    token = ""
    while True:
        request = pool_pb2.QueryTrajectoriesRequest(
            filter=pool_pb2.TrajectoryFilter(**wanted), page_size=size, page_token=token
        )
        look = partial(query.query, request=request, shard=store.shard, name_damaged=name_damaged)
        page = store.read(look)
        ids += [one.trajectory_id for one in page.trajectories]
        token = page.next_page_token
        if not token:
            return ids


def expected(groups: list[common_pb2.GroupRecord], **wanted: Any) -> list[str]:
    """The answer of a filter, from the groups alone."""
    condition = pool_pb2.TrajectoryFilter(**wanted)
    tasks = [group.task.task_id for group in groups if has_labels(group.task, condition)]
    return [f"{task}:{n}:0" for task in sorted(tasks, key=task_prefix) for n in range(2)]


CONDITIONS: list[dict[str, Any]] = [
    {"tag": "before"},
    {"scaffold": "blackbox"},
    {"user": "ada"},
    {"metadata": {"level": "1"}},
    {"metadata": {"level": "1", "source": "x"}},
    {"tag": "after", "scaffold": "whitebox", "metadata": {"source": "y"}},
    {"tag": "never"},
    {"metadata": {"other": "1"}},
]


@pytest.mark.parametrize("cost", [1, 2, query.PAGE_COST])
def test_labels_alone_and_combined_find_their_trajectories(
    store: PoolStore, monkeypatch: pytest.MonkeyPatch, cost: int
) -> None:
    """The same over pages of any size, and along the change log, which needs no index."""
    groups = fill(store)
    monkeypatch.setattr(query, "PAGE_COST", cost)
    for wanted in CONDITIONS:
        ids = expected(groups, **wanted)
        assert found(store, **wanted) == ids
        assert found(store, size=1, **wanted) == ids
        assert found(store, name_damaged=True, **wanted) == ids
        late = [each for each in ids if each.endswith(":1:0")]
        assert sorted(found(store, closed_from_unix_s=11.0, **wanted)) == sorted(late)
        assert found(store, task_ids=["a", "b9"], **wanted) == [
            each for each in ids if each.partition(":")[0] in ("a", "b9")
        ]
    assert damage_of(store) == []


def test_search_reads_about_the_rarest_label(store: PoolStore) -> None:
    """With one task of 60 the page looks at a few entries, not at every trajectory."""
    groups = [
        labeled(f"t{n:03}", n, scaffold="whitebox", tag="rare" if n == 40 else "")
        for n in range(60)
    ]
    put_groups(store, *groups)
    for group in groups:
        seal(store, f"{group.task.task_id}:0:0", turns=0)
    wanted = pool_pb2.TrajectoryFilter(scaffold="whitebox", tag="rare")
    pages = query.Pages(shard=store.shard, wanted=wanted)
    seen = store.read(lambda records: list(pages.seen(records, "", name_damaged=False)))
    assert [one.summary.trajectory_id for one in seen if one.summary] == ["t040:0:0"]
    assert len(seen) <= 4


def test_wrong_metadata_is_refused() -> None:
    """The filter's rules are those of a task."""
    with pytest.raises(InvalidArgument, match=r"filter\.metadata has key 'a b'"):
        check_filter(pool_pb2.TrajectoryFilter(metadata={"a b": "x"}))


def entries(store: PoolStore, table: Table = Table.LABELS) -> list[bytes]:
    return store.read(lambda records: [key for key, _ in records.scan_checksummed(table)])


def test_settled_group_keeps_its_labels(store: PoolStore) -> None:
    """And a rewound one: the entries do not depend on the state."""
    groups = fill(store)
    before = entries(store)
    set_states(store, change("a", common_pb2.GROUP_STATE_TRAINED, batch_id="b", step=1))
    assert entries(store) == before
    set_states(store, change("a", common_pb2.GROUP_STATE_PENDING))
    assert entries(store) == before
    assert found(store, tag="before") == expected(groups, tag="before")


def test_erasure_removes_labels(store: PoolStore) -> None:
    """No entry of an erased task but that of its scaffold, and no trajectory is found by one."""
    group = labeled("t", 0, tag="secret", user="ada", metadata={"note": "secret"})
    put_groups(store, group)
    seal(store, "t:0:0", turns=0)
    assert len(entries(store)) == 4
    commit(store, EraseTasks(task_ids=("t",), max_records=9, now_unix_s=50.0))
    (scaffold,) = label_prefixes(common_pb2.Task(scaffold="whitebox"))
    assert entries(store) == [scaffold + task_prefix("t")]
    assert found(store, user="ada") == found(store, scaffold="whitebox") == []
    assert damage_of(store) == []


def test_shard_of_version_4_opens_with_its_labels(
    open_store: Callable[..., PoolStore], tmp_path: Path
) -> None:
    """Once, from the groups; later groups are added."""
    store = open_store(shard="s0")
    groups = fill(store)
    store.close()
    old = Environment(tmp_path / "shard", map_bytes=MIB, map_max_bytes=64 * MIB, max_readers=4)
    old.write(as_version_4)
    old.close()
    store = open_store()
    assert store.read(stored_version) == SCHEMA_VERSION
    assert damage_of(store) == []
    for wanted in CONDITIONS:
        assert found(store, **wanted) == expected(groups, **wanted)


def in_task(data_dir: Path, table: Table, key: bytes) -> None:
    """Flips a bit of the task in a key: the entry stays under its label."""
    flip_key(data_dir, table, key)


def in_digest(data_dir: Path, table: Table, key: bytes) -> None:
    """Flips a bit of the label in a key: no search for the label reads the entry."""
    flip_key(data_dir, table, key, byte=0)


def in_value(data_dir: Path, table: Table, key: bytes) -> None:
    put_raw(data_dir, table, key, b"none")


@pytest.mark.parametrize("how", [in_task, in_value])
def test_damaged_entry_hides_no_trajectory(
    open_store: Callable[..., PoolStore], tmp_path: Path, how: Callable[..., None]
) -> None:
    """A page that meets it is read past the index."""
    store = open_store(shard="s0")
    groups = fill(store)
    (prefix,) = label_prefixes(common_pb2.Task(user="ada"))
    key = next(key for key in entries(store) if key.startswith(prefix))
    store.close()
    how(tmp_path / "shard", Table.LABELS, key)
    store = open_store()
    with pytest.raises(DamagedRecord):
        found(store, user="ada")
    assert found(store, user="ada", name_damaged=True) == expected(groups, user="ada")


def wrong(store: PoolStore) -> list[Key]:
    return [
        key
        for table in (Table.GROUPS, *MENDED)
        for key in store.read(partial(wrong_entries, table=table, after=b"", limit=1000))[0]
    ]


@pytest.mark.parametrize("table", MENDED)
@pytest.mark.parametrize("how", [in_task, in_digest, in_value, delete_record])
def test_index_is_mended_from_the_groups(
    open_store: Callable[..., PoolStore],
    tmp_path: Path,
    table: Table,
    how: Callable[..., None],
) -> None:
    """Damaged, moved, lost and stray entries; one that is right by then does not change."""
    store = open_store(shard="s0")
    groups = fill(store)
    before = entries(store, table)
    assert wrong(store) == []
    store.close()
    how(tmp_path / "shard", table, before[0])
    store = open_store()
    defects = wrong(store)
    assert defects
    assert commit(store, MendIndex(entries=tuple(defects))) == len(set(defects))
    assert commit(store, MendIndex(entries=tuple(defects))) == 0
    assert (entries(store, table), damage_of(store)) == (before, [])
    assert found(store, tag="before") == expected(groups, tag="before")
