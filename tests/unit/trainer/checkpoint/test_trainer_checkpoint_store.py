"""Checkpoints are whole or not there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.cli.local_run.models.kept import read_kept
from forge.core.errors import DataLoss, ResourceExhausted
from forge.rl.parallel.state_memory import placed
from forge.v1 import trainer_pb2 as pb
from services.trainer.checkpoint.files import Contents
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.reading import (
    check_files,
    fill_learner,
    master_weights,
    read_heads,
    read_learner,
    read_published,
)
from services.trainer.checkpoint.retention import CheckpointRetention
from services.trainer.checkpoint.shards import Shard
from services.trainer.checkpoint.shared_memory import SharedMemory
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.checkpoint.writer import WrittenFile
from tests.support.runtime.disks import full_beyond


def save(store: CheckpointStore, step: int, content: bytes = b"weights") -> Path:
    return store.save(
        lambda directory: write(directory, content),
        step=step,
        weight_version=step + 10,
        history=CheckpointHistory([pb.StepMetrics(step=step)]),
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write(directory: Path, content: bytes) -> None:
    (directory / "model.bin").write_bytes(content)


def test_saved_checkpoints_are_found_by_a_new_process(tmp_path: Path) -> None:
    """The newest first, with all its files."""
    store = CheckpointStore(tmp_path)
    for step in (2, 4):
        save(store, step)
    found = list(CheckpointStore(tmp_path).newest_first())
    assert [(one.step, one.weight_version, one.history) for one in found] == [
        (4, 14, [pb.StepMetrics(step=4)]),
        (2, 12, [pb.StepMetrics(step=2)]),
    ]
    assert (found[0].path / "model.bin").read_bytes() == b"weights"


def test_run_may_start_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    """Or from weights in several files: what the index says of those weights is not copied."""
    source, store = tmp_path / "source", CheckpointStore(tmp_path / "checkpoints")
    source.mkdir()
    for name in ("config.json", "state.json", "model.safetensors.index.json", "published.json"):
        (source / name).write_text("{}")
    contents = Contents(
        model={"w": torch.zeros(2)}, learner={}, model_path=source, sidecars={},
    )  # fmt: skip
    path = store.save(contents.write, step=1, weight_version=2, history=CheckpointHistory())
    model = ["model.safetensors", "published.json"]
    assert names(path) == [
        *("config.json", "history.jsonl", "learner.pt", *model, "state", "state.json")
    ]
    assert [one.path for one in store.newest_first()] == [path]


def test_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    """In the order of their steps, not of their names' length; and those that are held."""
    store = CheckpointStore(tmp_path, CheckpointRetention(last=2, every_steps=0))
    for step in (7, 8, 9, 10):
        save(store, step)
    assert store.oldest_step(recorded=7) == 7
    store.prune(held={7})
    kept = ["step-00000007", "step-00000009", "step-00000010"]
    assert names(tmp_path) == ["latest", *kept]
    assert (tmp_path / "latest").resolve() == tmp_path / "step-00000010"
    assert store.oldest_step(recorded=10) == 9
    store.prune(held=())
    assert names(tmp_path) == ["latest", *kept[1:]]


def test_checkpoint_kept_for_good_is_no_end_of_a_rewind(tmp_path: Path) -> None:
    """The pool may free what was trained after it."""
    store = CheckpointStore(tmp_path, CheckpointRetention(last=1, every_steps=10))
    for step in (10, 14, 18):
        save(store, step)
        store.prune(held={step})
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000018"]
    assert store.oldest_step(recorded=18) == 18


