"""A suite that `test_interrupted_suite` starts and interrupts: it starts processes and hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.pool.process import PoolProcess
from tests.support.runtime.etcd import EtcdServer

PIDS = "INTERRUPTED_SUITE_PIDS"
"""Environment variable: the pipe for the process ids, that of the test process first."""
_DETACHED = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid)
"""


@pytest.fixture
def processes(tmp_path: Path, etcd: EtcdServer, cluster: str) -> Iterator[None]:
    """An etcd, a service, the server that forked it, and a process whose parent has ended, and a
    temporary directory; fixtures are not torn down."""
    tempfile.mkdtemp(prefix="forge-ranks-")
    pool = PoolProcess(tmp_path / "pool", etcd=etcd, cluster=cluster)
    pool.start()
    fork_server = psutil.Process(pool.pid).ppid()
    assert fork_server != os.getpid()
    detached = subprocess.check_output([sys.executable, "-c", _DETACHED], text=True)
    with Path(os.environ[PIDS]).open("w") as pids:
        pids.write(f"{os.getpid()} {etcd.pid} {pool.pid} {fork_server} {detached}")
    yield


def test_that_hangs(processes: None) -> None:
    """For ever."""
    threading.Event().wait()
