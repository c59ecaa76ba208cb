"""Links and paths in the docs lead to files that exist."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs.hooks import links
from docs.hooks.page import ROOT

_PATHS = re.compile(
    r"`((?:benchmarks|deploy|docs|examples|forge|protos|services|tests)/[\w./-]*\w/?)`"
)


def pages() -> Iterator[str]:
    """Every Markdown file of the repository, by its path."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    yield from (line for line in listed.stdout.splitlines() if (ROOT / line).exists())


def test_every_link_to_a_file_is_valid() -> None:
    """Relative links of all Markdown files name files of the repository."""
    for page in pages():
        list(links.targets((ROOT / page).read_text(encoding="utf-8"), source=page))


def test_every_path_in_the_docs_exists() -> None:
    """A path in code letters exists; the changelog and decisions may name deleted files."""
    history = ("CHANGELOG.md", "docs/decisions/")
    for page in pages():
        if not page.startswith(history):
            for path in _PATHS.findall((ROOT / page).read_text(encoding="utf-8")):
                assert (ROOT / path).exists(), f"{page} names {path}"


def test_broken_link_is_an_error() -> None:
    """The message names the page and its target."""
    with pytest.raises(links.BrokenLink, match=r"docs/pool.md links \.\./nowhere.md"):
        list(links.targets("See [it](../nowhere.md#there).", source="docs/pool.md"))


def test_links_point_to_the_place_of_their_file_in_the_site() -> None:
    """A fragment is kept, code is not changed, and a section of a page may stand for a file."""
    text = "[a](README.md#x) [b](../../docs/pool.md) [c](app.py)\n```\n[d](README.md)\n```\n"
    places = {
        "services/pool/README.md": "services/pool.md",
        "services/pool/app.py": "api/pool.md#app",
        "docs/pool.md": "pool.md",
    }
    redirected = links.redirect(
        text, source="services/pool/README.md", page="services/pool.md", pages=places
    )
    assert redirected == (
        "[a](pool.md#x) [b](../pool.md) [c](../api/pool.md#app)\n```\n[d](README.md)\n```\n"
    )


def test_links_with_a_scheme_and_within_a_page_are_unchanged() -> None:
    """Only relative paths are links to files."""
    text = "[a](https://example.org/a.md) [b](#here) [c](mailto:a@example.org)"
    assert list(links.targets(text, source=Path("docs/pool.md").as_posix())) == []
