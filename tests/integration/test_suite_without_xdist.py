"""The suite in an environment without pytest-xdist, as that of vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tests_are_collected_without_xdist() -> None:
    """`make test-engines` runs one process; its environment lacks the plugin."""
    environ = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:xdist", "--collect-only"),
            "tests/engines/test_engines_environment.py",
        ],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "test_environment_is_complete" in found.stdout
