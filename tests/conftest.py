"""Fixtures every suite may use: a real etcd, a coordinator connected to it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import structlog
import uvloop
from hypothesis import Phase, settings

from forge.runtime.coordination import Coordinator
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.service_process import share_fork_server
from tests.support.suite.forge_run import end_runs
from tests.support.suite.forked_worker import Spec, fork_workers
from tests.support.suite.process_guard import start_guard

if TYPE_CHECKING:
    from tests.support.scheduler.cluster import SchedulerCluster

# Before torch comes: two workers whose threads spin for each other on two cores take ten times as
# long. Processes that tests start have one thread each, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

start_guard()

_clusters = itertools.count()

# No test asserts a time: on a busy machine an example may take as long as it likes. The default run
# has the same examples each time, half as many as hypothesis takes by default; `make properties`
# and `make fuzz` take new ones.
# Phase.explain traces each line: a failure is reported within the time a test may take without it.
_phases = set(Phase) - {Phase.explain}
settings.register_profile("forge", max_examples=50, deadline=None, derandomize=True, phases=_phases)
settings.register_profile("fuzz", deadline=None, print_blob=True)
settings.load_profile("forge")


def pytest_configure(config: pytest.Config) -> None:
    """Workers share a fork server; one alone has its own, which ends with it."""
    if (config.getoption("numprocesses", default=None) or 0) > 1:
        share_fork_server()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Spec]) -> None:
    """Workers that share a fork server are forked from it, too."""
    if len(specs) > 1:
        fork_workers(specs)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop the services run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports and test items stay: the garbage collector need not walk through them each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    """Undoes `log_to_people` of a command run in process: it hides info from later tests."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests that leave it in peace; each uses a cluster name of its own."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def etcd(shared_etcd: EtcdServer) -> EtcdServer:
    """A running etcd; not to be killed or frozen: use `own_etcd` for that."""
    return shared_etcd


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the test's own, to kill, freeze and restart."""
    server = EtcdServer(tmp_path / "etcd")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def own_signals() -> Iterator[None]:
    """Children get SIGHUP and SIGINT also where `nohup`, or the `&` of a script, starts the
    tests."""
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def cluster() -> str:
    """A cluster name no other test uses."""
    return f"test-{next(_clusters)}"


@pytest_asyncio.fixture
async def coordinator(etcd: EtcdServer, cluster: str) -> AsyncIterator[Coordinator]:
    """Connected to `etcd`, in a cluster of its own."""
    connected = await Coordinator.connect(etcd.endpoint, cluster=cluster)
    yield connected
    await connected.close()


@pytest_asyncio.fixture
async def forge(
    tmp_path: Path, etcd: EtcdServer, cluster: str, coordinator: Coordinator
) -> AsyncIterator[SchedulerCluster]:
    """A pool shard; schedulers are to be started."""
    # Here, since few tests need it.
    from tests.support.scheduler.cluster import SchedulerCluster

    running = SchedulerCluster(tmp_path, etcd=etcd, cluster=cluster, coordinator=coordinator)
    running.start_pool()
    yield running
    await running.close()


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port of this host on which a process listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    yield
    end_runs()


@pytest.fixture(scope="session")
def forge_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with starting weights for the tiny model, from a course so short that they can hold a
    conversation and hardly solve anything: runs are tested with them, not learning."""
    # Here, since few tests need torch.
    from filelock import FileLock

    from tests.support.suite.starting_weights import make_starting_weights

    root = _shared_by_workers(tmp_path_factory) / "forge"
    with FileLock(f"{root}.lock"):
        make_starting_weights(root, flawless_steps=90, imperfect_steps=30)
    return root


def _shared_by_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this test run; pytest-xdist gives each worker one within it."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
