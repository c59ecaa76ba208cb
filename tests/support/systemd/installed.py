"""A Debian 12 with Forge, installed by the commands of deploy/README.md."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.systemd.disk import Disk

ROOT = Path(__file__).parents[3]
STOCK = ROOT / ".systemd" / "debian12-ssh"
SOFTWARE = "/opt/forge"
CPU = "FORGE_DEVICE=cpu\nFORGE_DTYPE=float32\n"
SMALL = "FORGE_QUEUE__CONCURRENCY=16\nFORGE_QUEUE__BATCH_GROUPS=4\n"
"""A queue for a tiny model."""
WORKERS = ("prefill-1", "decode-1", "decode-2", "router-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """The file system of a host that was never booted."""

    disk: Disk
    start: str
    """The documented commands that start the services."""

    @property
    def root(self) -> Path:
        """Its file system."""
        return self.disk.root

    @property
    def software(self) -> dict[Path, str]:
        """The directory of the releases; hosts share it instead of copying gigabytes."""
        return {self.root / SOFTWARE.lstrip("/"): SOFTWARE}

    def copy(self, root: Path) -> Disk:
        """Make the disk of one more host, without the software."""
        return self.disk.above(root, without=[SOFTWARE])


def documented() -> tuple[str, str]:
    """The commands of deploy/README.md: those that install, and those that start.

    The tiny model takes the place of a downloaded one.
    """
    block = re.search(r"```sh\n(.*?)```", (ROOT / "deploy" / "README.md").read_text(), re.S)
    assert block is not None
    commands = block[1].replace("model fetch smollm2", "model init tiny")
    commands = commands.replace("ln -s smollm2", "ln -s $(cd /var/lib/forge/models && echo tiny-*)")
    install, line, start = commands.partition("systemctl daemon-reload\n")
    assert "model init tiny" in install and "echo tiny-*" in install and line
    return install, line + start


def unpack_repository(folder: Path) -> None:
    """Put the files of HEAD in a new folder."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
