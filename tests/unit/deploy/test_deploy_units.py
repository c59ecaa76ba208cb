"""The systemd units are what systemd accepts, and start what exists."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.trainer.config import TrainerConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("forge*"))
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here"
)
def test_units_verify_without_a_word_on_stderr(tmp_path: Path) -> None:
    """systemd-analyze verify says nothing: it warns of unknown keys and still returns 0."""
    bin_directory = str(Path(sys.executable).parent)
    for unit in UNITS:
        installed = unit.read_text().replace("/opt/forge/.venv/bin", bin_directory)
        (tmp_path / unit.name).write_text(installed)
    names = [unit.name.replace("@.", "@1.") for unit in UNITS]
    verified = subprocess.run(
        ["systemd-analyze", "verify", *(f"./{name}" for name in names)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (verified.returncode, verified.stderr) == (0, "")


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_unit_is_ready_only_when_it_says_so_and_drains_on_stop(unit: Path) -> None:
    """Each service reports readiness, restarts, and gets time to drain before SIGKILL."""
    text = unit.read_text()
    assert "Type=notify" in text
    assert "Restart=always" in text
    assert re.search(r"^TimeoutStopSec=\d+", text, re.M)
    assert "NoNewPrivileges=yes" in text and "ProtectSystem=strict" in text


def test_the_trainer_may_write_its_checkpoint_before_it_is_killed() -> None:
    """A model's size decides how long that takes: systemd waits longer than the trainer does."""
    text = (DEPLOY / "systemd" / "forge-trainer@.service").read_text()
    limit = re.search(r"^TimeoutStopSec=(\d+)min$", text, re.M)
    assert limit is not None
    assert 60 * int(limit[1]) > TrainerConfig().drain_s


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_unit_starts_a_module_that_exists(unit: Path) -> None:
    """A renamed module breaks this test before it breaks a host."""
    module = re.search(r"-m (\S+)", unit.read_text())
    assert unit.name == "forge-etcd.service" or (
        module is not None and importlib.util.find_spec(f"{module[1]}.__main__") is not None
    )
