"""Directories that a program needs: its installation, found by its path.

Owns the rules. A home directory is never shown whole: it has keys of other programs.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

_INTERPRETER = re.compile(rb"#! *(\S+)(?: +(\S+))?")
_HOME_KEY = re.compile(r"^home *= *(\S+)", re.M)


def shown_directories(programs: Collection[str]) -> Iterator[Path]:
    """Returns the directories and files that these programs and scripts need.

    A program in `bin` needs the directory above, any other one the directory that it is in. A link,
    the interpreter of a script and the base of a virtual environment have installations of their
    own.
    """
    waiting, seen = [Path(program).absolute() for program in programs], set[Path]()
    while waiting:
        program = waiting.pop()
        if program in seen or not program.is_file():
            continue
        seen.add(program)
        yield _installation(program)
        waiting += _followed(program)


def _installation(program: Path) -> Path:
    directory = program.parent
    directory = directory.parent if directory.name == "bin" else directory
    home = Path.home()
    # ~/.local has keyrings beside programs, /var has data of services.
    shared = directory.parent == home and directory.name.startswith(".")
    shared |= home.is_relative_to(directory) or len(directory.parts) <= 2
    return program if shared else directory


def _followed(program: Path) -> Iterator[Path]:
    if program.is_symlink():
        yield Path(os.path.normpath(program.parent / program.readlink()))
        yield program.resolve()
    settings = program.parent.parent / "pyvenv.cfg"
    if settings.is_file() and (base := _HOME_KEY.search(settings.read_text(errors="replace"))):
        yield Path(base[1], program.name).resolve()
    try:
        with program.open("rb") as file:
            first = _INTERPRETER.match(file.readline(512))
    except OSError:
        return
    if first:
        words = [word.decode(errors="replace") for word in first.groups() if word]
        found = shutil.which(words[-1] if words[0].endswith("/env") else words[0])
        if found:
            yield Path(found)


def names_file(word: str) -> bool:
    """Returns whether a word of a command is the path of a file."""
    try:
        return Path(word).is_file()
    except OSError:
        # Longer than a file system allows: a script in the command itself.
        return False


def without_home(directory: Path) -> Iterator[Path]:
    """Returns the directory; of the home directory, and those above it, only Python modules."""
    path = directory.resolve()
    if not Path.home().resolve().is_relative_to(path):
        yield path
    elif path.is_dir() and path != Path("/"):
        for entry in path.iterdir():
            if entry.suffix == ".py" or (entry / "__init__.py").is_file():
                yield entry


def is_within(path: Path, roots: Iterable[str | Path]) -> bool:
    """Returns whether the path is one of the roots or below one."""
    return any(path.is_relative_to(root) for root in roots)
