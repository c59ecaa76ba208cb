"""Coverage files of killed processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.suite import coverage_parts
from tests.support.suite.coverage_files import delete_damaged
from tests.support.suite.coverage_parts import Measurement, Part

PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
from coverage import Coverage
from tests.support.runtime.fork_server import save_whole
measured = Coverage(data_file=".coverage", data_suffix=True, include=["program.py"])
measured.start()
import program
save_whole(measured)
print(measured.get_data().data_filename(), flush=True)
os.kill(os.getpid(), 9)
"""
ROOT = Path(__file__).parents[2]


def coverage(folder: Path, *words: str) -> str:
    argv = [sys.executable, "-m", "coverage", *words]
    ended = subprocess.run(argv, cwd=folder, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.parametrize("damage", ["cut", "empty", "page", "none"])
def test_kill_during_a_save_loses_no_earlier_save(tmp_path: Path, damage: str) -> None:
    """The damaged file is deleted, the copy has the lines, and the other files are combined."""
    (tmp_path / "program.py").write_text("a = 1\nb = 2\n")
    argv = [sys.executable, "-c", PROGRAM, str(ROOT)]
    ended = subprocess.run(argv, cwd=tmp_path, text=True, stdout=subprocess.PIPE, check=False)
    saved = Path(ended.stdout.strip())
    data = bytearray(saved.read_bytes())
    match damage:
        case "cut":
            del data[len(data) // 2 :]
        case "empty":
            data.clear()
        case "page":  # of a table: `coverage combine` fails in the middle
            data[6 * 4096 : 7 * 4096] = b"\xff" * 4096
    saved.write_bytes(data)
    assert delete_damaged(tmp_path) == ([] if damage == "none" else [saved])
    coverage(tmp_path, "combine")
    assert "program.py       2      0   100%" in coverage(tmp_path, "report")


def test_measurement_continues_with_the_parts_that_have_not_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed part is measured again, a passed one only after a change of the code."""
    ran: list[str] = []
    failing = {"unit-core"}

    def measured(self: Measurement, part: Part) -> bool:
        ran.append(part.name)
        (tmp_path / f"{part.name}{'.failed' if part.name in failing else ''}.data").touch()
        return part.name not in failing

    monkeypatch.setattr(Measurement, "measure", measured)
    monkeypatch.setattr(Measurement, "report", lambda self: None)
    for code, failed in (("a", 1), ("a", 0), ("a", 0), ("b", 0)):
        monkeypatch.setattr(coverage_parts, "state_of_code", lambda code=code: code)
        assert coverage_parts.main(["unit-co"], folder=tmp_path) == failed
        failing.clear()
    assert ran == ["unit-console", "unit-core", "unit-core", "unit-console", "unit-core"]
    names = [path for part in coverage_parts.parts() for path in part.paths]
    assert {"tests/unit/core", "tests/e2e", "tests/integration/test_coverage_files.py"} <= {*names}


def test_installed_node_packages_are_no_change_of_the_tests(tmp_path: Path) -> None:
    """`make test-clients` installs Python files below `tests/clients/node`."""
    test = tmp_path / "clients" / "test_clients_agents.py"
    installed = tmp_path / "clients" / "node" / "node_modules" / "node-gyp" / "gyp_main.py"
    for file in (test, installed):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert coverage_parts.code_of_tests(tmp_path) == [test]
