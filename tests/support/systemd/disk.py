"""The disks of bare hosts: each is a layer over the disk from which it was made.

Owns mounts and removal. A copy of a Debian is ten thousand files; a layer has those alone that its
host changes. Where the file system takes no layers, as in many containers, a disk is a copy.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

_MOUNT = re.compile(r"^forge-disk-(\d+) (\S+) overlay ", re.M)
_OPAQUE = "trusted.overlay.opaque"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A file system at `root`."""

    root: Path
    layers: tuple[Path, ...]
    """Its own directory of changes, then those below it."""
    is_mounted: bool = False

    def above(self, root: Path, *, without: Collection[str] = ()) -> Disk:
        """Make a disk with the content of this one, which must not change any more. `without`:
        directories whose content it does not have."""
        unmount_ended()
        root.mkdir(parents=True)
        if self._mount(root, without):
            return Disk(root=root, layers=(_parts(root)[0], *self.layers), is_mounted=True)
        _copy(self.root, root, without)
        return Disk(root=root, layers=(root,))

    def _mount(self, root: Path, without: Collection[str]) -> bool:
        """Mount a new layer; return whether the file system takes one."""
        upper, work = _parts(root)
        work.mkdir()
        try:
            for path in ("/", *without):
                folder = upper / path.lstrip("/")
                folder.mkdir(parents=True)
                if path in without:
                    os.setxattr(folder, _OPAQUE, b"y")
        except OSError:
            return False
        lower = ":".join(map(str, self.layers))
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        mount = ["mount", "-t", "overlay", f"forge-disk-{os.getpid()}", "-o", options, str(root)]
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0

    def keep(self, folder: Path) -> None:
        """Move its content to a new folder, for `kept`, and remove it."""
        new = folder.with_name(f"{folder.name}.{os.getpid()}.new")
        new.mkdir(parents=True)
        if self.is_mounted:
            subprocess.run(["umount", str(self.root)], check=True)
            self.layers[0].rename(new / "layer")
        else:
            self.root.rename(new / "whole")
        new.rename(folder)
        Disk(root=self.root, layers=()).remove()

    def remove(self) -> None:
        """Remove it. No host may run from it, and no disk may be above it."""
        if self.is_mounted:
            subprocess.run(["umount", "--lazy", str(self.root)], check=True)
        for folder in (self.root, *_parts(self.root)):
            remove_tree(folder)


def kept(folder: Path, *, above: Disk) -> Disk | None:
    """Return the disk that `Disk.keep` moved to a folder, to make others above it; None for
    none. `above`: the one that it was made from."""
    for name, layers in (("layer", above.layers), ("whole", ())):
        if (folder / name).exists():
            return Disk(root=folder / name, layers=(folder / name, *layers))
    return None


def _parts(root: Path) -> list[Path]:
    """The directories of a layer."""
    return [root.with_name(f"{root.name}.{part}") for part in ("upper", "work")]


def _copy(of: Path, root: Path, without: Collection[str]) -> None:
    left_out = [f"--exclude=.{path}/*" for path in without]
    pack = ["tar", "-C", str(of), *left_out, "-c", "."]
    unpack = ["tar", "-xp", "--numeric-owner", "-C", str(root)]
    with subprocess.Popen(pack, stdout=subprocess.PIPE) as packed:
        subprocess.run(unpack, stdin=packed.stdout, check=True)


def unmount_ended() -> None:
    """Unmount the disks of test runs that were killed."""
    for number, path in _MOUNT.findall(Path("/proc/self/mounts").read_text()):
        if not psutil.pid_exists(int(number)):
            subprocess.run(["umount", "--lazy", path], check=False)


def remove_tree(folder: Path) -> None:
    """Remove a directory: a hundred thousand files take Python minutes."""
    subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], check=False)