@given(
    steps=st.sets(st.integers(1, 200), min_size=1),
    last=st.integers(1, 5),
    every=st.integers(0, 50),
)
def test_retention_keeps_the_newest_and_one_of_each_interval(
    steps: set[int], last: int, every: int
) -> None:
    """Removing the others changes no later answer."""
    retention = CheckpointRetention(last=last, every_steps=every)
    kept = retention.kept(steps)
    assert kept <= steps and set(sorted(steps)[-last:]) <= kept
    assert retention.kept(kept) == kept
    for step in steps if every else ():
        first = min(one for one in steps if one // every == step // every)
        assert step < every or first in kept
    if not every:
        assert len(kept) == min(last, len(steps))


def test_same_step_is_saved_once(tmp_path: Path) -> None:
    """A second save changes nothing on disk."""
    store = CheckpointStore(tmp_path)
    assert save(store, 1) == save(store, 1, b"other")
    (found,) = store.newest_first()
    assert (found.path / "model.bin").read_bytes() == b"weights"


def test_checkpoint_of_a_former_trainer_is_replaced(tmp_path: Path) -> None:
    """In a shared directory it may finish one after the next trainer has restored: of the same step
    the present trainer's counts."""
    former = CheckpointStore(tmp_path)
    save(former, 1)
    present = CheckpointStore(tmp_path)
    assert [one.step for one in present.newest_first()] == [1]
    save(former, 2, b"former")
    save(present, 2, b"present")
    assert save(present, 1, b"other").joinpath("model.bin").read_bytes() == b"weights"
    newest = next(present.newest_first())
    assert (newest.step, (newest.path / "model.bin").read_bytes()) == (2, b"present")


def test_crash_while_writing_keeps_the_older_checkpoints(tmp_path: Path) -> None:
    """A half-written directory is no checkpoint, and the next start removes it."""
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def crash(directory: Path) -> None:
        write(directory, b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(crash, step=2, weight_version=12, history=CheckpointHistory())
    again = CheckpointStore(tmp_path)
    assert [one.step for one in again.newest_first()] == [1]
    assert names(tmp_path) == ["latest", "step-00000001"]


KILLED = """
import os, sys
from pathlib import Path
import torch
from forge.v1 import trainer_pb2 as pb
from services.trainer.checkpoint import files
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.shards import Shard

# One child a point: the imports take most of the time. The parent prints how each child ended.
folder = Path(sys.argv[1])
for point in sys.argv[2:]:
    child = os.fork()
    if not child:
        break
    print(point, -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    sys.exit()
store = CheckpointStore(folder / point)
weight = torch.zeros(2)
contents = files.Contents(
    model={"w": weight},
    shards=[Shard(name="master.w", offsets=(0,), data=weight)],
    model_path=folder,
)
history = CheckpointHistory([pb.StepMetrics(step=1)])
store.save(contents.write, step=1, weight_version=1, history=history)
history.add(pb.StepMetrics(step=2))
owners = {"_part": files.Contents, "_describe": files.Contents, "rename": Path, "replace": Path}
owner = owners.get(point, files)
assert hasattr(owner, point)
setattr(owner, point, lambda *_: os.kill(os.getpid(), 9))
store.save(contents.write, step=2, weight_version=2, history=history)
"""


def test_kill_9_at_any_point_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    """Before the tensors, after them, before each other file, before the rename, before `latest`
    moves: the former checkpoint is valid, with its history, to which the next one's was added."""
    points = {
        **dict.fromkeys(("_part", "sync", "copy_description", "file_digest", "_describe"), 1),
        "rename": 1,
        "replace": 2,
    }
    command = [sys.executable, "-c", KILLED, str(tmp_path), *points]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=True)
    killed = [f"{point} {signal.SIGKILL.value}" for point in points]
    assert ended.stdout.splitlines() == killed
    for point, step in points.items():
        assert (tmp_path / point / "latest").resolve().name == "step-00000001"
        store = CheckpointStore(tmp_path / point)
        newest = next(store.newest_first())
        assert newest.step == step
        check_files(master_weights(newest.path, adapters=False), newest.path)
        assert [each.step for each in newest.history] == list(range(1, step + 1))
        assert not list((tmp_path / point).glob("*.unfinished"))
        save(store, 3)
        assert (tmp_path / point / "latest").resolve().name == "step-00000003"


def test_full_disk_is_an_error_without_leftover_files(tmp_path: Path) -> None:
    """The error names the checkpoint."""
    store = CheckpointStore(tmp_path)

    def full(directory: Path) -> None:
        write(directory, b"some")
        (directory / "more.bin").symlink_to("/dev/full")
        (directory / "more.bin").write_bytes(b"more")

    with pytest.raises(ResourceExhausted, match="step-00000001: No space left"):
        store.save(full, step=1, weight_version=1, history=CheckpointHistory())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("large", ["model", "shards", "learner"])
def test_full_disk_gives_the_same_error_from_every_writer(tmp_path: Path, large: str) -> None:
    """torch has its own error for a refused write."""
    memory = SharedMemory()  # its file does not become longer any more
    tensor = memory.empty((1 << 16,), torch.float32).zero_()
    parts: dict[str, Any] = {
        "model": {"w": memory.empty((8,), torch.float32).zero_()},
        "shards": [],
        "learner": {"state": {"w": torch.zeros(8)}},
    }
    whole = [Shard(name="w", offsets=(0,), data=tensor)]
    parts[large] = whole if large == "shards" else {"w": tensor}
    contents = Contents(**parts, model_path=tmp_path, memory=memory)
    store = CheckpointStore(tmp_path / "out")
    with full_beyond(1 << 16), pytest.raises(ResourceExhausted, match="step-00000001"):
        store.save(contents.write, step=1, weight_version=1, history=CheckpointHistory())
    assert list((tmp_path / "out").iterdir()) == []


def test_checkpoint_is_read_back(tmp_path: Path) -> None:
    """Master weights apart from published ones, which have their own type; the learner's state with
    the tensors that are elsewhere."""
    weight = torch.tensor([1.0, 1 + 2**-20])
    outline = {"mtp": {"heads": {"mtp.0.w": torch.empty(2, device="meta")}}, "rates": (1, 2)}
    contents = Contents(
        model={"w": weight.bfloat16()},
        shards=[
            Shard(name="master.w", offsets=(0,), data=weight),
            Shard(name="learner.mtp.heads.mtp.0.w", offsets=(0,), data=weight + 1),
        ],
        learner={"steps": torch.tensor(4), **outline},
        heads={"mtp.0.w": weight.bfloat16()},
        sidecars={"about/it.json": "{}"},
        model_path=tmp_path,
    )
    contents.write(tmp_path)
    master = master_weights(tmp_path, adapters=False)
    assert master.shapes() == {"w": [2]} and torch.equal(master.read()["w"], weight)
    check_files(master, tmp_path)
    learner = read_learner(tmp_path)
    state = placed(learner)
    fill_learner(state, learner, tmp_path)
    assert (tmp_path / "about" / "it.json").read_text() == "{}"
    assert (state["steps"], state["rates"]) == (4, (1, 2))
    assert torch.equal(state["mtp"]["heads"]["mtp.0.w"], weight + 1)
    assert torch.equal(read_heads(tmp_path)["mtp.0.w"], torch.ones(2).bfloat16())
    assert list(read_published(tmp_path)) == ["w", "mtp.0.w"]


class Written:
    """Another rank, which writes its part at once."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._files: list[WrittenFile] = []

    def begin(self, directory: Path) -> None:
        self._files = self._contents.write_part(directory)

    def written(self) -> list[WrittenFile]:
        return self._files


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A model of two tensors that two ranks have written, with draft heads."""
    files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    whole = torch.arange(4.0)
    parts = [
        Contents(
            model={name: torch.full((2,), float(rank))},
            model_file=files[rank],
            shards=[Shard(name="master.w", offsets=(2 * rank,), data=whole[2 * rank :][:2])],
            rank=rank,
        )
        for rank, name in enumerate(("b", "a"))
    ]
    path = tmp_path / "step-00000001"
    path.mkdir()
    replace(
        parts[0],
        heads={"mtp.0.w": torch.zeros(2)},
        weight_map={"b": files[0], "a": files[1]},
        model_path=tmp_path,
        others=Written(parts[1]),
    ).write(path)
    return path


def test_ranks_write_one_checkpoint(shared: Path) -> None:
    """Published tensors in their order, and shards of one tensor, from several files."""
    published = read_published(shared)
    assert [(name, one.tolist()) for name, one in published.items()] == [
        ("b", [0.0, 0.0]),
        ("a", [1.0, 1.0]),
        ("mtp.0.w", [0.0, 0.0]),
    ]
    master = master_weights(shared, adapters=False)
    assert torch.equal(master.read()["w"], torch.arange(4.0))
    kept = read_kept(shared)
    assert kept.tensor_names == tuple(published)
    index = json.loads((shared / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == ["b", "a"]


@pytest.mark.parametrize("number", [1, 2])
def test_each_file_of_a_model_has_a_digest(shared: Path, number: int) -> None:
    """One flipped bit is found by the trainer and by `forge model export`."""
    file = shared / f"model-0000{number}-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for reader in (read_published, read_kept):
        with pytest.raises(DataLoss, match="sha256"):
            reader(shared)


@pytest.mark.parametrize("damage", ["short", "missing", "state", "history", "lines"])
def test_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    """For any damage of the newest, the older one is restored."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    newest = save(store, 2)
    match damage:
        case "short":
            (newest / "model.bin").write_bytes(b"w")
        case "missing":
            (newest / "model.bin").unlink()
        case "state":
            (newest / "state.json").write_text("{")
        case "history":
            (newest / "history.jsonl").write_text("")
        case "lines":
            (newest / "history.jsonl").write_text("[3]\n" * 1000)
    assert [one.step for one in store.newest_first()] == [1]
    # Its step can be taken and saved again.
    save(store, 2)
    assert [one.step for one in store.newest_first()] == [2, 1]


def test_damaged_checkpoint_is_kept_under_another_name(tmp_path: Path) -> None:
    """Its step can be saved again, and its files can be inspected."""
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (found,) = store.newest_first()
    store.set_aside(found)
    assert list(store.newest_first()) == []
    save(store, 1)
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000001.damaged"]
