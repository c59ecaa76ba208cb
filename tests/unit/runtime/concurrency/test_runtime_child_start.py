"""Child processes: their pipes, their ends, and the start without a copy of this process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from subprocess import PIPE
from typing import Any

import pytest
import uvloop

from forge.runtime.concurrency import child_start
from tests.support.runtime.waiting import until

ECHO = "import sys; sys.stdout.write(sys.stdin.read()); sys.stderr.write('error')"
LARGE = b"x" * (1 << 20)


@pytest.fixture(params=["pidfd", "thread"])
def observed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to observe an end; kernels before Linux 5.3 have one."""

    def absent(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    if request.param == "thread":
        monkeypatch.setattr(os, "pidfd_open", absent)


@pytest.mark.usefixtures("observed")
async def test_program_reads_and_writes_more_than_a_pipe_holds() -> None:
    """Its input ends when the writer closes; the exit code is that of the program."""
    child = await child_start.start(sys.executable, "-c", ECHO, stdin=PIPE, stdout=PIPE,
                                      stderr=PIPE)  # fmt: skip
    assert child.stdin is not None and child.returncode is None

    async def feed() -> None:
        assert child.stdin is not None
        child.stdin.write(LARGE)
        await child.stdin.drain()
        child.stdin.close()

    (output, errors), _ = await asyncio.gather(child.communicate(), feed())
    assert (output, errors, await child.wait()) == (LARGE, b"error", 0)


@pytest.mark.usefixtures("observed")
async def test_end_by_a_signal_is_negative() -> None:
    """The exit code is known without a wait. A kill after the end changes nothing."""
    child = await child_start.start("sleep", "60", start_new_session=True)
    assert os.getpgid(child.pid) == child.pid
    child.kill()
    await until(lambda: child.returncode is not None)
    assert child.returncode == -signal.SIGKILL
    child.kill()


async def test_absent_program_is_an_error() -> None:
    """As of `subprocess`."""
    with pytest.raises(FileNotFoundError):
        await child_start.start("no-such-program")


async def test_descriptors_are_passed_on() -> None:
    """The others are closed."""
    reading, writing = os.pipe()
    try:
        words = (sys.executable, "-c", f"import os; os.write({writing}, b'passed')")
        child = await child_start.start(*words, pass_fds=(writing,))
        assert await child.wait() == 0
        assert os.read(reading, 10) == b"passed"
    finally:
        os.close(reading)
        os.close(writing)


def test_loop_of_services_does_not_copy_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop forks in the event loop, which takes longer the more memory this process has."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a fork by uvloop")

    class Loop(uvloop.Loop):  # type: ignore[misc]  # untyped
        subprocess_exec = refuse

    async def main() -> int:
        return await (await child_start.start("true")).wait()

    with asyncio.Runner(loop_factory=Loop) as runner:
        assert runner.run(main()) == 0
