"""Archives of settled groups: complete, repeatable after any interruption, and erased in."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from isal import igzip

from forge.core.errors import ConfigError, DataLoss
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2, pool_pb2
from services.pool.data.commands import FreeGroups
from services.pool.maintenance.archive import archive
from services.pool.maintenance.archive.archive import (
    Archived,
    archive_settled,
    archives_at,
    freeable,
)
from services.pool.maintenance.archive.archive_restore import restore_archive
from services.pool.store import PoolStore
from tests.support.pool.records import damage, make_group, make_reward, make_turn
from tests.support.pool.store import (
    append,
    change,
    commit,
    damage_of,
    fetch,
    put_groups,
    reward,
    seal,
    set_states,
)
from tests.support.pool.sweeper import Sweeper

Open = Callable[..., PoolStore]
NAMES = [f"t{task}:{rollout}:0" for task in range(4) for rollout in range(2)]
MARKER = "marker of ada"


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"file://{tmp_path}/archive"


@pytest.fixture
def store(open_store: Open) -> PoolStore:
    """Four settled groups of two trajectories, settled at 10, 20, 30 and 40, and a pending one; the
    third has a user, a tag and a text."""
    store = open_store(shard="s0")
    groups = [make_group(f"t{task}", task) for task in range(5)]
    groups[2].task.user, groups[2].task.tag = "ada", "trial"
    put_groups(store, *groups)
    names = [*NAMES, "t4:0:0"]
    texts = [MARKER if name.startswith("t2") else "x" * 2000 for name in names]
    append(
        store,
        *(
            make_turn(name, at, parent=-1, messages_json=text)
            for name, text in zip(names, texts, strict=True)
            for at in range(3)
        ),
    )
    for name in names:
        seal(store, name, turns=3, rewards=[make_reward(value=float(name[3]))])
    for task in range(4):
        trained = change(f"t{task}", common_pb2.GROUP_STATE_TRAINED, batch_id="b", step=task + 1)
        set_states(store, trained, now_unix_s=10.0 * (task + 1))
    return store


def archived(store: PoolStore, url: str, *, before: float = 100.0) -> Archived:
    return store.read(
        lambda records: archive_settled(
            records, url, settled_before_unix_s=before, progress=lambda done: None
        )
    )


def restored(url: str, target: Path) -> PoolStore:
    assert restore_archive(url, target, shard="archive", progress=lambda done, of: None) == []
    return PoolStore(target)


def trajectories(store: PoolStore, names: list[str] = NAMES) -> list[common_pb2.Trajectory]:
    return [fetch(store, name) for name in names]


def test_archive_restores_into_a_new_shard(store: PoolStore, url: str, tmp_path: Path) -> None:
    """Every settled group with its state, and no pending one; record for record."""
    assert (archived(store, url).groups, archived(store, url).known) == (4, 4)
    copy = restored(url, tmp_path / "copy")
    assert trajectories(copy) == trajectories(store)
    request = pool_pb2.LookUpGroupsRequest(task_ids=[f"t{task}" for task in range(5)])
    groups = copy.look_up(request).groups
    assert [(group.step, group.settled_unix_s) for group in groups] == [
        (task + 1, 10.0 * (task + 1)) for task in range(4)
    ]
    assert damage_of(copy) == []
    copy.close()


def test_only_old_and_changed_groups_are_written(
    store: PoolStore, url: str, tmp_path: Path
) -> None:
    """By the time of settlement; a late reward has its group written again, and a restore takes
    the last one. A freed group stays in the archive as it was."""
    assert archived(store, url, before=30.0).groups == 2
    assert (archived(store, url).groups, archived(store, url).known) == (2, 4)
    reward(store, make_reward("late"), trajectory_id="t1:0:0")
    before = trajectories(store)
    again = archived(store, url)
    assert (again.groups, again.known) == (1, 3)
    free = FreeGroups(task_ids=("t0",), covered_step=9, max_records=99, now_unix_s=1e3)
    commit(store, free)
    assert (archived(store, url).groups, archived(store, url).known) == (0, 3)
    copy = restored(url, tmp_path / "copy")
    assert trajectories(copy) == before
    copy.close()


class Interrupted(Exception):
    """Stands for kill -9: nothing handles it."""


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Ends the process, so to speak, at the n-th change of the archive's files: before it, or half
    way through a write."""
    monkeypatch.setattr(archive, "SEGMENT_BYTES", 1)
    left = [0]
    real = archive.open_url

    class Files:
        def __init__(self, files: Any) -> None:
            self._files = files

        def __getattr__(self, name: str) -> Any:
            return getattr(self._files, name)

        def pipe_file(self, path: str, data: bytes) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted
            left[0] -= 1
            if left[0] == 0:
                self._files.pipe_file(path, data[: len(data) // 2])
                raise Interrupted
            self._files.pipe_file(path, data)

        def mv(self, path: str, to: str) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted
            self._files.mv(path, to)

        def rm_file(self, path: str) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted
            self._files.rm_file(path)

    def open_url(url: str) -> tuple[Any, str]:
        files, path = real(url)
        return Files(files), path

    monkeypatch.setattr(archive, "open_url", open_url)

    def at(change_number: int) -> None:
        left[0] = change_number

    yield at


def groups_at(url: str) -> list[archive.SegmentGroup]:
    """The groups of every catalogued segment."""
    (one,) = archives_at(url)
    groups = [group for entry in one.entries() for group in one.groups(entry)]
    assert groups
    return sorted(groups, key=lambda group: group.task_id)


def test_interrupted_archive_is_completed_by_the_next_run(
    store: PoolStore, tmp_path: Path, interrupt: Callable[[int], None]
) -> None:
    """At each of its writes, and half way through it; no group is missing or there twice."""
    whole = f"file://{tmp_path}/whole"
    archived(store, whole, before=30.0)
    for number in itertools.count(1):
        place = f"file://{tmp_path}/archive-{number}"
        interrupt(number)
        try:
            archived(store, place, before=30.0)
        except Interrupted:
            interrupt(0)
            archived(store, place, before=30.0)
            assert groups_at(place) == groups_at(whole)
        else:
            break
    assert number == 13, "two segments and two entries: before, half way, and before the name"


def found_freeable(store: PoolStore, url: str) -> dict[str, bytes]:
    return store.read(lambda records: freeable(records, url, settled_before_unix_s=100.0))


async def test_archived_groups_are_freed(
    store: PoolStore, sweeper: Sweeper, tmp_path: Path
) -> None:
    """Of any age, if a checkpoint covers their step, and unless they changed since; a restore from
    the archive has them as they were."""
    url = f"file://{tmp_path}/archive"
    expected = trajectories(store)
    archived(store, url)
    reward(store, make_reward("late"), trajectory_id="t1:0:0")
    digests = found_freeable(store, url)
    assert sorted(digests) == ["t0", "t2", "t3"]
    # Also one that changes once it was found.
    reward(store, make_reward("late"), trajectory_id="t2:0:0")
    sweeper.covered_step = 3
    retention = sweeper.retention()
    assert await retention.free_archived(digests) == ["t0"]
    assert await retention.free_archived(digests) == ["t0"]
    assert [one.freed for one in summaries(store)] == [name.startswith("t0") for name in NAMES]
    copy = restored(url, tmp_path / "copy")
    assert trajectories(copy) == expected
    copy.close()


async def test_interrupted_freeing_is_continued(
    store: PoolStore, sweeper: Sweeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After kill -9 between two of its transactions: the group is named again, and then has no
    record left."""
    url = f"file://{tmp_path}/archive"
    archived(store, url)
    sweeper.covered_step = 9
    digests = found_freeable(store, url)
    monkeypatch.setattr("services.pool.retention.MAX_RECORDS", 2)
    commits = itertools.count()

    def stop() -> None:
        if next(commits) == 2:
            raise Interrupted

    sweeper.writer.before = stop
    with pytest.raises(Interrupted):
        await sweeper.retention().free_archived(digests)
    sweeper.writer.before = lambda: None
    again = found_freeable(store, url)
    assert again == digests
    assert sorted(await sweeper.retention().free_archived(again)) == ["t0", "t1", "t2", "t3"]
    assert found_freeable(store, url) == {}
    assert damage_of(store) == []


def test_damaged_segment_frees_nothing(store: PoolStore, url: str) -> None:
    """Each segment is read again before its groups are freed."""
    archived(store, url)
    files, path = fsspec.core.url_to_fs(url)
    (name,) = [each for each in files.find(path) if each.endswith(".segment")]
    files.rm_file(name)
    with pytest.raises(DataLoss, match="is missing"):
        found_freeable(store, url)


def summaries(store: PoolStore) -> list[common_pb2.TrajectorySummary]:
    return store.summaries([parse_trajectory_id(name) for name in NAMES])


def texts(url: str) -> bytes:
    """Everything that the files of an archive say."""
    files, path = fsspec.core.url_to_fs(url)
    said = b""
    for name in files.find(path):
        data = files.cat_file(name)
        said += igzip.decompress(data) if name.endswith(".segment") else data
    return said


@pytest.mark.parametrize("wanted", [{"task_ids": ["t2"]}, {"user": "ada"}, {"tag": "trial"}])
def test_erasure_rewrites_segments(
    store: PoolStore, url: str, tmp_path: Path, wanted: dict[str, Any]
) -> None:
    """No byte of the task stays; the other groups of its segment do, and a restore has them."""
    archived(store, url)
    assert MARKER.encode() in texts(url)
    request = pool_pb2.EraseTrajectoriesRequest(**wanted)
    erased = archive.erase_in_archives(url, request)
    assert (erased.groups, erased.segments) == (1, 1)
    assert MARKER.encode() not in texts(url) and b"t2" not in texts(url)
    assert archive.erase_in_archives(url, request).groups == 0
    copy = restored(url, tmp_path / "copy")
    kept = [name for name in NAMES if not name.startswith("t2")]
    assert trajectories(copy, kept) == trajectories(store, kept)
    copy.close()


def test_interrupted_erasure_is_completed_by_the_next_one(
    store: PoolStore,
    tmp_path: Path,
    interrupt: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each change of a file: nothing else is lost, and in the end no byte of the task stays."""
    monkeypatch.setattr(archive, "SEGMENT_BYTES", 1 << 20)
    request = pool_pb2.EraseTrajectoriesRequest(user="ada")
    for number in itertools.count(1):
        place = f"file://{tmp_path}/archive-{number}"
        interrupt(0)
        archived(store, place)
        interrupt(number)
        try:
            archive.erase_in_archives(place, request)
        except Interrupted:
            interrupt(0)
            archive.erase_in_archives(place, request)
            assert MARKER.encode() not in texts(place)
            (one,) = archives_at(place)
            tasks = {task for entry in one.entries() for task in entry.groups}
            assert tasks == {"t0", "t1", "t3"}
        else:
            break
    assert number == 9, "a segment and an entry, each three times, and two deletions"


def test_damaged_archive_is_refused(store: PoolStore, url: str, tmp_path: Path) -> None:
    """A flipped bit of a segment or of its entry; nothing is restored."""
    archived(store, url)
    files, path = fsspec.core.url_to_fs(url)
    for suffix in (".segment", ".entry"):
        (name,) = [each for each in files.find(path) if each.endswith(suffix)]
        data = files.cat_file(name)
        files.pipe_file(name, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with pytest.raises(DataLoss, match=r"damaged"):
            restored(url, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
        files.pipe_file(name, data)


def test_damaged_group_is_named_and_left_out(open_store: Open, store: PoolStore, url: str) -> None:
    """The others are archived; once repaired it follows."""
    store.close()
    damage(store.directory, MARKER.encode())
    found = archived(open_store(), url)
    assert (found.groups, found.damaged) == (3, ["t2"])


def test_restore_needs_one_archive(url: str, tmp_path: Path) -> None:
    """None, or those of several stores, are one line."""
    with pytest.raises(ConfigError, match="has 0 archives"):
        restored(url, tmp_path / "copy")
