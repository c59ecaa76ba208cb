"""Data that torchrun and a rank exchange.

Owns the variables of torchrun's environment. `services.trainer.torchrun` starts torchrun.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

END_S = 5.0
"""Time of a rank from the end of its drain to its end; torchrun then kills it."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def under_torchrun() -> bool:
    """Whether torchrun started this process; then the variables RANK, WORLD_SIZE, LOCAL_RANK and
    LOCAL_WORLD_SIZE describe it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def as_rank(*, ranks: int, ranks_here: int) -> Iterator[None]:
    """Context with the variables of a rank, for a check of its settings."""
    before = dict(os.environ)
    os.environ.update(
        TORCHELASTIC_RUN_ID="check", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks_here)
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def report_failure(line: str) -> None:
    """Tell torchrun why this rank is about to end. The first report stays; without torchrun it has
    no effect."""
    path = os.environ.get(_ERROR_FILE)
    if path:
        # torch's own format of this file, as `ProcessFailure` reads it.
        report = json.dumps({"message": line, "timestamp": int(time.time())})
        with suppress(OSError), Path(path).open("x") as file:
            file.write(report)
