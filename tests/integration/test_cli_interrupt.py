"""Ctrl-C while a command makes starting weights, which is what a first run begins with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.runtime.waiting import until_blocking

WAIT_S = 60.0


@pytest.mark.parametrize("words", [("run",), ("model", "init")])
def test_ctrl_c_while_weights_are_made(tmp_path: Path, words: tuple[str, ...]) -> None:
    """One line and exit code 130, at once; no process and no half-made model is left."""
    command = subprocess.Popen(
        [sys.executable, "-m", "forge.cli.main", *words, "--root", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    makers = until_blocking(lambda: psutil.Process(command.pid).children(recursive=True))
    # As a terminal does it: to the whole group.
    os.killpg(command.pid, signal.SIGINT)
    said, errors = command.communicate(timeout=WAIT_S)
    assert command.returncode == 130
    assert said.splitlines()[-1].startswith("Interrupted.")
    assert errors == ""
    assert psutil.wait_procs(makers, timeout=WAIT_S)[1] == []
    assert not list(tmp_path.glob("models/*/config.json"))
