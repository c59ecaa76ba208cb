"""What `make dist` builds, without the repository: `make test-wheel` builds it and runs this."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    "from importlib.metadata import files\n"
    "print(*sorted(str(f) for f in files('forge-rl') if f.parts[0] in ('forge', 'services')))"
)
"""Prints the installed modules and data files."""


def environment(folder: Path, *words: str) -> Path:
    """Returns the folder, which has nothing but an environment with what pip installs."""
    venv.create(folder / "venv", with_pip=True)
    run(folder / "venv/bin/python", "-m", "pip", "install", "--quiet", *words, cwd=folder)
    return folder


def built(pattern: str) -> str:
    """Returns the one file in dist/ of this pattern."""
    (found,) = (ROOT / "dist").glob(pattern)
    return str(found)


@pytest.fixture(scope="module", params=["constraints", "newest"])
def home(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """The wheel with its extra `all`, on the versions of `constraints.txt`, and on the newest ones
    that its ranges allow, as for a user of pip."""
    tested = ("--constraint", str(ROOT / "constraints.txt"))
    words = tested if request.param == "constraints" else ()
    folder = tmp_path_factory.mktemp("home")
    yield environment(folder, *words, f"{built('*.whl')}[all]")
    # On Linux the newest torch brings gigabytes for CUDA, and pytest keeps folders.
    shutil.rmtree(folder / "venv")


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


def test_source_distribution_installs_the_files_of_the_wheel(tmp_path: Path) -> None:
    """pip builds it by itself, and finds every module, static page and template in it."""
    source = environment(tmp_path / "source", "--no-deps", built("*.tar.gz"))
    wheel = environment(tmp_path / "wheel", "--no-deps", built("*.whl"))
    listed = [run(each / "venv/bin/python", "-c", FILES, cwd=each) for each in (source, wheel)]
    assert listed[0] == listed[1]
    parts = [*(ROOT / "forge").rglob("*"), *(ROOT / "services").rglob("*")]
    wanted = {str(part.relative_to(ROOT)) for part in parts if part.suffix in (".py", ".js")}
    assert wanted and not wanted - {*listed[0].split()}
