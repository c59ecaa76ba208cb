"""Units, settings and users that the distribution brings: the repository's directory `deploy`."""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from pathlib import Path

from forge.core.errors import FailedPrecondition

FOLDERS = ("config", "systemd", "systemd-tls", "sysusers.d", "tmpfiles.d")
_REPOSITORY = Path(__file__).parents[4] / "deploy"


def read_assets() -> Mapping[str, bytes]:
    """Return the files by path below `deploy`, such as `systemd/forge-pool@.service`.

    Raises `FailedPrecondition` for an installation without them.
    """
    installed = Path(sysconfig.get_path("data")) / "share" / "forge"
    # A checkout has its own, which may be newer than those of an installed release.
    root = _REPOSITORY if (_REPOSITORY / "systemd").is_dir() else installed
    files = {
        str(path.relative_to(root)): path.read_bytes()
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*"))
        if path.is_file()
    }
    if not files:
        raise FailedPrecondition(f"{root} has no units: install the package forge-rl again")
    return files
