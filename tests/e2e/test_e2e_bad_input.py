"""What a person gets to read when a run cannot start: one line, naming what to change."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from forge.cli.local_run.stack import etcd_binary
from forge.core.errors import NotFound
from tests.support.suite.forge_run import FORGE, ForgeRun
from tests.support.suite.starting_weights import make_starting_weights

pytestmark = [pytest.mark.commands, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def untaught_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with starting weights that answer nothing: no run here samples with them."""
    root = tmp_path_factory.mktemp("untaught")
    make_starting_weights(root, flawless_steps=1, imperfect_steps=1)
    return root


def forge(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([FORGE, *arguments], capture_output=True, text=True, timeout=240)


def test_unknown_model_is_named(tmp_path: Path) -> None:
    """A model that is neither known nor a directory nor downloadable is an error with its name."""
    ended = forge("run", "--model", "no-such/model", "--root", str(tmp_path))
    assert ended.returncode == 2
    assert "no-such/model" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_invalid_override_is_named(tmp_path: Path) -> None:
    """`--set` without service and key is refused before anything starts."""
    ended = forge("run", "--root", str(tmp_path), "--set", "learning_rate=1")
    assert ended.returncode == 2
    assert "'learning_rate=1'" in ended.stderr and "service.key=value" in ended.stderr


def test_unreachable_etcd_is_named(tmp_path: Path, untaught_root: Path) -> None:
    """An etcd that does not answer is one line with its address."""
    ended = forge(
        *("run", "--root", str(untaught_root), "--run-dir", str(tmp_path / "run")),
        *("--etcd", "127.0.0.1:9"),
    )
    assert ended.returncode == 1
    assert "127.0.0.1:9" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_status_of_no_run_is_refused(tmp_path: Path) -> None:
    """A directory without a run says so."""
    ended = forge("status", str(tmp_path))
    assert ended.returncode == 2
    assert "not a run directory" in ended.stderr


def test_wrong_setting_of_a_service_ends_the_run(tmp_path: Path, untaught_root: Path) -> None:
    """At once, with the service's message."""
    run = ForgeRun(
        tmp_path / "run", root=untaught_root, steps=1, extra=("--set", "scheduler.concurency=4")
    )
    run.start()
    assert run.finish() != 0
    output = run.output()
    assert "scheduler cannot start" in output
    assert "concurency" in output and "concurrency" in output
    assert "Traceback" not in output


def test_occupied_port_is_named(tmp_path: Path, untaught_root: Path) -> None:
    """The line that ends the run has the port."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        run = ForgeRun(
            tmp_path / "run", root=untaught_root, steps=1, extra=("--set", f"pool.port={port}")
        )
        run.start()
        assert run.finish() != 0
    assert "pool cannot start" in run.output()
    assert str(port) in run.output()


def test_missing_etcd_binary_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package and without one on PATH, both ways out are named."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NotFound, match=r"'forge-rl\[etcd\]'.*--etcd"):
        etcd_binary()


def test_doctor_finds_this_machine_fit(tmp_path: Path) -> None:
    """Every check of `forge doctor` passes where the suite itself can run."""
    ended = forge("doctor", "--root", str(tmp_path))
    assert ended.returncode == 0, ended.stdout
    assert "BAD" not in ended.stdout
