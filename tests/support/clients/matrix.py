"""The table of docs/clients.md, and what the tests of tests/clients say that it must be."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs/clients.md"
_HEADER = ["client", "version", "protocol", "whole", "streamed", "tools", "history"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way of using a client, as one test has it."""

    client: str
    protocol: str
    """chat, responses, messages or grpc."""
    stream: bool
    tools: bool = True


Table = dict[tuple[str, str], tuple[str, str, str]]
"""By client and protocol: whether whole, streamed and with tools, in the table's words."""


def table_of(rows: Iterable[Row]) -> Table:
    """The table that these tests make."""
    seen: dict[tuple[str, str], set[tuple[bool, bool]]] = {}
    for row in rows:
        seen.setdefault((row.client, row.protocol), set()).add((row.stream, row.tools))
    return {
        way: (
            _word(any(not stream for stream, _ in had)),
            _word(any(stream for stream, _ in had)),
            _word(any(tools for _, tools in had)),
        )
        for way, had in seen.items()
    }


def documented() -> Table:
    """The table as it is written."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in DOCS.read_text().splitlines()
        if line.startswith("|")
    ]
    first = lines.index(_HEADER)
    table: Table = {}
    for client, _, protocol, whole, streamed, tools, _ in lines[first + 2 :]:
        assert (client, protocol) not in table, f"{client} over {protocol} stands there twice"
        table[client, protocol] = (whole, streamed, tools)
    return table


def _word(said: bool) -> str:
    return "yes" if said else "no"
