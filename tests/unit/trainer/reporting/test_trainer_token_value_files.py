"""The files of token values: bounded, whole or absent, and of one lineage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from forge.core.errors import DataLoss, NotFound
from services.trainer.reporting.token_value_files import StepValues, TokenValueFiles
from services.trainer.samples.chosen_turns import TurnPlace
from tests.support.runtime.disks import full_beyond

LENGTHS = (3, 2, 4)
MANY = 1 << 30


def values(step: int, *, name: str = "t") -> StepValues:
    """Two turns of one trajectory with another one between them."""
    torch.manual_seed(step)
    return StepValues(
        step=step,
        weight_version=step + 1,
        turns=[
            TurnPlace(f"{name}{step}:0:0", 4),
            TurnPlace(f"{name}{step}:1:0", 0),
            TurnPlace(f"{name}{step}:0:0", 1),
        ],
        lengths=LENGTHS,
        columns=torch.randn(5, sum(LENGTHS)).half(),
    )


def opened(directory: Path, most_bytes: float = MANY) -> TokenValueFiles:
    files = TokenValueFiles(directory / "values", most_bytes=most_bytes)
    files.open()
    return files


def stored(files: TokenValueFiles, steps: range) -> list[int]:
    """The steps whose trajectory is found."""
    found = []
    for step in steps:
        try:
            files.read(f"t{step}:0:0")
        except NotFound:
            continue
        found.append(step)
    return found


def test_values_are_read_back_bit_for_bit_after_a_restart(tmp_path: Path) -> None:
    """By trajectory, turn after turn, with step and weight version; of an unknown one nothing."""
    written = values(7)
    opened(tmp_path).write(written)
    files = opened(tmp_path)
    late, early = written.columns[:, :3], written.columns[:, 5:]
    found = files.read("t7:0:0")
    assert [one.turn_index for one in found] == [1, 4]
    assert torch.equal(found[0].columns, early) and torch.equal(found[1].columns, late)
    assert {(one.step, one.weight_version) for one in found} == {(7, 8)}
    assert torch.equal(files.read("t7:1:0")[0].columns, written.columns[:, 3:5])
    with pytest.raises(NotFound, match="no token values of t8:0:0"):
        files.read("t8:0:0")


def test_oldest_steps_leave_once_the_size_is_reached(tmp_path: Path) -> None:
    """After each write, and at a start with a smaller size."""
    files = opened(tmp_path)
    files.write(values(1))
    size = files.size_bytes
    files = opened(tmp_path, 3.5 * size)
    for step in range(2, 8):
        files.write(values(step))
    assert stored(files, range(1, 9)) == [5, 6, 7]
    assert files.size_bytes == sum(path.stat().st_size for path in (tmp_path / "values").iterdir())
    assert stored(opened(tmp_path, 1.5 * size), range(1, 9)) == [7]


def test_steps_leave_at_their_age(tmp_path: Path) -> None:
    """Also those of an earlier process: an erasure does not reach them."""
    now_s = 10_000.0

    def aged() -> TokenValueFiles:
        files = TokenValueFiles(
            tmp_path / "values", most_bytes=MANY, most_age_s=60.0, clock=lambda: now_s
        )
        files.open()
        return files

    files = aged()
    files.write(values(1))
    (first,) = (tmp_path / "values").iterdir()
    os.utime(first, (now_s, now_s))
    now_s += 50
    files.write(values(2))
    now_s += 20
    files.expire()
    assert stored(files, range(1, 3)) == [2] and not first.exists()
    (second,) = (tmp_path / "values").iterdir()
    os.utime(second, (now_s - 20, now_s - 20))
    now_s += 41
    assert stored(aged(), range(1, 3)) == [] and not second.exists()


def test_rewind_removes_the_steps_that_it_takes_back(tmp_path: Path) -> None:
    """A step that is trained again replaces its values; a trajectory has those of its last step."""
    files = opened(tmp_path)
    for step in (1, 2, 3):
        files.write(values(step))
    files.forget_after(1)
    assert stored(files, range(1, 4)) == stored(opened(tmp_path), range(1, 4)) == [1]
    files.write(values(2, name="u"))
    files.write(values(2, name="v"))
    assert files.read("v2:0:0")[0].step == 2
    with pytest.raises(NotFound):
        files.read("u2:0:0")


def test_unfinished_and_damaged_files_are_removed(tmp_path: Path) -> None:
    """At the start, or when they are read; the others stay."""
    files = opened(tmp_path)
    for step in (1, 2, 3):
        files.write(values(step))
    directory = tmp_path / "values"
    (directory / "step-00000009.safetensors.unfinished").write_bytes(b"x")
    (directory / "step-00000002.safetensors").write_bytes(b"\0" * 64)
    (directory / "notes.txt").touch()
    late = opened(tmp_path)
    assert sorted(path.name for path in directory.iterdir()) == [
        "notes.txt",
        "step-00000001.safetensors",
        "step-00000003.safetensors",
    ]
    (directory / "step-00000003.safetensors").write_bytes(b"")
    with pytest.raises(DataLoss, match="step 3"):
        late.read("t3:0:0")
    with pytest.raises(NotFound):
        late.read("t3:0:0")
    assert stored(late, range(1, 4)) == [1]


def test_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    """The write fails; earlier steps and later writes work."""
    files = opened(tmp_path)
    files.write(values(1))
    with full_beyond(100), pytest.raises(OSError):
        files.write(values(2))
    assert [path.name for path in (tmp_path / "values").iterdir()] == ["step-00000001.safetensors"]
    files.write(values(2))
    assert stored(files, range(1, 4)) == [1, 2]
