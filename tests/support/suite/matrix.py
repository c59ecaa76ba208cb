"""Cases of a test for further models and engines, marked `matrix`: `make test-matrix` runs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def usual(names: Iterable[str], *default: str) -> list[Any]:
    """The names as parameters; `make test` runs those in `default`."""
    marks = pytest.mark.matrix
    return [name if name in default else pytest.param(name, marks=marks) for name in names]
