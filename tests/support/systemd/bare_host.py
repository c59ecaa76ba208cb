"""A bare Debian 12 host in a container of systemd-nspawn: its own systemd, users and network.

Owns the container: it is built, runs commands, boots and reboots. Needs root, `mmdebstrap` and
`systemd-container`. Not here: what is installed in it (`tests/systemd`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.support.runtime.waiting import StillNotSo, until_blocking
from tests.support.systemd.disk import Disk
from tests.support.systemd.network import Network

START_S = 300.0
GONE_S = 60.0
REBOOT = 133
"""Exit code of systemd-nspawn for a host that reboots."""
STOCK = "systemd,systemd-sysv,dbus,python3,ca-certificates,openssh-server,rsync"
"""Packages of every Debian host; nothing of Forge's needs, and no compiler."""
NSPAWN = ("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--console=pipe")
HIERARCHIES = tuple(Path("/sys/fs/cgroup", name) for name in ("systemd", "unified", ""))
_GROUP = re.compile(r"forge-test-(\d+)-")
_OWN_GROUP = f"""
for group in {" ".join(map(str, HIERARCHIES))}; do
    [ ! -e $group/cgroup.procs ] || {{ mkdir -p $group/$0 && echo $$ > $group/$0/cgroup.procs; }}
done
exec "$@"
"""
"""A control group for each container. In a common one a systemd would find, and kill, processes of
the other ones."""
NETWORKD = """[Match]
Name=host0
[Network]
Address={address}/24
LinkLocalAddressing=no
"""


def missing() -> str:
    """Return why there can be no such host here; empty if there can."""
    if os.geteuid() != 0:
        return "a container needs root"
    programs = ("mmdebstrap", "systemd-nspawn", "ip")
    absent = [program for program in programs if shutil.which(program) is None]
    return (
        f"not installed: {', '.join(absent)} (Debian: mmdebstrap systemd-container iproute2)"
        * bool(absent)
    )


