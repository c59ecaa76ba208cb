"""The kernel of the machine, and the file system that it starts with.

Owns what is made from Debian's packages: the kernel with its modules, unpacked and not installed,
and an initramfs of busybox. Not here: how the machine runs (`machine`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
STORE: Final = ROOT / ".vm"
"""Where the kernel is kept between runs."""
MODULES: Final = ("virtio_pci", "9pnet_virtio", "9p", "overlay")
"""What the root file system needs; each brings what it depends on."""
INIT: Final = """#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in $(cat /modules); do insmod $module; done
mkdir /host /written /new
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=507904 host /host
mount -t tmpfs -o size=75% written /written
mkdir /written/upper /written/work
mount -t overlay -o lowerdir=/host,upperdir=/written/upper,workdir=/written/work root /new
mount -t tmpfs -o mode=1777 tmp /new/tmp
# An overlay is no place for the overlays of containers.
mkdir -p /new/var/lib/containers
mount -t tmpfs containers /new/var/lib/containers
cp -r /added/. /new
# Signs of a container, from which systemd concludes that this kernel is another's.
rm -f /new/.dockerenv /new/run/.containerenv
umount /dev /sys /proc
exec switch_root /new /lib/systemd/systemd --unit=forge-vm.service --show-status=no
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that is unpacked in a directory."""

    directory: Path

    @property
    def image(self) -> Path:
        """The kernel."""
        (found,) = (self.directory / "boot").glob("vmlinuz-*")
        return found

    @property
    def modules(self) -> Path:
        """The directory of its modules."""
        (found,) = (self.directory / "lib/modules").iterdir()
        return found


def make_kernel() -> Kernel:
    """Return Debian's newest kernel; download and unpack it the first time."""
    kernel = Kernel(directory=STORE / "kernel")
    if not kernel.directory.exists():
        name = _package()
        made = STORE / f"kernel-{os.getpid()}"
        made.mkdir(parents=True)
        as_root = ["-o", "APT::Sandbox::User=root"]
        subprocess.run(["apt-get", "-q", "download", *as_root, name], cwd=made, check=True)
        (package,) = made.glob("*.deb")
        subprocess.run(["dpkg-deb", "--extract", package, made], check=True)
        package.unlink()
        version = Kernel(directory=made).modules.name
        subprocess.run(["busybox", "depmod", "-b", made, version], check=True)
        made.rename(kernel.directory)
    return kernel


def make_initramfs(kernel: Kernel, added: dict[str, str], path: Path) -> None:
    """Write the first file system to `path`; `added` are files of the root that it mounts."""
    root = path.parent / "initramfs"
    for name in ("bin", "proc", "sys", "dev", "added"):
        (root / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox") or "busybox", root / "bin/busybox")
    listed = []
    for number, module in enumerate(_load_order(kernel)):
        listed.append(f"/{number}-{module.name}")
        shutil.copy(module, root / listed[-1].lstrip("/"))
    (root / "modules").write_text("\n".join(listed))
    (root / "init").write_text(INIT)
    (root / "init").chmod(0o755)
    _copy_checkout(root / "added" / str(ROOT).lstrip("/"))
    for name, text in added.items():
        file = root / "added" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    names = "\n".join(str(file.relative_to(root)) for file in sorted(root.rglob("*")))
    with path.open("wb") as archive:
        cpio = ["busybox", "cpio", "-o", "-H", "newc"]
        subprocess.run(cpio, cwd=root, input=names.encode(), stdout=archive, check=True,
                       stderr=subprocess.DEVNULL)  # fmt: skip


def _copy_checkout(folder: Path) -> None:
    """Files of the repository as they are now: the machine would see half of a later change."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def _package() -> str:
    """The package that `linux-image-amd64` names. Raises `SystemExit` with one line."""
    asked = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=False
    )
    found = re.search(r"Depends: (linux-image-\S+)", asked.stdout)
    if found is None:
        raise SystemExit(
            "test-vm: apt knows no package linux-image-amd64: this needs Debian, and apt-get update"
        )
    return found[1]


def _load_order(kernel: Kernel) -> list[Path]:
    """Each module after those that it depends on."""
    needs: dict[str, list[str]] = {}
    for line in (kernel.modules / "modules.dep").read_text().splitlines():
        file, _, others = line.partition(":")
        needs[file] = others.split()
    names = {Path(file).name.partition(".")[0]: file for file in needs}
    order: list[str] = []

    def add(file: str) -> None:
        for other in needs[file]:
            add(other)
        if file not in order:
            order.append(file)

    for module in MODULES:
        add(names[module])
    return [kernel.modules / Path(file) for file in order]
