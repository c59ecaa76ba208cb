"""Two bare hosts that `forge deploy` makes a cluster of: software and a model, nothing else.

Owns the machines and the releases; the inventory is the test's. The first host renders, and
reaches the second one by ssh.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from tests.support.systemd.bare_host import BareHost, boot_copy
from tests.support.systemd.installed import ROOT, SOFTWARE, Installed
from tests.support.systemd.network import Network
from tests.support.systemd.three_hosts import SSH
from tests.support.systemd.work import TASKS

RELEASE: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
NEXT, BROKEN = "0.4.0", "0.5.0"
NAMES = ("forge-1", "forge-2")
BROKEN_MODULE = "services/scheduler/app.py"
"""Imported at the start alone: `forge deploy render` asks for settings, and finds nothing wrong."""
OTHER_UNIT = "share/forge/systemd/forge-trainer@.service"
"""Of a service that a failing upgrade does not reach."""
_BARE = """
rm -rf /etc/forge /etc/systemd/system/forge* /etc/sysusers.d/forge.conf /etc/tmpfiles.d/forge.conf
rm -rf /var/lib/forge/pool* /var/lib/forge/trainer*
"""


class TwoHosts:
    """The booted hosts by name."""

    def __init__(self, installed: Installed, folder: Path) -> None:
        self._folder = folder
        self._network = Network()
        software = installed.root / SOFTWARE.lstrip("/")
        make_release(software / RELEASE, software / NEXT)
        make_release(software / RELEASE, software / BROKEN)
        broken = next((software / BROKEN).glob(f"lib/python3*/site-packages/{BROKEN_MODULE}"))
        broken.unlink()
        broken.write_text("raise SystemExit('planted: this release does not start')\n")
        unit = software / BROKEN / OTHER_UNIT
        text = unit.read_text()
        unit.unlink()
        unit.write_text(text + "# planted: another unit than that of the release before\n")
        # Each host has its own link: the releases alone are shared.
        shared = {software / one: f"{SOFTWARE}/{one}" for one in (RELEASE, NEXT, BROKEN)}
        stock = self._stock = installed.copy(folder / "stock")
        (stock.root / "root/tasks.py").write_text(TASKS)
        with (stock.root / "etc/hosts").open("a") as hosts:
            # As on an installed Debian: torchrun resolves it on the host of rank 0.
            hosts.write("127.0.0.1 localhost\n")
            hosts.write("".join(f"10.0.0.{n} forge-{n}\n" for n in range(1, 4)))
        # As from a file server: a trainer's hosts mount one directory.
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir()
        shared[checkpoints] = "/mnt/checkpoints"
        for one in shared.values():
            (stock.root / one.lstrip("/")).mkdir(parents=True, exist_ok=True)
        BareHost(stock, shared=shared).install(SSH + _BARE, network=False)
        self._shared = shared
        self.hosts: dict[str, BareHost] = {}
        for name in NAMES:
            self.boot(name)

    def boot(self, name: str) -> None:
        """Boot a host of this name with an empty disk; one of before loses its power and its
        disk."""
        root = self._folder / name
        if name in self.hosts:
            self.hosts[name].kill()
            self.hosts[name].disk.remove()
        self.hosts[name] = boot_copy(
            self._stock, root, name=name, network=self._network, shared=self._shared
        )

    @property
    def first(self) -> BareHost:
        """The host that renders."""
        return self.hosts["forge-1"]

    def deploy(self, *words: str, release: str = RELEASE, check: bool = True) -> str:
        """Run `forge deploy` of a release on the first host."""
        program = (f"{SOFTWARE}/{release}/bin/python", "-m", "forge.cli.main", "deploy")
        return self.first.run(*program, *words, check=check)

    def status(self) -> dict[str, Any]:
        """What `forge status --json` prints on the first host."""
        shown = self.first.run("bash", "-lc", "forge status --json 2>&1", check=False)
        answers = [line for line in shown.splitlines() if line.startswith("{")]
        away = {"services": [], "problems": [shown.strip()], "scheduler": None}
        status: dict[str, Any] = json.loads(answers[-1]) if answers else away
        return status

    def check(self) -> dict[str, Any]:
        """What `forge deploy check --out ... --json` prints on the first host."""
        shown = self.deploy("check", "--out", "/root/rendered", "--json", check=False)
        found: dict[str, Any] = json.loads(shown.strip().rpartition("\n")[2])
        return found

    def trained(self) -> int:
        """Groups that are trained, as the scheduler counts them."""
        return int((self.status()["scheduler"] or {}).get("trained", 0))

    def submit(self, first: int, beyond: int) -> None:
        """Submit the tasks of these seeds."""
        file = f"/root/tasks-{first}.jsonl"
        self.write_tasks("forge-1", file, first, beyond)
        self.first.run("bash", "-elc", f"forge queue submit {file}")

    def write_tasks(self, host: str, file: str, first: int, beyond: int) -> None:
        """Write the tasks of these seeds to a file of a host."""
        python = f"{SOFTWARE}/{RELEASE}/bin/python"
        write = f"mkdir -p $(dirname {file}) && {python} /root/tasks.py {first} {beyond} > {file}"
        self.hosts[host].run("bash", "-ec", write)

    def close(self) -> None:
        """End both hosts, and remove their disks."""
        for host in self.hosts.values():
            host.kill()
            host.disk.remove()
        self._network.close()
        self._stock.remove()


def make_release(of: Path, release: Path) -> None:
    """Make a release that differs in its version alone. Its own files are links to those of another
    one; those of other packages are that one's."""
    shutil.rmtree(release, ignore_errors=True)
    (packages,) = of.glob("lib/python3*/site-packages")
    own = release / packages.relative_to(of)
    own.mkdir(parents=True)
    for one in packages.iterdir():
        if one.name in ("forge", "services") or one.name.startswith("forge_rl-"):
            subprocess.run(["cp", "-al", one, own / one.name], check=True)
        else:
            (own / one.name).symlink_to(f"{SOFTWARE}/{of.name}/{one.relative_to(of)}")
    for name in ("bin", "share", "pyvenv.cfg"):
        subprocess.run(["cp", "-al", of / name, release / name], check=True)
    (info,) = own.glob("forge_rl-*.dist-info")
    text = (info / "METADATA").read_text()
    (info / "METADATA").unlink()
    version = f"Version: {of.name}\n"
    (info / "METADATA").write_text(text.replace(version, f"Version: {release.name}\n"))
    info.rename(info.with_name(f"forge_rl-{release.name}.dist-info"))
