"""What a service's process imports before it has read its settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from forge.cli.local_run.presets import PROCESSES
from tests.support.runtime.service_process import ForkedProcess

SLOW = {"torch", "transformers", "grpc", "etcd3aio", "lmdb", "aiohttp", "numpy"}
"""Packages that take long to import."""


@pytest.mark.parametrize("module", sorted({*PROCESSES.values()}))
def test_settings_are_read_before_slow_imports(module: str) -> None:
    """`--print-config` of a service imports none of its slow packages."""
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, "--print-config"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "lease_ttl_s" in ended.stdout
    assert "forge.runtime.settings" in imported and not imported & SLOW


def test_a_process_keeps_its_release_when_the_link_changes(tmp_path: Path) -> None:
    """Started through a link, it runs in the directory that the link named at its start."""
    venv.create(tmp_path / "0.1.0", with_pip=False)
    (tmp_path / "current").symlink_to("0.1.0")
    program = (
        "import sys; from forge.runtime.settings import ServiceConfig\n"
        "from forge.runtime.process.startup import run\n"
        "run('any', ServiceConfig, lambda: sys.exit(sys.prefix), lambda _: ())"
    )
    ended = subprocess.run(
        [str(tmp_path / "current/bin/python"), "-c", program],
        env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stderr.strip() == str(tmp_path / "0.1.0")


def test_a_forked_service_of_a_test_has_its_own_command_line() -> None:
    """Started through a link it executes this line again, not that of the fork server."""
    words = ["-n1", "-r1", "import sys; print(sys.orig_argv)"]
    forked = ForkedProcess("timeit", words, stdout=subprocess.PIPE)
    printed, _ = forked.communicate(timeout=120)
    assert str(["-m", "timeit", *words])[1:] in printed


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_while_a_service_is_imported_ends_it_at_once(number: signal.Signals) -> None:
    """Without a traceback: nothing has begun."""
    program = (
        "import os, sys\n"
        "from forge.runtime.settings import ServiceConfig\n"
        "from forge.runtime.process.startup import run\n"
        f"run('any', ServiceConfig, lambda: os.kill(os.getpid(), {int(number)}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-number, "", "")
