"""Children of a supervisor: real processes that crash, linger and lose their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from forge.core.errors import ConfigError, FailedPrecondition
from forge.runtime.process.child_processes import (
    ProcessEvent,
    ProcessSpec,
    ProcessSupervisor,
    Restart,
)
from tests.support.runtime.waiting import until

SOON = Restart(backoff_s=0.01)
SOON_S = 120.0
"""For a Python to start, on a machine with ten others to run."""


class Watched:
    """A supervisor whose events a test can await."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.events: list[ProcessEvent] = []
        self._news = asyncio.Event()
        self.supervisor = ProcessSupervisor(on_event=self._note)

    def _note(self, event: ProcessEvent) -> None:
        self.events.append(event)
        self._news.set()

    async def until(self, kind: str, *, count: int = 1) -> ProcessEvent:
        """The count-th event of a kind."""
        async with asyncio.timeout(SOON_S):
            while True:
                found = [event for event in self.events if event.kind == kind]
                if len(found) >= count:
                    return found[count - 1]
                self._news.clear()
                await self._news.wait()

    async def start(
        self, name: str, code: str, *, restart: Restart = SOON, stop_s: float = 30.0
    ) -> None:
        await self.supervisor.start(
            ProcessSpec(
                name=name,
                argv=[sys.executable, "-c", code],
                env=dict(os.environ),
                log_path=self._folder / f"{name}.log",
                restart=restart,
                stop_s=stop_s,
            )
        )


@pytest_asyncio.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    made = Watched(tmp_path)
    yield made
    await made.supervisor.stop()


SLEEP = "import time; print('up', flush=True); time.sleep(300)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


async def until_logged(path: Path, text: str) -> None:
    await until(lambda: path.exists() and text in path.read_text())


