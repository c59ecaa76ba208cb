"""Ctrl-C while a command checks its settings, or makes starting weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.runtime.waiting import until_blocking

pytestmark = pytest.mark.faults

WAIT_S = 60.0


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (("run", "--steps", "2"), "--check"),
        (("run",), "services.trainer.starting_weights.tiny"),
        (("model", "init"), "services.trainer.starting_weights.tiny"),
    ],
)
def test_ctrl_c_before_the_first_service_is_one_line(
    tmp_path: Path, words: tuple[str, ...], program: str
) -> None:
    """Exit code 130, at once; no process and no half-made model is left. A check of the settings
    leaves nothing at all."""
    command = subprocess.Popen(
        [sys.executable, "-m", "forge.cli.main", *words, "--root", str(tmp_path / "root")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def running() -> list[psutil.Process]:
        found = []
        for child in psutil.Process(command.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found += [child] if program in child.cmdline() else []
        return found

    programs = until_blocking(running)
    # As a terminal does it: to the whole group.
    os.killpg(command.pid, signal.SIGINT)
    said, errors = command.communicate(timeout=WAIT_S)
    assert command.returncode == 130
    assert said.splitlines()[-1].startswith("Interrupted.")
    assert errors == ""
    assert psutil.wait_procs(programs, timeout=WAIT_S)[1] == []
    assert not list(tmp_path.glob("root/models/*/config.json"))
    if program == "--check":
        assert list(tmp_path.iterdir()) == []
