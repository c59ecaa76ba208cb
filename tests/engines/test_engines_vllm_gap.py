"""The parts that explain the distance of vLLM's log-probs from the trainer's in bfloat16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import engines

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")


def test_no_difference_remains_with_all_parts_replaced(tmp_path: Path) -> None:
    """With one part fewer there is one, as large as that of vLLM itself."""
    found = tmp_path / "gap.json"
    command = [sys.executable, "-m", "benchmarks.engine_gap", "--quick", "--json", str(found)]
    subprocess.run(command, check=True, timeout=1500)
    numbers = json.loads(found.read_text())
    assert numbers["and attention added up in float64.trainer"] < 1e-5
    assert numbers["and the rotary embedding in float32.trainer"] > 1e-3
    assert numbers["vLLM in bfloat16.trainer"] > 1e-3
    assert numbers["trainer in float32.truth"] < 1e-4
