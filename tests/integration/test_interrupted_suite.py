"""A test run that is interrupted leaves neither a process nor a temporary file behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.runtime.waiting import until_blocking
from tests.support.suite.forge_run import ForgeRun, end_runs
from tests.support.suite.interrupted_suite import PIDS

ROOT = Path(__file__).parents[2]
SUITE = "tests/support/suite/interrupted_suite.py"
START_S = 240.0
"""Until processes have started or ended, on a machine with ten others to run."""
PYTEST = (sys.executable, "-m", "pytest", SUITE)
WORKER = (*PYTEST, "-n", "1")
WORKERS = (*PYTEST, "-n", "2")
"""They share a fork server."""
SHORT = (*PYTEST, "--timeout", "1", "-o", "timeout_func_only=true")
LOADED = (sys.executable, "-m", "tests.support.suite.loaded", *PYTEST)
MEASURED = (
    sys.executable,
    "-c",
    """
import sys
from pathlib import Path
from tests.support.suite.coverage_parts import Measurement, Part
part = Part(name="interrupted", paths=tuple(sys.argv[1:]))
Measurement(Path(sys.argv[-1]).parent).measure(part)
""",
    SUITE,
)

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(sys.platform != "linux", reason="the guard needs Linux"),
]


@pytest.fixture
def suite(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """The run of a suite by this command, and the processes it has started."""
    pids = tmp_path / "pids"
    argv = [*request.param, "--basetemp", str(tmp_path / "suite")]
    os.mkfifo(pids)
    environ = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    # A shell starts what it runs in the background with SIGINT ignored, and a child inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ |= {PIDS: str(pids), "TMPDIR": str(temporary)}
    running = subprocess.Popen(argv, cwd=ROOT, env=environ)
    signal.signal(signal.SIGINT, before)
    with pids.open() as told:
        started = [psutil.Process(int(pid)) for pid in told.read().split()]
    assert any(temporary.rglob("forge-ranks-*"))
    yield running, started
    running.kill()
    running.wait()
    until_blocking(lambda: not any(temporary.iterdir()))


def stays(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    return psutil.wait_procs(processes, timeout=START_S)[1]


@pytest.mark.parametrize(
    "suite",
    [PYTEST, WORKERS, LOADED, MEASURED],
    indirect=True,
    ids=["alone", "workers", "loaded", "measured"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_to_a_run_leaves_no_process(
    suite: tuple[subprocess.Popen[bytes], list[psutil.Process]], number: signal.Signals
) -> None:
    """Neither etcd, nor a service, nor its fork server, nor an orphan in a session of its own, nor
    the pytest of `make test-loaded` and `make coverage`."""
    running, started = suite
    running.send_signal(number)
    assert stays(started) == []


@pytest.mark.parametrize("suite", [WORKER, WORKERS], indirect=True, ids=["worker", "workers"])
def test_worker_that_dies_leaves_no_process(
    request: pytest.FixtureRequest,
    suite: tuple[subprocess.Popen[bytes], list[psutil.Process]],
) -> None:
    """Its processes end with it, not with the whole run; a fork server that other workers use,
    too, stays."""
    running, (worker, *started) = suite
    (etcd, pool, fork_server, detached) = started
    shared = request.node.callspec.id == "workers"
    if shared:
        # Else the run, which has no other test, may end before the last assertion.
        running.send_signal(signal.SIGSTOP)
    worker.kill()
    assert stays([etcd, pool, detached] if shared else started) == []
    assert fork_server.is_running() or not shared


@pytest.mark.parametrize("suite", [SHORT], indirect=True, ids=["timeout"])
def test_test_that_takes_too_long_leaves_no_process(
    suite: tuple[subprocess.Popen[bytes], list[psutil.Process]],
) -> None:
    """pytest-timeout ends the test process without any fixture's end."""
    _, started = suite
    assert stays(started) == []


def test_run_of_a_failed_test_is_ended(tmp_path: Path) -> None:
    """By the fixture `no_run_outlives_its_test`: a run of 1000 steps trains for hours."""
    run = ForgeRun(tmp_path / "run", root=tmp_path, steps=1)
    run._argv = [sys.executable, "-c", "import time; time.sleep(600)"]
    run.start()
    end_runs()
    assert run.process.poll() == -signal.SIGKILL
