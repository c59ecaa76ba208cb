"""Deletes damaged coverage files: `python -m tests.support.suite.coverage_files [FOLDER]`.

A process that is killed while it saves may leave a damaged file, at which `coverage combine` fails.
A forked service also has a copy, at most a second older (`tests/support/runtime/fork_server.py`).
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path


def delete_damaged(folder: Path) -> list[Path]:
    """Delete and return the files that SQLite cannot read whole."""
    damaged = [file for file in sorted(folder.glob(".coverage.*")) if not _is_whole(file)]
    for file in damaged:
        file.unlink()
    for file in folder.glob("unfinished.coverage.*"):
        file.unlink()
    return damaged


def _is_whole(file: Path) -> bool:
    try:
        with closing(sqlite3.connect(file)) as opened:
            (state,) = opened.execute("PRAGMA integrity_check").fetchone()
            opened.execute("SELECT count(*) FROM coverage_schema").fetchone()
    except sqlite3.Error:
        return False
    return bool(state == "ok")


if __name__ == "__main__":
    found = delete_damaged(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    print(f"deleted {len(found)} damaged coverage files")
