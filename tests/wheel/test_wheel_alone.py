"""The wheel of dist/ without the repository: `make test-wheel` builds it and runs this."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds nothing but an environment with the wheel and its extra `all`."""
    (wheel,) = (ROOT / "dist").glob("*.whl")
    home = tmp_path_factory.mktemp("home")
    venv.create(home / "venv", with_pip=True)
    pip: list[str | Path] = [home / "venv/bin/python", "-m", "pip", "install", "--quiet"]
    run(*pip, "--constraint", ROOT / "constraints.txt", f"{wheel}[all]", cwd=home)
    return home


def run(*command: str | Path, cwd: Path) -> str:
    """Standard output of a command that succeeds; it inherits nothing of the repository."""
    inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=inherited | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def test_environment_has_the_wheel_and_not_the_repository(home: Path) -> None:
    """Imports come from its own site-packages."""
    shown = run(
        home / "venv/bin/python", "-c", "import services; print(services.__file__)", cwd=home
    )
    assert shown.startswith(str(home))


def test_doctor_finds_nothing_missing(home: Path) -> None:
    """The extra `all` brings everything a run on one machine needs."""
    assert "BAD" not in run(home / "venv/bin/forge", "doctor", cwd=home)


def test_two_steps_of_training_end_with_the_table_of_results(home: Path) -> None:
    """`forge run` makes the tiny model, trains it and measures it before and after."""
    words = ("run", "--steps", "2", "--eval-tasks", "2")
    shown = run(home / "venv/bin/forge", *words, cwd=home)
    assert "Held-out mean reward" in shown
    assert (home / ".forge").is_dir()
