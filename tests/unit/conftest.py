"""Fixtures of unit tests of several services."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge.runtime.files import host_memory


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in the place of /dev/shm."""
    directory = tmp_path / "memory"
    directory.mkdir()
    monkeypatch.setattr(host_memory, "DIRECTORY", directory)
    return directory
