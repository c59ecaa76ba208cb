"""Finds what a page of the site loads from another host.

It has to be nothing, so that the site works from a file system. Links to other hosts are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

_LOADED = {"stylesheet", "icon", "preconnect", "preload", "dns-prefetch", "modulepreload"}
"""Relations of a <link> that a browser follows by itself."""
_FROM_CSS = re.compile(r"""(?:@import\s+|url\()\s*["']?((?:https?:)?//[^"')\s]+)""")
_DRAWN_BY_SCRIPT = "mermaid"
"""Class of diagrams whose script the theme loads from another host."""


def external(site: Path) -> Iterator[str]:
    """Yield "file: address" for each script, style, font, image or frame of another host."""
    for file in sorted(site.rglob("*.html")):
        for address in in_page(file.read_text(encoding="utf-8")):
            yield f"{file.relative_to(site)}: {address}"
    for file in sorted(site.rglob("*.css")):
        for address in in_style(file.read_text(encoding="utf-8")):
            yield f"{file.relative_to(site)}: {address}"


def in_page(html: str) -> list[str]:
    """The addresses of other hosts from which a page loads something."""
    page = _Page()
    page.feed(html)
    return page.found


def in_style(css: str) -> list[str]:
    """The addresses of other hosts in a style sheet."""
    return _FROM_CSS.findall(css)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        loaded = [values.get("src", ""), *values.get("srcset", "").split(",")]
        if tag == "link" and _LOADED & {*values.get("rel", "").split()}:
            loaded.append(values.get("href", ""))
        if tag == "object":
            loaded.append(values.get("data", ""))
        self.found += [one for one in map(str.strip, loaded) if _is_external(one)]
        self.found += in_style(values.get("style", ""))
        if _DRAWN_BY_SCRIPT in values.get("class", "").split():
            self.found.append(f"the script of {_DRAWN_BY_SCRIPT}")

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.found += in_style(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False


def _is_external(address: str) -> bool:
    return address.startswith(("http:", "https:", "//"))
