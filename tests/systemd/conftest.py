"""What the tests of bare hosts share: the installed file system."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.systemd.bare_host import BareHost, make_root
from tests.support.systemd.disk import Disk
from tests.support.systemd.installed import (
    CPU,
    SMALL,
    STOCK,
    WORKERS,
    Installed,
    documented,
    unpack_repository,
)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The host with everything installed, CPU in place of a GPU, and a small queue."""
    if not STOCK.exists():
        make_root(STOCK)
    root = tmp_path_factory.mktemp("installed") / "debian12"
    disk = Disk(root=STOCK, layers=(STOCK,)).above(root)
    unpack_repository(root / "root" / "forge")
    install, start = documented()
    BareHost(disk).install(install, network=True)
    for name in WORKERS:
        with (root / f"etc/forge/inference@{name}.env").open("a") as env:
            env.write(CPU)
    (root / "etc/forge/scheduler@1.env").write_text(SMALL)
    yield Installed(disk=disk, start=start)
    disk.remove()
