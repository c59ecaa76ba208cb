"""What the tests of bare hosts share: the installed file system."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.systemd.installed import Installed, install_host


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The host with everything installed, CPU in place of a GPU, and a small queue."""
    with install_host(tmp_path_factory.mktemp("installed")) as installed:
        yield installed
