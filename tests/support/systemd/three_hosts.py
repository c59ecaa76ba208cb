"""The three hosts of docs/runbooks/index.md: a bridge and ssh between them, no service yet.

Owns the machines, their loss and their replacement; the pages have the commands.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tests.support.systemd.bare_host import BareHost, boot_copy
from tests.support.systemd.disk import remove_tree
from tests.support.systemd.installed import CPU, ROOT, Installed, unpack_repository
from tests.support.systemd.network import Network
from tests.support.systemd.runbook import steps
from tests.support.systemd.work import TASKS

_UPGRADE = ROOT / "docs/runbooks/upgrade.md"
NEXT_RELEASE = "0.2.0"
NAMES = ("forge-1", "forge-2", "forge-3")
SSH = """
mkdir -p /root/.ssh
ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519
cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys
echo 'StrictHostKeyChecking accept-new' > /root/.ssh/config
systemctl enable ssh systemd-networkd
rm -f /etc/forge/key
"""


class ThreeHosts:
    """The booted hosts by name, as after `cp deploy/config` of deploy/README.md."""

    def __init__(self, installed: Installed, folder: Path) -> None:
        self._installed = installed
        self._folder = folder
        self._disks = 0
        self._network = Network()
        self._shared: dict[Path, str] = installed.software
        for name in ("checkpoints", "backup"):
            (folder / name).mkdir()
            self._shared[folder / name] = f"/mnt/{name}"
        self._stock = installed.copy(folder / "stock")
        self._prepare()
        self._install_next_release()
        self.hosts: dict[str, BareHost] = {}
        for name in NAMES:
            self.hosts[name] = self._new(name)

    def replace(self, name: str) -> None:
        """Boot a new host of this name, with an empty disk."""
        lost = self.hosts[name]
        self.hosts[name] = self._new(name)
        lost.disk.remove()

    def close(self) -> None:
        """End all hosts, and remove their disks."""
        for host in self.hosts.values():
            host.kill()
            host.disk.remove()
        self._network.close()
        self._stock.remove()
        remove_tree(self._folder)

    def status(self) -> dict[str, Any]:
        """What `forge status --json` prints on the first host."""
        shown = self.hosts["forge-1"].run("bash", "-lc", "forge status --json 2>&1", check=False)
        answers = [line for line in shown.splitlines() if line.startswith("{")]
        away = {"services": [], "problems": [shown.strip()], "trainer": None}
        status: dict[str, Any] = json.loads(answers[-1]) if answers else away
        return status

    def groups(self) -> dict[str, int]:
        """Groups by state, as the pool counts them; none while it does not answer."""
        command = "forge pool stats --json 2>/dev/null"
        shown = self.hosts["forge-1"].run("bash", "-lc", command, check=False)
        counts: dict[str, int] = {}
        for line in shown.splitlines():
            for one in json.loads(line).get("group_counts", ()):
                state = one.get("state", "").removeprefix("GROUP_STATE_").lower()
                counts[state] = counts.get(state, 0) + int(one["groups"])
        return counts

    def submit(self, first: int, beyond: int) -> None:
        """Submit the tasks of these seeds."""
        file = f"/root/tasks-{first}.jsonl"
        write = f"python /root/tasks.py {first} {beyond} > {file} && forge queue submit {file}"
        self.hosts["forge-1"].run("bash", "-elc", write)

    def _prepare(self) -> None:
        """Add ssh, the next release, the drop-ins of TLS and small settings to the stock."""
        root = self._stock.root
        unpack_repository(root / f"root/forge-{NEXT_RELEASE}")
        project = root / f"root/forge-{NEXT_RELEASE}/pyproject.toml"
        named = re.sub(r'(?m)^version = ".*"', f'version = "{NEXT_RELEASE}"', project.read_text())
        project.write_text(named)
        (root / "root/tasks.py").write_text(TASKS)
        with (root / "etc/hosts").open("a") as hosts:
            hosts.write("".join(f"10.0.0.{n} {name}\n" for n, name in enumerate(NAMES, start=1)))
        units = root / "etc/systemd/system"
        shutil.copytree(ROOT / "deploy/systemd-tls", units, dirs_exist_ok=True)
        (root / "etc/forge/trainer@1.env").write_text(CPU.splitlines()[0] + "\n")
        BareHost(self._stock, shared=self._installed.software).install(SSH, network=False)

    def _install_next_release(self) -> None:
        """As the page does it, on a host that reaches a package index."""
        (install, *_) = (step for step in steps(_UPGRADE) if "pip install" in step.text)
        script = f"cd /root/forge-{NEXT_RELEASE}\n{install.text}"
        BareHost(self._stock, shared=self._installed.software).install(script, network=True)

    def _new(self, name: str) -> BareHost:
        self._disks += 1
        root = self._folder / f"{name}-{self._disks}"
        return boot_copy(self._stock, root, name=name, network=self._network, shared=self._shared)
