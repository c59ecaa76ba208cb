"""Boots the machine, runs pytest in it, and returns its exit code.

The machine has the file system of this one, read-only, and the repository as it is at the start;
what it writes stays in its memory. Its systemd starts one unit, the tests, and powers off with it.
It has no network. It ends with this process, with its tests, or at its time limit.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from forge.runtime.process.child_processes import dying_with_parent
from tests.support.vm.kernel import ROOT, make_initramfs, make_kernel

LIMIT_S: Final = 5400.0
TEST_LIMIT_S: Final = 1800
"""For one test: without KVM a processor is emulated, some 20 times slower."""
MEMORY_MIB: Final = 4096
PACKAGES: Final = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "dpkg-deb": "dpkg",
    "apt-get": "apt",
    "systemctl": "systemd",
    "bwrap": "bubblewrap",
    "podman": "podman",
}
_END: Final = re.compile(rb"forge-vm: exit code (\d+)")
_UNIT: Final = """[Unit]
DefaultDependencies=no
Wants=dbus.socket
After=dbus.socket
SuccessAction=poweroff-immediate
FailureAction=poweroff-immediate
[Service]
Type=oneshot
ExecStart=/forge-vm/run
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
"""
_RUN: Final = """#!/bin/sh
ip link set lo up
cd {root}
export HOME=/root PATH={path} OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
if command -v dockerd > /dev/null; then
    # dockerd waits only 15 s for a containerd that it starts itself.
    socket=/run/containerd/containerd.sock
    containerd --root /run/containerd-data > /run/containerd.log 2>&1 &
    timeout 300 sh -c "until [ -S $socket ]; do sleep 1; done" || tail -5 /run/containerd.log
    dockerd --containerd=$socket --iptables=false --bridge=none --data-root=/run/docker-data \\
        > /run/dockerd.log 2>&1 &
    timeout 300 sh -c 'until docker version; do sleep 1; done' > /dev/null 2>&1 ||
        tail -5 /run/dockerd.log
fi
{command}
echo "forge-vm: exit code $?"
"""


def missing() -> str:
    """Return why there can be no machine here; empty if there can."""
    if os.geteuid() != 0:
        return "the machine shares the files of root: run it as root"
    absent = sorted(PACKAGES[name] for name in PACKAGES if shutil.which(name) is None)
    return f"not installed: apt-get install {' '.join(absent)}" if absent else ""


def run_pytest(arguments: Sequence[str]) -> int:
    """Run pytest with these arguments in a new machine; print what it prints."""
    python = str(ROOT / ".venv/bin/python")
    options = [f"--timeout={TEST_LIMIT_S}", "-o", "tmp_path_retention_policy=none"]
    command = shlex.join([python, "-m", "pytest", *options, *arguments])
    script = _RUN.format(root=shlex.quote(str(ROOT)), path=_path(), command=command)
    added = {"forge-vm/run": script, "etc/systemd/system/forge-vm.service": _UNIT}
    kernel = make_kernel()
    with tempfile.TemporaryDirectory(prefix="forge-vm-") as directory:
        initramfs = Path(directory) / "initramfs.cpio"
        make_initramfs(kernel, added, initramfs)
        return _boot(_words(kernel.image, initramfs))


def _boot(words: Sequence[str]) -> int:
    machine = subprocess.Popen(
        dying_with_parent(words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    limit = threading.Timer(LIMIT_S, machine.kill)
    limit.daemon = True
    limit.start()
    code = None
    try:
        assert machine.stdout is not None
        for line in machine.stdout:
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()
            if found := _END.search(line):
                code = int(found[1])
        machine.wait()
    finally:
        limit.cancel()
        machine.kill()
        machine.wait()
    if code is None:
        print(f"test-vm: the machine ended without a result, or took longer than {LIMIT_S:g} s")
        return 1
    return code


def _words(image: Path, initramfs: Path) -> list[str]:
    """The command line of qemu."""
    kernel = "console=ttyS0 quiet panic=-1"
    share = "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"
    return [
        str(shutil.which("qemu-system-x86_64")),
        *("-accel", "kvm" if _has_kvm() else "tcg,thread=multi", "-cpu", "max"),
        *("-smp", "1", "-m", str(MEMORY_MIB)),
        *("-display", "none", "-serial", "stdio", "-monitor", "none", "-nic", "none"),
        *("-no-reboot", "-nodefaults", "-device", "virtio-rng-pci", "-virtfs", share),
        *("-kernel", str(image), "-initrd", str(initramfs), "-append", kernel),
    ]


def _has_kvm() -> bool:
    """Whether the processor itself runs machines: /dev/kvm alone does not tell."""
    flags = re.search(r"^flags\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.M)
    able = flags is not None and bool({"vmx", "svm"} & set(flags[1].split()))
    return able and os.access("/dev/kvm", os.R_OK | os.W_OK)


def _path() -> str:
    return shlex.quote(
        f"{ROOT / '.venv/bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    )
