"""Links between files of the repository, led to pages of the site.

In the repository a page links a file by its relative path, so the link works where the file is
read. In the site some files are pages under another path. A link to no file is an error.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping

from docs.hooks.page import ROOT

_FENCED = re.compile(r"(^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^()\s#:]+)(?P<fragment>#[^()\s]*)?\)")
"""A relative target: addresses with a scheme have a colon, places in the same page no target."""


class BrokenLink(Exception):
    """A link names a file that the repository does not have."""


def targets(text: str, *, source: str) -> Iterator[str]:
    """Paths of the repository that a text links; `source` is the path of its own file."""
    for part in _outside_of_code(text):
        for link in _LINK.finditer(part):
            yield _resolve(link["target"], source)


def redirect(text: str, *, source: str, page: str, pages: Mapping[str, str]) -> str:
    """The text with each link relative to its page.

    `pages` has the place in the site, a path and perhaps a fragment, of each file that is linked.
    """

    def to_page(link: re.Match[str]) -> str:
        path, mark, fragment = pages[_resolve(link["target"], source)].partition("#")
        relative = posixpath.relpath(path, posixpath.dirname(page) or ".")
        return f"]({relative}{link['fragment'] or mark + fragment})"

    return _map_outside_of_code(text, lambda part: _LINK.sub(to_page, part))


def _resolve(target: str, source: str) -> str:
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if not (ROOT / path).is_file():
        raise BrokenLink(f"{source} links {target}, and there is no {path}")
    return path


def _outside_of_code(text: str) -> Iterator[str]:
    end = 0
    for block in _FENCED.finditer(text):
        yield text[end : block.start()]
        end = block.end()
    yield text[end:]


def _map_outside_of_code(text: str, change: Callable[[str], str]) -> str:
    code = [block[0] for block in _FENCED.finditer(text)]
    prose = map(change, _outside_of_code(text))
    return "".join(part for pair in zip(prose, [*code, ""], strict=True) for part in pair)
