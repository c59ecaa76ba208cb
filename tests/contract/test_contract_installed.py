"""The contract suite on the engine of another package: `make test-engine ENGINE=NAME`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.matrix

TESTS = Path(__file__).with_name("test_contract_engines.py")


def run_suite(folder: Path, package: str) -> subprocess.CompletedProcess[str]:
    """One test of the suite on an installed package with this source."""
    (folder / "far_engine.py").write_text(package)
    metadata = folder / "far_engine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: far-engine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[forge.engines]\nfar = far_engine\n")
    path = os.pathsep.join([str(folder), *sys.path])
    words = ["-p", "no:cacheprovider", "-k", "greedy_answer_equals", str(TESTS)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env=os.environ | {"PYTHONPATH": path, "FORGE_ENGINES": "far"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_suite_runs_on_an_installed_engine_alone(tmp_path: Path) -> None:
    """By the entry point, for each family of models."""
    ended = run_suite(tmp_path, "from examples.engine import start_aggregated\n")
    assert (ended.returncode, ended.stdout[:2]) == (0, ".."), ended.stdout


def test_suite_finds_the_fault_of_an_installed_engine(tmp_path: Path) -> None:
    """Here it takes the least likely token."""
    ended = run_suite(
        tmp_path,
        """
import examples.engine as example

draw = example._draw
example._draw = lambda logits_V, *asked: draw(-logits_V, *asked)
start_aggregated = example.start_aggregated
""",
    )
    assert (ended.returncode, ended.stdout[:2]) == (1, "FF"), ended.stdout
