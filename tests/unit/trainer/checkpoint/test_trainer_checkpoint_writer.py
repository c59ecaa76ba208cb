"""The process that writes the tensors of checkpoints, and the memory that it reads."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forge.core.errors import ConfigError, ResourceExhausted
from forge.core.named_tensor import SAFETENSORS_DTYPES
from services.trainer.checkpoint.files import Contents
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.shared_memory import SharedMemory, SpareMemory
from services.trainer.checkpoint.store import CheckpointStore
from services.trainer.checkpoint.writer import TensorFile, write_file
from services.trainer.checkpoint.writer_process import WriterProcess
from services.trainer.learner.model_replica import Capture
from tests.support.runtime.disks import full_beyond
from tests.support.runtime.slow_files import slow_file
from tests.support.trainer.learners import started_learner, take_step

LARGE = 1 << 25
"""Bytes of a tensor that fills the buffer of a pipe many times."""


def order(memory: SharedMemory, tensors: dict[str, Tensor], name: str = "file") -> TensorFile:
    return TensorFile(name=name, tensors=memory.places(tensors), about={"format": "pt"})


def large(memory: SharedMemory) -> dict[str, Tensor]:
    return {"w": memory.empty((LARGE,), torch.uint8).zero_()}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def test_files_are_those_of_the_safetensors_package(tmp_path: Path) -> None:
    """Byte for byte, for every type, names that JSON escapes, scalars and empty tensors."""
    tensors: dict[str, Tensor] = {
        f"{number} ü\n{name}": torch.arange(number * 3 + 1).to(getattr(torch, name))
        for number, name in enumerate(SAFETENSORS_DTYPES.values())
    }
    tensors |= {"none": torch.empty(0, 3), "one": torch.tensor(3.0), "two": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "expected", metadata={"format": "pt"})
    memory = SharedMemory()
    written = write_file(order(memory, tensors), tmp_path, memory.descriptor)
    data = (tmp_path / "file").read_bytes()
    assert data == (tmp_path / "expected").read_bytes()
    assert (written.size_bytes, written.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_digest_is_of_the_tensors_that_the_order_names(tmp_path: Path) -> None:
    """In that order, which is not the order in the file."""
    memory = SharedMemory()
    places = memory.places({"b": torch.tensor([1, 2]), "a": torch.tensor([3.0])})
    file = TensorFile(name="file", tensors=places[1:], digested=places)
    expected = hashlib.sha256(torch.tensor([1, 2]).numpy().tobytes() + b"\x00\x00\x40\x40")
    assert write_file(file, tmp_path, memory.descriptor).sha256 == expected.hexdigest()


def test_killed_writer_costs_one_file_and_the_next_order_starts_another(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """In the middle of a file, with the signal in the error; and while it waits for orders, without
    an error."""
    memory, writer = SharedMemory(), WriterProcess()
    file = order(memory, large(memory))
    with slow_file(tmp_path / "file") as slow:
        writing = threads.submit(writer.write, tmp_path, [file], memory)
        slow.await_write()
        killed = writer.pid
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(OSError, match="the process that writes checkpoints was killed by SIGK"):
            writing.result()
    (tmp_path / "file").unlink()
    writer.write(tmp_path, [file], memory)
    assert (tmp_path / "file").stat().st_size > LARGE
    idle = writer.pid
    assert idle != killed
    os.kill(idle, signal.SIGKILL)
    os.waitid(os.P_PID, idle, os.WEXITED | os.WNOWAIT)
    (written,) = writer.write(tmp_path, [file], memory)
    assert written.name == "file" and writer.pid != idle


def test_second_checkpoint_waits_for_a_slow_first_one(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """Both are written, by one process."""
    memory, writer = SharedMemory(), WriterProcess()
    files = [order(memory, large(memory), name) for name in ("slow", "other")]
    with slow_file(tmp_path / "slow") as slow:
        writing = threads.submit(writer.write, tmp_path, files[:1], memory)
        slow.await_write()
        pid = writer.pid
        other = threads.submit(writer.write, tmp_path, files[1:], memory)
        assert not other.done() and not (tmp_path / "other").exists()
        assert len(slow.read()) > LARGE
    with pytest.raises(OSError, match="Invalid argument"):
        writing.result()
    assert other.result()[0].size_bytes > LARGE and writer.pid == pid


PARENT = """
import sys
from pathlib import Path
import torch
from services.trainer.checkpoint.shared_memory import SharedMemory
from services.trainer.checkpoint.writer import TensorFile
from services.trainer.checkpoint.writer_process import WriterProcess

