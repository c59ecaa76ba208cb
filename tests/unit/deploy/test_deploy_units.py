"""The systemd units are what systemd accepts, and start what exists."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forge.runtime.process.startup import CANNOT_START
from services.trainer.config import TrainerConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
SYSTEMD = DEPLOY / "systemd"
COMMON = SYSTEMD / "forge-.service.d" / "10-forge.conf"
UNITS = sorted(unit for unit in SYSTEMD.glob("forge*") if unit.is_file())
SERVICES = [unit for unit in UNITS if unit.suffix == ".service"]
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed here"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The units in a folder, with this environment's Python."""
    folder = tmp_path_factory.mktemp("units")
    shutil.copytree(SYSTEMD, folder, dirs_exist_ok=True)
    for unit in folder.glob("*.service"):
        text = unit.read_text().replace("/opt/forge/.venv/bin", str(Path(sys.executable).parent))
        # Verification looks for the program; etcd is a package of the host.
        unit.write_text(text.replace("/usr/bin/etcd", "/bin/true"))
    return folder


def analyze(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *words], cwd=cwd, capture_output=True, text=True, timeout=240
    )


@needs_systemd
def test_units_verify_without_a_word_on_stderr(installed: Path) -> None:
    """systemd-analyze verify says nothing: it warns of unknown keys and still returns 0."""
    names = [unit.name.replace("@.", "@1.") for unit in UNITS]
    verified = analyze("verify", *(f"./{name}" for name in names), cwd=installed)
    assert (verified.returncode, verified.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_unit_is_exposed_less_than_three(unit: Path, installed: Path) -> None:
    """The score of `systemd-analyze security`, from 0 to 10."""
    words = ("security", "--offline=true", "--no-pager", "--threshold=30", f"./{unit.name}")
    scored = analyze(*words, cwd=installed)
    assert scored.returncode == 0, scored.stdout.splitlines()[-1]


def test_every_unit_is_ready_only_when_it_says_so_and_drains_on_stop() -> None:
    """The common settings; each unit gives the time to drain before SIGKILL, and a watchdog."""
    common = COMMON.read_text().splitlines()
    assert {"Type=notify", "Restart=always", "NoNewPrivileges=yes"} <= {*common}
    assert f"RestartPreventExitStatus={CANNOT_START}" in common
    for unit in SERVICES:
        text = unit.read_text()
        assert re.search(r"^TimeoutStopSec=\d+", text, re.M), unit
        assert "WatchdogSec=" in text or unit.name == "forge-etcd.service", unit


def test_every_service_has_a_user_of_its_own() -> None:
    """No service reads another's data; replicas are pools. sysusers creates each user."""
    users = (DEPLOY / "sysusers.d" / "forge.conf").read_text()
    for unit in SERVICES:
        name = unit.name.removesuffix(".service").removesuffix("@").removesuffix("-replica")
        assert f"User={name}\n" in unit.read_text(), unit
        assert f"u {name} " in users, unit


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
