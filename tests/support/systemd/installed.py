"""A Debian 12 with Forge, installed by the commands of deploy/README.md."""

from __future__ import annotations

import fcntl
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forge.cli.local_run.models.models import tiny_directory
from tests.support.systemd.bare_host import STOCK as STOCK_PACKAGES
from tests.support.systemd.bare_host import BareHost, make_root
from tests.support.systemd.disk import Disk, kept, remove_tree
from tests.support.systemd.packages import digest_of_packages

ROOT = Path(__file__).parents[3]
STOCK = ROOT / ".systemd" / "debian12-ssh"
SOFTWARE = "/opt/forge"
_OF_FORGE = ("/root/forge", "/etc/forge")
_DATA = Path("/var/lib/forge")
_REMOVE = f"""
find {_DATA} -mindepth 1 ! -path {_DATA}/models ! -path '{tiny_directory(_DATA, seed=0)}*' -delete
rm -rf /opt/forge/.venv /etc/systemd/system/forge* /etc/sysusers.d/forge.conf
rm -f /etc/tmpfiles.d/forge.conf
"""
"""What the documented commands make a second time. The weights of the tiny model stay if
they are of the present version: to train them takes longer than all other commands."""
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


@contextmanager
def install_host(folder: Path) -> Iterator[Installed]:
    """Yield the host, installed by the documented commands from HEAD, on a disk in a folder.

    The packages of before are there already if they and the commands are those of an installation
    before this one: the commands then only find them.
    """
    install, start = documented()
    base, is_new = _with_packages(install, folder / "first")
    disk = base.above(folder / "debian12", without=() if is_new else _OF_FORGE)
    if not is_new:
        unpack_repository(disk.root / "root/forge")
        BareHost(disk).install(_REMOVE + install, network=True)
    for name in WORKERS:
        with (disk.root / f"etc/forge/inference@{name}.env").open("a") as env:
            env.write(CPU)
    (disk.root / "etc/forge/scheduler@1.env").write_text(SMALL)
    yield Installed(disk=disk, start=start)
    disk.remove()


def _with_packages(install: str, root: Path) -> tuple[Disk, bool]:
    """Return the disk that has all packages, and whether it was installed just now."""
    STOCK.parent.mkdir(exist_ok=True)
    with (STOCK.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not STOCK.exists():
            make_root(STOCK)
        stock = Disk(root=STOCK, layers=(STOCK,))
        store = STOCK.with_name(f"installed-{_digest(install)}")
        found = kept(store, above=stock)
        if found is not None:
            return found, False
        for old in STOCK.parent.glob("installed-*"):
            remove_tree(old)
        bare = stock.above(root)
        unpack_repository(bare.root / "root/forge")
        BareHost(bare).install(install, network=True)
        bare.keep(store)
        made = kept(store, above=stock)
        assert made is not None
        return made, True


def _digest(install: str) -> str:
    project, constraints = (
        (ROOT / name).read_text() for name in ("pyproject.toml", "constraints.txt")
    )
    return digest_of_packages(
        stock=STOCK_PACKAGES, commands=install, project=project, constraints=constraints
    )


def unpack_repository(folder: Path) -> None:
    """Put the files of HEAD in a folder."""
    folder.mkdir(exist_ok=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
