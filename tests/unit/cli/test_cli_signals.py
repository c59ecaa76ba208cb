"""Signals that end a command without handlers of its own."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forge.cli.command_exit import INTERRUPTED
from forge.runtime.process.stop_signals import STOP_SIGNALS
from tests.support.runtime.waiting import until_blocking

LOADING = """
import os, signal, sys

class Interrupted:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
from forge.cli.__main__ import main
main()
"""

DRAWING = """
import os, sys
from forge.cli.__main__ import main
from forge.cli.local_run import plot

number = int(sys.argv.pop())
plot.draw = lambda *_: os.kill(os.getpid(), number)
main()
"""

WORKING = """
import asyncio, sys
from pathlib import Path
from forge.cli.command_exit import finish, say

async def main():
    done = Path(sys.argv[1])
    done.touch()
    try:
        while not Path(f"{done}.closed").exists():
            await asyncio.sleep(0.01)
        for _ in range(int(sys.argv[2])):
            say("Still here.")
            await asyncio.sleep(0.01)
        done.write_text("finished")
    finally:
        say("Stopping.")
        await asyncio.sleep(0.1)
        say("Stopped.")
        done.write_text(done.read_text() or "cleaned")

finish(main, "Interrupted.")
"""

SHELL = ("bash", "--noprofile", "--norc", "--login", "-i", "-O", "huponexit")
"""Its input may end before SIGHUP comes. It then sends that to its jobs only with this option."""


def ended(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60
    )


@pytest.mark.usefixtures("own_signals")
def test_ctrl_c_while_modules_load_prints_nothing() -> None:
    """The process ends by the signal, without a traceback."""
    command = ended(LOADING, "--help")
    assert command.returncode == -signal.SIGINT
    assert command.stdout == command.stderr == ""


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_in_a_blocking_command_is_one_line(number: signal.Signals) -> None:
    """The command unwinds, so it removes its temporary files."""
    command = ended(DRAWING, "plot", "run", str(int(number)))
    assert command.returncode == INTERRUPTED
    assert command.stdout == "Interrupted.\n"
    assert command.stderr == ""


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("shell", "outcome"),
    [
        ("{command}", "cleaned"),
        ("{command} &", "cleaned"),
        ("{command} | cat", "cleaned"),
        ("nohup {command} > /dev/null", "finished"),
        ("{command} & disown", "finished"),
    ],
)
def test_a_closed_terminal_stops_a_command_once(tmp_path: Path, shell: str, outcome: str) -> None:
    """The shell and the kernel both send SIGHUP, and no line can be written: the clean-up still
    runs to its end. A command that the shell leaves alone continues."""
    program, done = tmp_path / "program.py", tmp_path / "done"
    program.write_text(WORKING)
    lines = 100 if outcome == "finished" else 1_000_000
    line = shell.format(command=f"{sys.executable} {program} {done} {lines}")
    pid, terminal = pty.fork()
    if not pid:
        env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
        os.execvpe("bash", SHELL, env)
    os.write(terminal, f"{line}\n".encode())
    until_blocking(done.exists)
    os.close(terminal)
    (tmp_path / "done.closed").touch()
    assert until_blocking(done.read_text) == outcome
    os.waitpid(pid, 0)