memory, writer = SharedMemory(), WriterProcess()
small = memory.places({"w": torch.zeros(1)})
writer.write(Path(sys.argv[1]), [TensorFile(name="small", tensors=small)], memory)
print(writer.pid, flush=True)
large = memory.places({"w": memory.empty((1 << 25,), torch.uint8).zero_()})
writer.write(Path(sys.argv[1]), [TensorFile(name="large", tensors=large)], memory)
"""


def test_writer_ends_with_its_trainer(tmp_path: Path) -> None:
    """After kill -9, in the middle of a file; the file does not get longer."""
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with (
        slow_file(tmp_path / "large") as slow,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer,
    ):
        assert trainer.stdout is not None
        writer = psutil.Process(int(trainer.stdout.readline()))
        slow.await_write()
        trainer.kill()
        assert psutil.wait_procs([writer], timeout=60)[1] == []
        assert len(slow.read()) < LARGE


def test_writer_ends_with_its_owner_and_ignores_stop_signals(tmp_path: Path) -> None:
    """systemd sends SIGTERM to all processes of the trainer, which still saves a checkpoint."""
    memory, writer = SharedMemory(), WriterProcess()
    assert writer.pid == 0
    file = order(memory, {"w": torch.ones(3)})
    writer.write(tmp_path, [file], memory)
    process = psutil.Process(writer.pid)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    writer.write(tmp_path, [file], memory)
    assert writer.pid == process.pid and os.getpgid(process.pid) != os.getpgid(0)
    assert load_file(tmp_path / "file")["w"].tolist() == [1.0, 1.0, 1.0]
    del writer
    assert not process.is_running()


@pytest.mark.parametrize("obstacle", ["full", "directory", "missing"])
def test_error_of_the_file_system_keeps_its_number(tmp_path: Path, obstacle: str) -> None:
    """The same error as of a write in the trainer; the process stays."""
    memory, writer = SharedMemory(), WriterProcess()
    file, folder = order(memory, large(memory)), tmp_path / "folder"
    if obstacle != "missing":
        folder.mkdir()
    if obstacle == "full":
        (folder / "file").symlink_to("/dev/full")
    if obstacle == "directory":
        (folder / "file").mkdir()
    expected = {"full": OSError, "directory": IsADirectoryError, "missing": FileNotFoundError}
    with pytest.raises(expected[obstacle]) as found:
        writer.write(folder, [file], memory)
    if obstacle == "full":
        assert found.value.strerror == "No space left on device"
    pid = writer.pid
    writer.write(tmp_path, [file], memory)
    assert writer.pid == pid


def test_checkpoint_is_in_memory_once(model_path: Path, tmp_path: Path) -> None:
    """All tensors of a captured state are in the shared memory, of which the writer process maps
    nothing; neither the write nor the next checkpoint takes more of it."""
    actor = started_learner(model_path, tmp_path, publish_dtype="bfloat16")
    take_step(actor)
    contents: Contents = actor.receive(Capture())
    used = os.fstat(contents.memory.descriptor).st_blocks
    tensors = [*contents.model.values(), *(one.data for one in contents.shards)]
    assert 0 < sum(one.nbytes for one in tensors) <= used * 512
    assert {field.name for field in fields(contents)} >= {"model", "shards", "adapters", "heads"}
    contents.write(tmp_path)
    assert os.fstat(contents.memory.descriptor).st_blocks == used
    file, writer = os.fstat(contents.memory.descriptor).st_ino, contents.writer.pid
    del contents, tensors
    again: Contents = actor.receive(Capture())
    again.write(tmp_path)
    assert os.fstat(again.memory.descriptor).st_blocks == used
    assert (os.fstat(again.memory.descriptor).st_ino, again.writer.pid) == (file, writer)
    process = psutil.Process(writer)
    assert not [one.path for one in process.memory_maps() if "forge-checkpoint" in one.path]
    assert not [one.path for one in process.memory_maps() if "torch" in one.path]


@pytest.mark.parametrize("late", [False, True])
def test_limit_on_files_below_a_checkpoint_is_named_once(
    model_path: Path, tmp_path: Path, late: bool
) -> None:
    """At the start of the trainer, or when it is lowered later: an error that no restart mends."""
    actor = started_learner(model_path, tmp_path) if late else None
    with (
        full_beyond(1 << 20),
        pytest.raises(ConfigError, match=r"limited to 1 MiB: .*`ulimit -f unlimited`"),
    ):
        if actor is None:
            started_learner(model_path, tmp_path)
        else:
            actor.receive(Capture())


def test_killed_writer_costs_one_checkpoint_of_a_learner(
    model_path: Path, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    """The older one stays, nothing of the lost one is left, and the next one is written."""
    actor = started_learner(model_path, tmp_path)
    store = CheckpointStore(tmp_path)

    def save(step: int, *, slow: bool = False) -> Path:
        contents: Contents = actor.receive(Capture())

        def write(directory: Path) -> None:
            if not slow:
                contents.write(directory)
                return
            with slow_file(directory / "model.safetensors") as file:
                writing = threads.submit(contents.write, directory)
                file.await_write()
                os.kill(contents.writer.pid, signal.SIGKILL)
                writing.result()

        return store.save(write, step=step, weight_version=step, history=CheckpointHistory())

    save(1)
    take_step(actor)
    with pytest.raises(ResourceExhausted, match=r"00002: the process .* was killed by SIGKILL"):
        save(2, slow=True)
    assert [one.step for one in store.newest_first()] == [1]
    assert not list(tmp_path.glob("*.unfinished"))
    save(2)
    assert [one.step for one in store.newest_first()] == [2, 1]


class Cuda:
    """cudaHostRegister, which answers with `error`."""

    def __init__(self, error: int) -> None:
        self._error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.registered[address] = size_bytes
        return self._error

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]


def test_memory_is_kept_for_the_next_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes in the same places, of one checkpoint at most; no page is pinned again."""
    cuda = Cuda(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    spare: SpareMemory = []
    shapes = [(1 << 23,), (3,), (1 << 23,), (1 << 26,), (0,), (1 << 21, 4)]

    def places(memory: SharedMemory) -> list[int]:
        tensors = {str(n): memory.empty(one, torch.float32) for n, one in enumerate(shapes)}
        assert len({one.data_ptr() for one in tensors.values() if one.numel()}) == 5
        return sorted(one.offset for one in memory.places(tensors))

    first = SharedMemory(spare, pinned=True)
    expected = places(first)
    pinned = dict(cuda.registered)
    assert sum(pinned.values()) == os.fstat(first.descriptor).st_size
    second = SharedMemory(spare, pinned=True)  # two checkpoints at once
    assert places(second) == expected
    assert len(cuda.registered) == 2 * len(pinned)
    del first, second
    assert cuda.registered == pinned
    again = SharedMemory(spare, pinned=True)
    assert places(again) == expected and cuda.registered == pinned
    del again
    spare.clear()
    assert cuda.registered == {}


def test_memory_that_cannot_be_pinned_is_used_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies take longer; it is not tried again, and no later kernel reports the error."""
    cuda, reports = Cuda(2), 0

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal reports
        reports += 1
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch, "zeros", kernel)
    memory = SharedMemory([], pinned=True)
    for size in (2, 1 << 25):
        assert memory.empty((size,), torch.float32).fill_(3)[-1] == 3.0
    del memory
    assert (len(cuda.registered), reports) == (1, 1)