def make_root(folder: Path) -> None:
    """Make the file system of a stock Debian 12, from Debian's mirror. Takes a minute."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    run = ["mmdebstrap", "--variant=minbase", f"--include={STOCK}", "bookworm", str(folder)]
    subprocess.run(run, check=True, stdout=subprocess.DEVNULL)


def _remove_ended() -> None:
    """Remove the control groups of test runs that were killed."""
    for group in (group for each in HIERARCHIES for group in each.glob("forge-test-*")):
        found = _GROUP.match(group.name)
        if found is not None and not psutil.pid_exists(int(found[1])):
            _remove(group)


def _remove(group: Path) -> None:
    """Remove a control group, and those below, once its processes have ended; a used one stays."""
    if not group.is_dir():
        return
    groups = [*sorted((each for each in group.rglob("*") if each.is_dir()), reverse=True), group]
    with suppress(StillNotSo, OSError):
        # The kernel ends the processes of a killed container one by one.
        until_blocking(
            lambda: not any((each / "cgroup.procs").read_text() for each in groups), limit_s=GONE_S
        )
        for each in groups:
            each.rmdir()


class BareHost:
    """One host, with its disk.

    `network` connects it to others under its own address; without one it has loopback alone.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        name: str = "debian12",
        network: Network | None = None,
        address: str = "",
        shared: Mapping[Path, str] = MappingProxyType({}),
    ) -> None:
        self.disk = disk
        self.root = root = disk.root
        self.name = name
        self._group = f"forge-test-{os.getpid()}-{name}"
        self._log = root.parent / f"{root.name}.log"
        self._network = network
        self._shared = [f"--bind={outside}:{inside}" for outside, inside in shared.items()]
        """Directories of this machine that the host mounts, as from a file server."""
        self._container: subprocess.Popen[bytes] | None = None
        if network is not None:
            file = root / "etc/systemd/network/10-host0.network"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(NETWORKD.format(address=address))
        self._init = 0
        """Process id of its systemd, seen from outside."""

    def install(self, script: str, *, network: bool) -> None:
        """Run a shell script as root on the host that is not booted."""
        (self.root / "install.sh").write_text("set -e\n" + script)
        outside = [*_pip_settings()] if network else ["--private-network"]
        where = [f"--directory={self.root}", "--chdir=/root/forge", *self._shared]
        done = subprocess.run(
            [*NSPAWN, *where, *outside, "bash", "/install.sh"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]

    def boot(self) -> None:
        """Start its systemd; return when that takes commands."""
        _remove_ended()
        where = [f"--machine={self.name}", f"--directory={self.root}", *self._shared]
        within: list[str] = []
        if self._network is None:
            where.append("--private-network")
        else:
            within = self._network.enter
            where.append(f"--network-bridge={self._network.bridge}")
        with self._log.open("ab") as log:
            self._container = subprocess.Popen(
                ["sh", "-c", _OWN_GROUP, self._group, *within, *NSPAWN, "--boot", *where],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._wait_for_systemd()

    def reboot(self) -> None:
        """Reboot it as an operator does; return when its new systemd takes commands."""
        assert self._container is not None
        self.run("systemctl", "reboot", check=False)
        # nspawn ends so, and leaves the start to its supervisor.
        assert self._container.wait(START_S) == REBOOT
        self.boot()

    def kill(self) -> None:
        """Take its power away: nothing is flushed, no connection is closed."""
        if self._container is None:
            return
        os.kill(self._init, signal.SIGKILL)
        self._container.wait(START_S)
        self._container = None
        self._remove_groups()

    def stop(self) -> None:
        """Shut it down."""
        if self._container is not None:
            self._container.terminate()
            try:
                self._container.wait(60)
            except subprocess.TimeoutExpired:
                self._container.kill()
                self._container.wait()
            self._remove_groups()

    def run(self, *words: str, check: bool = True) -> str:
        """Run a command on the booted host; return its standard output and errors."""
        done = subprocess.run(
            ["nsenter", "--target", str(self._init), "--all", "--", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0 or not check, (words, done.stdout[-4000:])
        return done.stdout

    def show(self, unit: str, key: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={key}", unit).strip()

    def journal(self, *words: str) -> str:
        """Return messages of the journal since the last boot."""
        return self.run("journalctl", "--boot", "--no-pager", "--output=cat", *words)

    def _remove_groups(self) -> None:
        for hierarchy in HIERARCHIES:
            _remove(hierarchy / self._group)

    def _wait_for_systemd(self) -> None:
        deadline_s = time.monotonic() + START_S
        assert self._container is not None
        while time.monotonic() < deadline_s:
            assert self._container.poll() is None, self._log.read_text()[-4000:]
            for child in psutil.Process(self._container.pid).children():
                self._init = child.pid
                state = self.run("systemctl", "is-system-running", check=False).strip()
                if state in ("starting", "running", "degraded"):
                    return
            # Real time: a machine boots.
            time.sleep(0.5)
        raise TimeoutError(self._log.read_text()[-4000:])


def boot_copy(
    stock: Disk, root: Path, *, name: str, network: Network, shared: Mapping[Path, str]
) -> BareHost:
    """Boot a host with a copy of a disk. Its name, forge-N, gives its address, 10.0.0.N."""
    disk = stock.above(root)
    (root / "etc/hostname").write_text(f"{name}\n")
    address = f"10.0.0.{name.rpartition('-')[2]}"
    host = BareHost(disk, name=name, network=network, address=address, shared=shared)
    host.boot()
    return host


def _pip_settings() -> Iterator[str]:
    """Options that give the host the indexes that pip has here, files of them included."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    for scope, key, value in re.findall(r"^(.+?)\.(\S+)='(.*)'$", listed.stdout, re.M):
        if scope in ("global", "user", "site", ":env:"):
            yield f"--setenv=PIP_{key.upper().replace('-', '_')}={value}"
            for word in value.split():
                path = Path(word.removeprefix("file://"))
                # An index refers to files beside it.
                path = path.parent if word.startswith("file://") else path
                if path.is_absolute() and path.exists():
                    yield f"--bind-ro={path}"
