"""A checkpoint between hosts: what arrives is the same checkpoint, or none."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from forge.core.errors import DataLoss, NotFound
from forge.v1 import trainer_pb2 as pb
from services.trainer.checkpoint import transfer
from services.trainer.checkpoint.history import CheckpointHistory
from services.trainer.checkpoint.store import Checkpoint, CheckpointStore, read_checkpoint
from services.trainer.checkpoint.transfer import Staging, is_current, pieces

STATE = "state/rank-00000.safetensors"
CONTENTS = {"model.safetensors": 10_000, STATE: 3000, "empty": 0}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1000)


@pytest.fixture
def sender(tmp_path: Path) -> Path:
    return tmp_path / "sender"


@pytest.fixture
def receiver(tmp_path: Path) -> Path:
    return tmp_path / "receiver"


def save(directory: Path, step: int) -> Checkpoint:
    def write(folder: Path) -> None:
        for name, size in CONTENTS.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(bytes(n * step % 251 for n in range(size)))

    store = CheckpointStore(directory)
    path = store.save(
        write,
        step=step,
        weight_version=step,
        history=CheckpointHistory([pb.StepMetrics(step=step)]),
    )
    return read_checkpoint(path)


def has(directory: Path, checkpoint: Checkpoint) -> bool:
    return is_current(
        directory,
        step=checkpoint.step,
        lineage=checkpoint.lineage,
        fingerprint=checkpoint.fingerprint,
    )


def sent(
    directory: Path, step: int, have: Mapping[str, int]
) -> Iterator[pb.FetchCheckpointResponse]:
    return pieces(directory, pb.FetchCheckpointRequest(step=step, have=have))


def receive(sender: Path, receiver: Path, checkpoint: Checkpoint) -> Path:
    staging = Staging(receiver, step=checkpoint.step, fingerprint=checkpoint.fingerprint)
    for response in sent(sender, checkpoint.step, staging.begin()):
        staging.add(response)
    return staging.complete()


def test_checkpoint_arrives_whole(sender: Path, receiver: Path) -> None:
    """All files in their folders, with the same fingerprint; older copies are pruned."""
    for step in (1, 2, 3):
        checkpoint = save(sender, step)
        assert not has(receiver, checkpoint)
        copy = read_checkpoint(receive(sender, receiver, checkpoint))
        assert (copy.step, copy.fingerprint) == (step, checkpoint.fingerprint)
        assert has(receiver, checkpoint)
        for name in CONTENTS:
            assert (copy.path / name).read_bytes() == (checkpoint.path / name).read_bytes()
    assert sorted(path.name for path in receiver.iterdir()) == ["step-00000002", "step-00000003"]


def test_cut_transfer_continues_where_it_ended(sender: Path, receiver: Path) -> None:
    """Also in another process: only bytes that are missing are sent again."""
    checkpoint = save(sender, 1)
    facts = {"step": 1, "fingerprint": checkpoint.fingerprint}
    staging = Staging(receiver, **facts)  # type: ignore[arg-type]
    for response in sent(sender, 1, staging.begin()):
        staging.add(response)
        # The second piece of the state: other files, such as the history, may have any size.
        if (response.piece.path, response.piece.offset) == (STATE, 1000):
            break
    with pytest.raises(DataLoss, match="files of the checkpoint did not arrive"):
        staging.complete()
    assert not list(receiver.glob("step-*"))

    after = Staging(receiver, **facts)  # type: ignore[arg-type]
    have = after.begin()
    assert (have[STATE], have["model.safetensors"]) == (2000, 10_000)
    responses = list(sent(sender, 1, have))
    for response in responses:
        after.add(response)
    again = sum(len(response.piece.data) for response in responses)
    assert again == sum(path.stat().st_size for path in files_of(checkpoint)) - sum(have.values())
    assert read_checkpoint(after.complete()).fingerprint == checkpoint.fingerprint


def files_of(checkpoint: Checkpoint) -> list[Path]:
    return [path for path in checkpoint.path.rglob("*") if path.is_file()]


def flip(piece: pb.FetchCheckpointResponse.Piece) -> None:
    piece.data = bytes([piece.data[0] ^ 1]) + piece.data[1:]


def flip_with_checksum(piece: pb.FetchCheckpointResponse.Piece) -> None:
    flip(piece)
    piece.crc32 = zlib.crc32(piece.data)


def move(piece: pb.FetchCheckpointResponse.Piece) -> None:
    piece.offset += 1


@pytest.mark.parametrize("damage", [flip, flip_with_checksum, move])
def test_damaged_piece_is_never_in_a_checkpoint(
    sender: Path, receiver: Path, damage: Callable[[pb.FetchCheckpointResponse.Piece], None]
) -> None:
    """By its own checksum or that of the file; the next attempt gets it right."""
    checkpoint = save(sender, 1)
    staging = Staging(receiver, step=1, fingerprint=checkpoint.fingerprint)
    with pytest.raises(DataLoss):
        for number, response in enumerate(sent(sender, 1, staging.begin())):
            if number == 3:
                damage(response.piece)
            staging.add(response)
    with pytest.raises(DataLoss):
        staging.complete()
    assert receive(sender, receiver, checkpoint).name == "step-00000001"


def test_checkpoint_that_vanishes_is_not_completed(sender: Path, receiver: Path) -> None:
    """The transfer ends with the error of a missing checkpoint, as a new request for it does."""
    checkpoint = save(sender, 1)
    staging = Staging(receiver, step=1, fingerprint=checkpoint.fingerprint)
    responses = sent(sender, 1, staging.begin())
    staging.add(next(responses))
    shutil.rmtree(checkpoint.path)
    with pytest.raises(NotFound, match="no checkpoint of step 1"):
        for response in responses:
            staging.add(response)
    with pytest.raises(DataLoss, match="did not arrive"):
        staging.complete()
    with pytest.raises(NotFound, match="no checkpoint of step 1"):
        next(sent(sender, 1, {}))


def test_sender_opens_one_file_at_a_time(sender: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of many ranks has more files than a process may open."""
    many = {f"state/rank-{number:05d}.safetensors": 2000 for number in range(40)}
    monkeypatch.setitem(globals(), "CONTENTS", {**CONTENTS, **many})
    save(sender, 1)
    before = open_files()
    most = max(open_files() for _ in sent(sender, 1, {}))
    assert most <= before + 1


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_other_checkpoint_of_the_step_is_refused(sender: Path, receiver: Path) -> None:
    """A rewind may repeat a step; and parts of another arrival are not mixed in."""
    checkpoint = save(sender, 1)
    other = Staging(receiver, step=1, fingerprint="f" * 64)
    for response in sent(sender, 1, other.begin()):
        other.add(response)
    with pytest.raises(DataLoss, match="its step or fingerprint differs"):
        other.complete()
    assert not list(receiver.iterdir())
    assert receive(sender, receiver, checkpoint).exists()


