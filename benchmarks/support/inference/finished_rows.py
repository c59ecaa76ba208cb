"""The rows of the table of families that are computed, kept so that an interrupted run continues.

A row is valid for the versions of the libraries and the code that computed it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from benchmarks.support.inference.model_families import Finding
from services.inference.engines.embedded.family_check import Verdict

_REPOSITORY = Path(__file__).parents[3]
_CODE = (
    "benchmarks/support/inference/finished_rows.py",
    "benchmarks/support/inference/model_families.py",
    "forge/core/prefix_tree.py",
    "forge/rl",
    "services/inference/engines",
)
"""Folders and files whose change makes rows invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    trained: Finding
    served: Verdict


class FinishedRows:
    """Rows of earlier runs by family, in a file with one JSON object per line."""

    def __init__(self, path: Path, *, key: str) -> None:
        self._path = path
        self._key = key
        self._rows = dict(_read(path, key))

    def get(self, family: str) -> Row | None:
        """Returns the row, None if no run has finished it with this key."""
        return self._rows.get(family)

    def add(self, family: str, row: Row) -> None:
        """Appends a finished row to the file."""
        self._rows[family] = row
        line = json.dumps({"key": self._key, "family": family, **asdict(row)})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # The newline comes first: a line that an interruption cut stays a line of its own.
        with self._path.open("a") as file:
            file.write(f"\n{line}")


def key_of_code() -> str:
    """Returns a digest of the code, and of the versions of Python, torch and transformers."""
    versions = f"{platform.python_version()} {torch.__version__} {transformers.__version__}"
    digest = hashlib.sha256(versions.encode())
    for name in _CODE:
        place = _REPOSITORY / name
        for file in sorted([place] if place.is_file() else _sources(place)):
            digest.update(f"\n{file.relative_to(_REPOSITORY)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _sources(folder: Path) -> list[Path]:
    return [one for one in folder.rglob("*") if one.suffix in (".py", ".c")]


def _read(path: Path, key: str) -> Iterator[tuple[str, Row]]:
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue  # cut by an interruption, or the empty first line
        if found["key"] == key:
            yield found["family"], _row(found["trained"], found["served"])


def _row(trained: dict[str, object], served: dict[str, object]) -> Row:
    finding = Finding(**{**trained, "errors": tuple(trained["errors"])})  # type: ignore[arg-type]
    return Row(trained=finding, served=Verdict(**served))  # type: ignore[arg-type]
