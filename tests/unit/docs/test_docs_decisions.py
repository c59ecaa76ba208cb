"""Decision records: numbered, dated, listed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from docs.hooks.page import ROOT

FOLDER = ROOT / "docs" / "decisions"
_RECORD = re.compile(
    r"# (?P<number>\d+)\. (?P<title>.+)\n\n"
    r"Status: (accepted|replaced by \d+)\. Date: (?P<date>20\d\d-\d\d-\d\d)\.\n\n"
)


def records() -> list[Path]:
    return sorted(FOLDER.glob("[0-9]*.md"))


def test_decisions_are_numbered_in_order_and_have_status_and_date() -> None:
    """The number of the file is the number of the title, and none is missing."""
    for number, path in enumerate(records(), start=1):
        record = _RECORD.match(path.read_text(encoding="utf-8"))
        assert record is not None, f"{path.name}: no title, status and date"
        assert (path.name[:4], record["number"]) == (f"{number:04}", str(number))


def test_decision_index_lists_every_decision() -> None:
    """One row each, in order."""
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    rows = [line for line in index.splitlines() if line.startswith("| ") and "](" in line]
    expected = []
    for path in records():
        record = _RECORD.match(path.read_text(encoding="utf-8"))
        assert record is not None
        shown = f"[{record['title']}]({path.name})"
        expected.append(f"| {record['number']} | {shown} | {record['date']} |")
    assert rows == expected


def test_site_lists_every_decision() -> None:
    """In its navigation, in order."""
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ +- decisions/(\d.*)$", config, re.MULTILINE)
    assert listed == [path.name for path in records()]


def test_build_of_the_site_counts_warnings() -> None:
    """--quiet raises the level of the logger on which --strict counts them: it would never fail."""
    (build,) = re.findall(r"-m mkdocs build.*", (ROOT / "Makefile").read_text(encoding="utf-8"))
    words = shlex.split(build, comments=True)
    assert "--strict" in words
    assert not {"--quiet", "-q"} & {*words}
