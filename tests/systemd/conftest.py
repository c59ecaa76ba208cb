"""What the tests of bare hosts share: the installed file system."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.systemd.bare_host import BareHost, make_root
from tests.support.systemd.installed import (
    CPU,
    SMALL,
    STOCK,
    WORKERS,
    Installed,
    documented,
    remove_tree,
    unpack_repository,
)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The host with everything installed, CPU in place of a GPU, and a small queue."""
    if not STOCK.exists():
        make_root(STOCK)
    root = tmp_path_factory.mktemp("installed") / "debian12"
    subprocess.run(["cp", "--archive", "--reflink=auto", str(STOCK), str(root)], check=True)
    unpack_repository(root / "root" / "forge")
    install, start = documented()
    BareHost(root).install(install, network=True)
    for name in WORKERS:
        with (root / f"etc/forge/inference@{name}.env").open("a") as env:
            env.write(CPU)
    (root / "etc/forge/scheduler@1.env").write_text(SMALL)
    yield Installed(root=root, start=start)
    remove_tree(root)
