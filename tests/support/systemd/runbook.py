"""Run-books: pages with commands of an operator, each block with its hosts in the title."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.systemd.bare_host import BareHost

_BLOCK = re.compile(
    r'^(?P<indent> *)```sh(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^(?P=indent)```$',
    re.M | re.S,
)
_HEADING = re.compile(r"^#+ (.*)$", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One block."""

    section: str
    hosts: tuple[str, ...]
    """In the order of the title; "every host" for all."""
    text: str


def steps(page: Path) -> list[Step]:
    """Return the blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    return list(_steps(text))


def _steps(text: str) -> Iterator[Step]:
    for block in _BLOCK.finditer(text):
        *_, section = _HEADING.findall(text, 0, block.start())
        yield Step(
            section=section,
            hosts=tuple((block["title"] or "").split(", ")),
            text=textwrap.dedent(block["text"]),
        )


class RunBook:
    """The blocks of one page, to be run in their order.

    `done` names those that ran, so that a test can find blocks that no test runs.
    """

    def __init__(self, page: Path, hosts: Mapping[str, BareHost]) -> None:
        self._page = page
        self._hosts = hosts
        self._steps = steps(page)
        self.done: list[Step] = []

    @property
    def missed(self) -> Sequence[str]:
        """The blocks that were not run."""
        return [step.text for step in self._steps if step not in self.done]

    def run(self, section: str, *numbers: int, check: bool = True) -> str:
        """Run the blocks of a section, or some of them by number; return the last output.

        A block is a login shell of root on each of its hosts, one host after the other. It ends at
        the first command that fails.
        """
        chosen = [step for step in self._steps if step.section == section]
        assert chosen, f"{self._page} has no section {section!r} with commands"
        shown = ""
        for step in [chosen[number] for number in numbers] if numbers else chosen:
            self.done.append(step)
            names = tuple(self._hosts) if step.hosts == ("every host",) else step.hosts
            for name in names:
                shown = self._hosts[name].run("bash", "-elc", step.text, check=check)
        return shown
