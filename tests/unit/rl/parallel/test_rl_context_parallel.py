"""A tree computed by several ranks has the loss and the gradients of one sample at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import settings

pytestmark = [pytest.mark.timeout(900), pytest.mark.hypothesis]

FUZZ = settings.get_current_profile_name() == "fuzz"
"""`make properties` computes every shape for every family."""

LIMITS = {"fp64": 1e-12, "fp32": 1e-5}


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    """All cases, from one start of four ranks over gloo."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.rl.ranks", *(["--all"] if FUZZ else [])],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    errors: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return errors


@pytest.mark.parametrize(("ranks", "precision"), [(4, "fp64"), (2, "fp64"), (4, "fp32")])
def test_ranks_that_share_a_tree_are_exact(
    ranks: int, precision: str, found: dict[str, float]
) -> None:
    """For any tree, named or random, also with more ranks than tokens, sliding windows, experts
    balanced over all ranks, recomputed activations and draft heads. If one rank runs out of memory,
    forward or backward, none waits, and all train the batch in smaller trees."""
    cases = {
        case: error
        for case, error in found.items()
        if case.startswith(f"{ranks} ") and precision in case
    }
    assert cases
    limit = LIMITS[precision]
    assert not {case: error for case, error in cases.items() if not error <= limit}
