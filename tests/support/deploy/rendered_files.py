"""Files of a host below the directory of `forge deploy render`."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any


def file(out: Path, host: str, path: str) -> Path:
    """Return a file by its path on the host."""
    return out / "hosts" / host / "root" / path.lstrip("/")


def toml(out: Path, host: str, service: str) -> dict[str, Any]:
    """Return the settings of a service."""
    return tomllib.loads(file(out, host, f"/etc/forge/{service}.toml").read_text())


def variables(out: Path, host: str, path: str) -> dict[str, str]:
    """Return the variables in a file."""
    words = shlex.split(file(out, host, path).read_text(), comments=True)
    return dict(word.split("=", 1) for word in words)
