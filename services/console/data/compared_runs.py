"""Other runs beside this one: curves from the step records that `forge run` keeps.

Reads files alone, at each request: a compared run needs no process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge.cli.local_run.plot import read_steps
from forge.core.errors import ForgeError

FIELDS = ("step", "mean_reward", "entropy", "staleness_mean")
"""Columns of a row."""


class ComparedRuns:
    """The runs that the setting `compare` names."""

    def __init__(self, paths: Sequence[str], *, most: int) -> None:
        """`most`: steps of a run; of a longer one every n-th step is left in."""
        self._paths = [Path(path) for path in paths]
        self._most = most

    def read(self) -> list[dict[str, Any]]:
        """Each run by name; one that cannot be read has the reason instead of rows. Blocks."""
        return [self._run(path) for path in self._paths]

    def _run(self, path: Path) -> dict[str, Any]:
        name = path.name if path.is_dir() else path.parent.name
        try:
            steps = read_steps(path)
        except ForgeError as error:
            return {"name": name, "fields": FIELDS, "rows": [], "error": str(error)}
        every = -(-len(steps) // self._most)
        rows = [[step[field] for field in FIELDS] for step in steps[::every]]
        return {"name": name, "fields": FIELDS, "rows": rows, "error": ""}
