"""The library's reference: one page for each package, made of its docstrings by mkdocstrings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docs.hooks.page import ROOT, Page

PACKAGES = ("client", "agents", "core", "rl", "grammar", "runtime")
"""Of `forge`: what other programs import, from the agent's side down to the tools."""


def pages() -> Iterator[Page]:
    """One page for each package, with a section for each of its modules."""
    for folder in _folders():
        package = _dotted(folder)
        lines = [f"# {package}", "", *_documented(package, members=False)]
        for file in _modules(folder):
            lines += [f"## {file.stem}", "", *_documented(_dotted(file), members=True)]
        yield Page(path=_path(folder), text="\n".join(lines))


def places() -> Iterator[tuple[str, str]]:
    """Each file of the library and its section in the site."""
    for folder in _folders():
        for file in _modules(folder):
            yield file.relative_to(ROOT).as_posix(), f"{_path(folder)}#{file.stem}"


def _documented(name: str, *, members: bool) -> list[str]:
    options = [] if members else ["    options:", "      members: false"]
    return [f"::: {name}", *options, ""]


def _folders() -> Iterator[Path]:
    for name in PACKAGES:
        yield from sorted(init.parent for init in (ROOT / "forge" / name).rglob("__init__.py"))


def _modules(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*.py") if not file.name.startswith("__"))


def _path(folder: Path) -> str:
    return f"reference/api/{_dotted(folder)}.md"


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)
