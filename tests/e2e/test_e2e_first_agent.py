"""The first section of docs/agents.md, as a stranger follows it: a trained agent from nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.runtime.waiting import until_blocking
from tests.support.suite.doc_blocks import blocks

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        "FORGE_FIRST_AGENT" not in os.environ,
        reason="takes minutes on a busy host; run it by make test-first-agent",
    ),
]

AGENT, REWARD, TASKS, UP, RUNNER, SUBMIT, EXPORT = blocks("docs/agents.md")[:7]
LIMIT_S = 420.0


class Stranger:
    """A directory, and a shell with the environment's programs."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder = folder
        self._environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            # With starting weights: making them takes a minute.
            "FORGE_ROOT": str(root),
        }

    @contextmanager
    def running(self, command: str) -> Iterator[subprocess.Popen[bytes]]:
        """A terminal with the command; Ctrl-C at the end of the block."""
        log = self.folder / f"{command.split()[1]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self._environment,
                stdout=output,
                stderr=output,
                # As in a terminal; a shell in the background ignores SIGINT.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        try:
            yield process
            process.send_signal(signal.SIGINT)
            process.wait(timeout=LIMIT_S)
        finally:
            process.kill()
            process.wait()

    def run(self, command: str) -> str:
        """What a command prints."""
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


def test_a_stranger_trains_an_agent_of_his_own(tmp_path: Path, forge_root: Path) -> None:
    """Eight tasks in place of 200, two attempts each: agent, reward, tasks, submission, and the
    trained model."""
    stranger = Stranger(tmp_path, forge_root)
    for block in (AGENT, REWARD, TASKS):
        (name,) = re.findall(r"# (\w+\.py)$", block.text, re.M)
        (tmp_path / name).write_text(block.text.replace("range(200)", "range(8)"))
    submit = SUBMIT.text.replace("--group-size 8", "--group-size 2")
    assert submit != SUBMIT.text

    def trained(runner: subprocess.Popen[bytes]) -> bool:
        assert runner.poll() is None, (tmp_path / "agents.log").read_text()[-2000:]
        status = json.loads(stranger.run("forge status sums-run --json"))
        scheduler, trainer = status["scheduler"], status["trainer"]
        if scheduler is None or trainer is None:
            return False
        assert not scheduler["tombstoned"], scheduler
        return bool(scheduler["trained"] == 8 and trainer["step"] == 1)

    with stranger.running(UP.text.strip()):
        until_blocking(
            lambda: "All services run" in (tmp_path / "up.log").read_text(), limit_s=LIMIT_S
        )
        with stranger.running(RUNNER.text.strip()) as runner:
            assert "8 new" in stranger.run(submit)
            until_blocking(lambda: trained(runner), limit_s=LIMIT_S)
    stranger.run(EXPORT.text)
    assert (tmp_path / "sums-model" / "model.safetensors").exists()
