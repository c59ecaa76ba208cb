"""A runner without any privilege, started by root: how it finds this interpreter and Forge.

Owns the words before its command line. Root may have both in its own home, which no other user
reads: they are mounted into a directory of the user, in a mount namespace of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[3]
PLAIN_USER = 61234
_SCRIPT = f"""
mount --bind "$1" "$0/python" && mount --bind "$2" "$0/forge" && mount --bind "$3" "$0/packages" &&
shift 3 && exec setpriv --reuid {PLAIN_USER} --regid {PLAIN_USER} --clear-groups "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainUser:
    """Starts Python as the user; `problem` says why it cannot, or is empty."""

    words: tuple[str, ...]
    environment: dict[str, str]
    python: Path
    problem: str


def plain_user(directory: Path, *, before: str = "") -> PlainUser:
    """The user gets `directory`, which others may enter, and finds Forge in it. Root runs `before`,
    which ends in `&&`, in the mount namespace."""
    for shown in ("python", "forge", "packages"):
        (directory / shown).mkdir(exist_ok=True)
    os.chown(directory, PLAIN_USER, PLAIN_USER)
    python = directory / "python" / "bin" / Path(os.path.realpath(sys.executable)).name
    packages = Path(psutil.__file__).parents[1]
    words: tuple[str, ...] = ("unshare", "--mount", "sh", "-c", before + _SCRIPT, str(directory))
    words += (sys.base_prefix, str(REPOSITORY), str(packages), str(python))
    environment = {
        "PYTHONPATH": f"{directory}/packages:{directory}/forge",
        "HOME": str(directory),
        # Otherwise the system's libpython, of another version, would run this interpreter.
        "LD_LIBRARY_PATH": str(directory / "python" / "lib"),
    }
    probe = subprocess.run(
        [*words, "-c", "import forge"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    problem = f"no plain user can run Forge here: {probe.stderr[-300:]}" if probe.returncode else ""
    return PlainUser(words=words, environment=environment, python=python, problem=problem)