@pytest.mark.parametrize("name", ["../out", "/etc/out", "a/../../out", ""])
def test_names_outside_of_the_checkpoint_are_refused(receiver: Path, name: str) -> None:
    staging = Staging(receiver, step=1, fingerprint="")
    staging.begin()
    begin = pb.FetchCheckpointResponse()
    begin.begin.files.add(path=name, size_bytes=1)
    with pytest.raises(DataLoss, match="not a path in a checkpoint"):
        staging.add(begin)


def test_checkpoints_here_that_stay(sender: Path) -> None:
    """A later one, and one of another lineage, which an operator removes; not another one of the
    step."""
    first = save(sender, 1)
    shutil.rmtree(first.path)
    assert not has(sender, first)
    second = save(sender, 2)
    assert has(sender, second) and has(sender, first)
    assert not has(sender, replace(second, step=3))
    assert not has(sender, replace(second, fingerprint="other"))
    assert has(sender, replace(second, step=3, lineage="other"))


def test_repeated_step_replaces_the_former_checkpoint(sender: Path, receiver: Path) -> None:
    """That one is kept aside."""
    receive(sender, receiver, save(sender, 1))
    shutil.rmtree(sender)
    CONTENTS["empty"] = 5
    try:
        again = save(sender, 1)
    finally:
        CONTENTS["empty"] = 0
    assert not has(receiver, again)
    assert read_checkpoint(receive(sender, receiver, again)).fingerprint == again.fingerprint
    assert {path.name for path in receiver.iterdir()} == {
        "step-00000001",
        "step-00000001.damaged",
    }
