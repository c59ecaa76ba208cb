"""The layout of the tests is that of the product, their map is complete; no file is long."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SERVICES = ("console", "gateway", "inference", "pool", "scheduler", "trainer")
OTHERS = ("deploy", "docs")
"""Folders of `tests/unit` about files that are no packages."""


def folders(root: Path) -> list[Path]:
    found = (path for path in root.rglob("*.py") if path.parent != root)
    return sorted({path.parent.relative_to(root) for path in found})


@pytest.mark.parametrize("folder", folders(ROOT / "tests" / "unit"), ids=str)
def test_each_folder_of_unit_tests_is_a_package_of_the_product(folder: Path) -> None:
    """`tests/unit/pool/data` has the tests of `services/pool/data`."""
    top = folder.parts[0]
    if top in OTHERS:
        assert (ROOT / top).is_dir()
        return
    package = ROOT / ("services" if top in SERVICES else "forge") / folder
    assert (package / "__init__.py").exists()


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them as top-level modules: a run of both would refuse one of them."""
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_each_folder_of_test_helpers_is_in_their_map() -> None:
    """`tests/support/README.md` has one row for each."""
    text = (ROOT / "tests" / "support" / "README.md").read_text()
    names = {folder.parts[0] for folder in folders(ROOT / "tests" / "support")}
    rows = {line.split("`")[1].strip("/") for line in text.splitlines() if line.startswith("| `")}
    assert rows == names


@pytest.mark.parametrize("folder", ["benchmarks", "docs", "examples", "forge", "services", "tests"])
def test_no_file_is_longer_than_400_lines(folder: str) -> None:
    """Generated stubs have their own length."""
    generated = ROOT / "forge" / "v1"
    files = [path for path in (ROOT / folder).rglob("*.py") if generated not in path.parents]
    assert files
    lengths = {path: len(path.read_text().splitlines()) for path in files}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > 400} == {}
