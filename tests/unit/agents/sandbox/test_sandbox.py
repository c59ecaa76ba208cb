"""Programs of a model run within limits, and their errors have one line."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from forge.agents.environments import code
from forge.agents.environments.base import Transcript
from forge.agents.sandbox import bubblewrap
from forge.agents.sandbox.program_sandbox import Sandbox, SandboxLimits
from forge.core.errors import FailedPrecondition
from tests.support.runtime.waiting import until

HELD_UP_S = 5.0
ENDLESS_WAITS = [
    "import time; time.sleep(1 << 20)",
    "import time\nwhile True: time.sleep(0.001)",
    "import threading; threading.Event().wait()",
]
RUN_IN_A_PROCESS = """
import asyncio, sys
from forge.agents.sandbox.program_sandbox import Sandbox
async def main():
    sandbox = Sandbox()
    print(await sandbox.problem(), flush=True)
    await sandbox.run(sys.argv[1])
asyncio.run(main())
"""


async def programs(parent: int) -> list[psutil.Process]:
    """The processes under `parent` that run a program, once there are any; the leader first."""

    def found() -> list[psutil.Process]:
        there = []
        for process in psutil.Process(parent).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any("RLIMIT_CPU" in word for word in process.cmdline()):
                    there.append(process)
        return there

    return await until(found)


@pytest.fixture
def sandbox() -> Sandbox:
    sandbox = Sandbox(SandboxLimits(wall_s=60.0))
    sandbox.unsafe = True
    return sandbox


async def test_host_without_bubblewrap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one line that names the package, unless the setting allows programs there."""
    monkeypatch.setattr(bubblewrap, "executable", lambda: "/bin/false")
    sandbox = Sandbox()
    with pytest.raises(FailedPrecondition, match=r"install bubblewrap.*unsafe_sandbox=true"):
        await sandbox.run("print(4)")
    sandbox.unsafe = True
    assert (await sandbox.run("print(4)")).output == "4\n"


async def test_output_of_a_program_is_its_result(sandbox: Sandbox) -> None:
    """What a program prints is its result."""
    outcome = await sandbox.run("v = [3, 4]; print(max(v) - min(v))")
    assert (outcome.output.strip(), outcome.error) == ("1", "")


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("print(1 / 0)", "ZeroDivisionError"),
        ("print(", "SyntaxError"),
        ("open('/tmp/forge-sandbox-escape', 'w')", "not allowed"),
        ("import os; os.system('true')", "not allowed"),
        ("import socket; socket.socket().connect(('127.0.0.1', 9))", "not allowed"),
        ("x = bytearray(1 << 40)", "MemoryError"),
        ("import os; os._exit(3)", ""),
    ],
)
async def test_forbidden_action_is_refused_by_name(
    sandbox: Sandbox, program: str, complaint: str
) -> None:
    """Any action that a calculation does not need ends the program with its name."""
    outcome = await sandbox.run(program)
    assert outcome.error
    assert complaint in outcome.error


async def test_endless_program_is_ended() -> None:
    """An endless loop uses up its CPU time, and no process stays behind."""
    before = set(psutil.Process().children(recursive=True))
    outcome = await Sandbox(SandboxLimits(cpu_s=1)).run("while True: pass")
    assert outcome.error == "TimeoutError: more than 1 s of CPU time"
    assert not set(psutil.Process().children(recursive=True)) - before


@pytest.mark.parametrize(
    "program",
    ["sum(iter(int, 1))", "while True:\n try:\n  while True: pass\n except BaseException: pass"],
)
async def test_program_that_survives_its_cpu_limit_is_killed(program: str) -> None:
    """It ignores or catches the signal; the kernel's second limit cannot be caught."""
    outcome = await Sandbox(SandboxLimits(cpu_s=1)).run(program)
    assert outcome.error


@pytest.mark.parametrize("program", ENDLESS_WAITS)
async def test_waiting_program_is_ended(program: str) -> None:
    """It uses no CPU time: sleeps are added up, and other waits end at the deadline."""
    outcome = await Sandbox(SandboxLimits(wall_s=1.0)).run(program)
    assert outcome.error.startswith("TimeoutError: ")


