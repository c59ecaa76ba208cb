"""`make test-gpu-engine` runs every contract of the embedded engine."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
OTHERS = {"access.py", "installed.py", "tensorrt_llm.py"}
"""Contracts of other subjects."""


def test_gpu_target_has_all_contracts_of_the_engine() -> None:
    """A new file of tests/contract is in the target, or among the others."""
    target = (ROOT / "Makefile").read_text().partition("\ntest-gpu-engine:")[2]
    files = re.search(r"tests/contract/test_contract_,([^)]*)\)", target)
    assert files is not None
    found = {one.name.removeprefix("test_contract_") for one in _contracts()}
    assert set(files[1].split()) == found - OTHERS


def _contracts() -> list[Path]:
    return list((ROOT / "tests/contract").glob("test_contract_*.py"))
