"""Links and paths in the docs lead to files that exist."""

from __future__ import annotations

import posixpath
import re
import subprocess
from collections import Counter
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


def headings(text: str) -> set[str]:
    """The fragments of a page's headings, as the site and the hosts of repositories make them."""
    outside = re.sub(r"^(```+|~~~+).*?^\1[ \t]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    found: Counter[str] = Counter()
    fragments = set()
    for heading in re.findall(r"^#+ (.*)", outside, flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", shown).strip().lower())
        fragments |= {name} if not found[name] else {f"{name}-{found[name]}"}
        found[name] += 1
    return fragments


def test_every_link_to_a_heading_is_valid() -> None:
    """Within a page and to another one."""
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages()}
    fragments = {page: headings(text) for page, text in texts.items()}
    for page, text in texts.items():
        for target, fragment in re.findall(r"\]\(([^()\s#:]*)#([\w-]+)\)", text):
            linked = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
            linked = linked if target else page
            if linked in fragments:
                assert fragment in fragments[linked], f"{page} links {target}#{fragment}"


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