async def test_long_sleep_is_refused_at_once(sandbox: Sandbox) -> None:
    """Long before its deadline, with an error for the model."""
    outcome = await sandbox.run("import time; time.sleep(2); time.sleep(1)")
    assert outcome.error == "TimeoutError: more than 2 s of sleep"


def handles_the_signal(process: psutil.Process) -> bool:
    """Whether a program waits for SIGUSR1."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    handled = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(handled >> (signal.SIGUSR1 - 1) & 1)


async def test_program_delayed_by_its_host_gets_its_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A loaded host runs a correct program late, here by SIGSTOP for seconds: it has not failed."""
    sandbox = Sandbox(SandboxLimits(sleep_s=600))
    sandbox.unsafe = bool(await sandbox.problem())
    monkeypatch.setattr(code, "SANDBOX", sandbox)
    episode = code.CodeDomain().episode({"quantity": "sum", "numbers": [41, 17, 32]})
    # It computes after a signal only, so it is stopped before.
    program = (
        "import signal, time\n"
        "signals = []\n"
        "signal.signal(signal.SIGUSR1, lambda *signal: signals.append(signal))\n"
        "while not signals: time.sleep(0.01)\n"
        "print(41 + 17 + 32)"
    )
    running = asyncio.create_task(episode.call("run", {"code": program}))
    (leader, *_) = await programs(os.getpid())
    (waiting,) = await until(
        lambda: [*filter(handles_the_signal, [leader, *leader.children(recursive=True)])]
    )
    os.killpg(leader.pid, signal.SIGSTOP)
    waiting.send_signal(signal.SIGUSR1)
    # Real time: a limit by the wall clock that suits a quiet host has passed then.
    await asyncio.sleep(HELD_UP_S)
    os.killpg(leader.pid, signal.SIGCONT)
    answer = await running
    (reward,) = episode.score(Transcript(answer=answer, turns=2))
    assert reward.value == 1.0


async def test_program_ends_with_its_runner() -> None:
    """Also a waiting program of a runner that gets SIGKILL."""
    if problem := await Sandbox().problem():
        pytest.skip(problem)
    command = [sys.executable, "-c", RUN_IN_A_PROCESS, ENDLESS_WAITS[-1]]
    runner = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert runner.stdout
    await asyncio.to_thread(runner.stdout.readline)
    left = await programs(runner.pid)
    runner.kill()
    runner.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, left, timeout=60)
    assert not alive


async def test_output_beyond_the_limit_ends_the_program(sandbox: Sandbox) -> None:
    """Instead of filling memory."""
    outcome = await sandbox.run("while True: print('x' * 4096)")
    assert outcome.error


async def test_many_programs_run_in_parallel(sandbox: Sandbox) -> None:
    """Each gets its own output, for any number of waiting programs."""
    outcomes = await asyncio.gather(*(sandbox.run(f"print({n} * 2)") for n in range(24)))
    assert [outcome.output.strip() for outcome in outcomes] == [str(2 * n) for n in range(24)]


def test_remedy_names_the_setting_that_refuses_user_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For plain users: root needs no user namespace."""
    (tmp_path / "user").mkdir()
    (tmp_path / "kernel").mkdir()
    (tmp_path / "user/max_user_namespaces").write_text("9000\n")
    (tmp_path / "kernel/unprivileged_userns_clone").write_text("0\n")
    (tmp_path / "kernel/apparmor_restrict_unprivileged_userns").write_text("1\n")
    how = (
        "sysctl -w kernel.unprivileged_userns_clone=1 "
        "kernel.apparmor_restrict_unprivileged_userns=0"
    )
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert f"allow user namespaces (as root: {how}), or" in bubblewrap.remedy(tmp_path)
    assert "allow user namespaces, or" in bubblewrap.remedy(tmp_path / "none")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert "allow user namespaces, or" in bubblewrap.remedy(tmp_path)
