"""A checkpoint that several ranks write: what rank 0 hears of each part."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from services.trainer.checkpoint.writer import WrittenFile
from services.trainer.learner.shared_save import PartWriter, SharedSave

LOOKS = 100
"""Of rank 0, until it takes the other rank for lost."""


class Part:
    """Contents of a checkpoint that fail to be written."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def write_part(self, directory: Path) -> Sequence[WrittenFile]:
        """Raise the error."""
        raise self._error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "rank 1: No space left on device"),
        (RuntimeError("shape"), "rank 1: RuntimeError: shape"),
    ],
)
def test_rank_reports_why_it_could_not_write(tmp_path: Path, error: Exception, said: str) -> None:
    """Whatever the error is: rank 0 waits for the report, and the checkpoint alone is lost."""
    store, looks = HashStore(), itertools.count()
    save = SharedSave(
        store, number=1, ranks=2, lost=lambda: "no report" if next(looks) > LOOKS else ""
    )
    part: Any = Part(error)
    PartWriter(store, rank=1).start(part, number=1)
    save.begin(tmp_path)
    with pytest.raises(OSError, match=said):
        save.written()
