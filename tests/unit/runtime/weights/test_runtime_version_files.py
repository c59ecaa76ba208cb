"""Files of weight versions at the writer: bounded, private, and removed after a kill."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forge.core.named_tensor import NamedTensor
from forge.runtime.weights import TensorEntry
from forge.runtime.weights.version_files import VersionFiles, read_version

TENSORS = [
    NamedTensor(name="a", dtype="uint8", shape=(5,), data=b"12345"),
    NamedTensor(name="b", dtype="uint8", shape=(0,), data=b""),
    NamedTensor(name="c", dtype="float32", shape=(1,), data=memoryview(b"6789")),
]
_WRITER = """
import sys, os
from pathlib import Path
from forge.core.named_tensor import NamedTensor
from forge.runtime.weights.version_files import VersionFiles
files = VersionFiles(Path(sys.argv[1]), mapped=True)
files.write(1, "d" * 64, [NamedTensor(name="a", dtype="uint8", shape=(1,), data=b"1")])
print("written", flush=True)
sys.stdin.read()
"""


def sha(letter: str) -> str:
    return letter * 64


@pytest.mark.parametrize("mapped", [True, False])
def test_written_version_is_read_by_any_number(tmp_path: Path, mapped: bool) -> None:
    """Whole, aligned, for this user alone; a reader keeps a version that the writer removes."""
    files = VersionFiles(tmp_path, mapped=mapped)
    kept = files.write(1, sha("a"), TENSORS)
    assert [bytes(one.data) for one in kept] == [bytes(one.data) for one in TENSORS]
    assert [one.stat().st_mode & 0o777 for one in tmp_path.iterdir()] == [0o600]
    entries = [TensorEntry.of(one) for one in TENSORS]
    readers = [read_version(tmp_path, sha("a"), entries, mapped=mapped) for _ in range(3)]
    files.write(2, sha("b"), TENSORS)
    files.write(3, sha("c"), TENSORS)
    files.keep({2, 3})
    assert len(list(tmp_path.iterdir())) == 2
    for found in (*readers, kept):
        assert [bytes(one.data) for one in found] == [b"12345", b"", b"6789"]
    with pytest.raises(FileNotFoundError):
        read_version(tmp_path, sha("a"), entries, mapped=mapped)
    files.keep(())
    assert not list(tmp_path.iterdir())


def test_files_of_a_killed_writer_are_removed_by_the_next(tmp_path: Path) -> None:
    """Not while it lives, and no file of another name."""
    other = tmp_path / "forge-weights-notes"
    other.write_text("kept")
    child = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"written\n"
        files = VersionFiles(tmp_path, mapped=True)
        files.write(1, sha("a"), TENSORS)
        assert len(list(tmp_path.iterdir())) == 3
    finally:
        child.kill()
        child.communicate()
    (tmp_path / f"forge-weights-{sha('e')}.{'0' * 16}").write_bytes(b"unfinished")
    files.write(2, sha("b"), TENSORS)
    names = sorted(one.name[-1] for one in tmp_path.iterdir())
    assert names == ["a", "b", "s"]
    files.keep(())


def test_full_memory_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version then travels by gRPC alone."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        VersionFiles(tmp_path, mapped=True).write(1, sha("a"), TENSORS)
    assert not list(tmp_path.iterdir())
