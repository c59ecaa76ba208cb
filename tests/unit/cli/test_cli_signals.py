"""Signals that end a command without handlers of its own."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from forge.cli.command_exit import INTERRUPTED

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


def ended(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=60
    )


def test_ctrl_c_while_modules_load_prints_nothing() -> None:
    """The process ends by the signal, without a traceback."""
    command = ended(LOADING, "--help")
    assert command.returncode == -signal.SIGINT
    assert command.stdout == command.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_in_a_blocking_command_is_one_line(number: signal.Signals) -> None:
    """The command unwinds, so it removes its temporary files."""
    command = ended(DRAWING, "plot", "run", str(int(number)))
    assert command.returncode == INTERRUPTED
    assert command.stdout == "Interrupted.\n"
    assert command.stderr == ""