async def test_child_that_restarts_during_a_stop_is_stopped_too(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within its time to stop."""
    stopping: list[asyncio.Task[None]] = []
    spawn = asyncio.create_subprocess_exec

    async def spawn_as_all_are_stopped(*argv: str, **options: Any) -> asyncio.subprocess.Process:
        stopping.append(asyncio.create_task(watched.supervisor.stop()))
        await asyncio.sleep(0)
        return await spawn(*argv, **options)

    await watched.start("pool", SLEEP)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn_as_all_are_stopped)
    os.kill(watched.supervisor.pids()["pool"], signal.SIGKILL)
    await watched.until("stopped")
    await asyncio.gather(*stopping)
    assert not [event for event in watched.events if event.kind == "killed"]


async def test_crash_is_one_line_and_a_restart(watched: Watched) -> None:
    """Name, exit code, last output and the time of the restart in one line."""
    await watched.start("pool", "import sys; print('disk on fire'); sys.exit(3)")
    event = await watched.until("crashed")
    assert event.line == "pool crashed (exit code 3), restart in 0.0 s: disk on fire"
    await watched.until("started", count=2)


async def test_killed_child_is_named_by_its_signal_and_gets_a_new_pid(watched: Watched) -> None:
    """After kill -9 another process has the same name."""
    await watched.start("gateway", SLEEP)
    first = watched.supervisor.pids()["gateway"]
    os.kill(first, signal.SIGKILL)
    assert (await watched.until("crashed")).cause == "SIGKILL"
    await watched.until("started", count=2)
    assert watched.supervisor.pids()["gateway"] != first


async def test_last_output_of_a_json_log_is_its_event_and_error(watched: Watched) -> None:
    """Log lines of services are shown for people."""
    code = "import json, sys; print(json.dumps({'event': 'crashed', 'error': 'boom'})); sys.exit(1)"
    await watched.start("trainer", code)
    assert (await watched.until("crashed")).last_line == "crashed: boom"


async def test_last_output_of_a_go_program_is_not_its_stack(watched: Watched) -> None:
    """etcd's panic has its cause in one log line, followed by a long stack."""
    code = """
import json, sys
print(json.dumps({"level": "panic", "msg": "failed to create WAL", "error": "no space left"}))
print("panic: failed to create WAL\\n\\ngoroutine 1 [running]:\\nmain.main()\\n\\tmain.go:32 +0x45")
sys.exit(2)
"""
    await watched.start("etcd", code)
    event = await watched.until("gave_up")
    assert event.line == "etcd cannot start: failed to create WAL: no space left"


async def test_child_that_keeps_crashing_is_not_restarted(watched: Watched) -> None:
    """After some crashes."""
    restart = Restart(max_restarts=2, backoff_s=0.01)
    await watched.start("router", "import sys; print('no weights'); sys.exit(1)", restart=restart)
    event = await watched.until("gave_up")
    assert event.line == "router keeps crashing (exit code 1), giving up: no weights"
    assert [one.kind for one in watched.events].count("started") == 3
    assert watched.supervisor.pids() == {}


async def test_child_with_wrong_settings_is_not_started_again(watched: Watched) -> None:
    """Exit code 2 at the first start: the next start would end the same."""
    await watched.start("router", "import sys; print('no such model'); sys.exit(2)")
    event = await watched.until("gave_up")
    assert event.line == "router cannot start: no such model"
    assert [one.kind for one in watched.events] == ["started", "gave_up"]


async def test_child_that_has_run_may_fail_to_start_once(watched: Watched, tmp_path: Path) -> None:
    """After a crash its port may still be in use."""
    code = f"""
import pathlib, sys, time
runs = pathlib.Path({str(tmp_path / "runs")!r})
runs.open("a").write("x")
match len(runs.read_text()):
    case 1: sys.exit(1)
    case 2: sys.exit(2)
print("up", flush=True)
time.sleep(600)
"""
    await watched.start("router", code, restart=Restart(max_restarts=5, backoff_s=0.01))
    await until_logged(tmp_path / "router.log", "up")
    assert "gave_up" not in [event.kind for event in watched.events]


async def test_child_that_exits_with_0_is_not_restarted(watched: Watched) -> None:
    """Exit code 0 is not a crash."""
    await watched.start("runner", "pass")
    await watched.until("ended")
    assert [event.kind for event in watched.events] == ["started", "ended"]


async def test_stop_begins_with_the_youngest_child(watched: Watched, tmp_path: Path) -> None:
    """Later children depend on earlier ones."""
    for name in ("etcd", "pool", "gateway"):
        await watched.start(name, SLEEP)
        await until_logged(tmp_path / f"{name}.log", "up")
    await watched.supervisor.stop()
    stopped = [event.name for event in watched.events if event.kind == "stopped"]
    assert stopped == ["gateway", "pool", "etcd"]
    assert watched.supervisor.pids() == {}


async def test_child_that_does_not_stop_is_killed(watched: Watched, tmp_path: Path) -> None:
    """Stop returns when the child's time is over."""
    await watched.start("stubborn", STUBBORN, stop_s=0.2)
    await until_logged(tmp_path / "stubborn.log", "up")
    pid = watched.supervisor.pids()["stubborn"]
    await watched.supervisor.stop()
    assert not psutil.pid_exists(pid)
    assert (await watched.until("killed")).line == (
        "stubborn did not stop when asked to and was killed"
    )


async def test_stop_ends_a_pause_before_a_restart(watched: Watched) -> None:
    """A stop does not wait for the restart."""
    restart = Restart(backoff_s=300, max_backoff_s=300)
    await watched.start("pool", "import sys; sys.exit(1)", restart=restart, stop_s=300)
    await watched.until("crashed")
    async with asyncio.timeout(SOON_S):
        await watched.supervisor.stop()
    assert [event.kind for event in watched.events] == ["started", "crashed"]


async def test_missing_program_is_one_line(watched: Watched, tmp_path: Path) -> None:
    """The error names the child and the program."""
    spec = ProcessSpec(name="etcd", argv=["/no/such/etcd"], env={}, log_path=tmp_path / "etcd.log")
    with pytest.raises(
        ConfigError, match="etcd cannot be started: there is no program /no/such/etcd"
    ):
        await watched.supervisor.start(spec)


async def test_missing_program_at_a_restart_is_an_error(watched: Watched, tmp_path: Path) -> None:
    """As any crash that repeats."""
    program = tmp_path / "pool"
    program.write_text(f"#!{sys.executable}\nimport os; os.remove(__file__); os._exit(1)\n")
    program.chmod(0o755)
    await watched.supervisor.start(
        ProcessSpec(name="pool", argv=[str(program)], env={}, log_path=tmp_path / "pool.log")
    )
    event = await watched.until("gave_up")
    assert event.last_line.startswith("pool cannot be started")


async def test_two_children_cannot_have_one_name(watched: Watched) -> None:
    """A child is found by its name."""
    await watched.start("pool", SLEEP)
    with pytest.raises(FailedPrecondition, match="a child pool already"):
        await watched.start("pool", SLEEP)


PARENT = """
import asyncio, os, sys
from pathlib import Path
from forge.runtime.process.child_processes import ProcessSpec, ProcessSupervisor

async def main():
    supervisor = ProcessSupervisor(on_event=lambda event: None)
    for name in ("a", "b"):
        await supervisor.start(ProcessSpec(
            name=name, argv=[sys.executable, "-c", sys.argv[1]], env=dict(os.environ),
            log_path=Path(sys.argv[2]) / f"{name}.log"))
    print(*supervisor.pids().values(), flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


async def test_no_child_outlives_a_killed_parent(tmp_path: Path) -> None:
    """After kill -9 of the supervisor, and also a child that ignores SIGTERM."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, STUBBORN, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    await until_logged(tmp_path / "b.log", "up")
    assert len(children) == 2
    parent.kill()
    parent.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, SOON_S)
    assert alive == []


async def test_ctrl_c_reaches_only_the_parent(watched: Watched) -> None:
    """It then stops its children in order."""
    await watched.start("pool", SLEEP)
    pid = watched.supervisor.pids()["pool"]
    assert os.getpgid(pid) != os.getpgid(0)


async def test_cancelled_stop_kills_and_reaps_all_children(
    watched: Watched, tmp_path: Path
) -> None:
    """A second Ctrl-C. A child that ends after the event loop makes asyncio print a line."""
    for name in ("one", "two"):
        await watched.start(name, STUBBORN)
        await until_logged(tmp_path / f"{name}.log", "up")
    pids = watched.supervisor.pids()
    stop = asyncio.create_task(watched.supervisor.stop())
    await asyncio.sleep(0)
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids.values()))
    ends = [(event.kind, event.cause) for event in watched.events if event.kind != "started"]
    assert ends == [("stopped", "SIGKILL")] * 2
