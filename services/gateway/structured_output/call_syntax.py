"""The call syntax of an output format: the text around the arguments of calls.

Found by writing sample calls with the format. Owns the two forms of arguments, one JSON object or
one by one after their names, and the spelling of text in a grammar. Owns no schemas: see
`services.gateway.structured_output.argument_rules`.
"""

from __future__ import annotations

import functools
import json
import os.path
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge.core.formats import SAMPLE_TOOLS, CallDelta, OutputFormat, collect, reads_channels
from forge.core.formats.base import ElementFormat
from services.gateway.model.chat_model import ChatModel

_PROBE = '{"forge": 0}'
"""Sample arguments with the same text in every call syntax that writes JSON."""
_KEY, _VALUE = "forge_key", "forge_value"
_LITERALS: Any = {"a": ["b\n\\\"'", 1.5, True, None], "c": {}}
"""A value that tests whether an argument is parsed as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneByOne:
    """The text around arguments that are written one by one."""

    before: str
    """Before a name."""
    between: str
    """Between a name and its value."""
    behind: str
    """After a value."""
    separator: str
    """Between two arguments."""
    tags: tuple[str, ...]
    """Tags that a text value must not contain, because text is not escaped: the tag in `behind` and
    others. All have the same first character and no other occurrence of it. () for JSON values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """The text around the arguments of calls."""

    first: tuple[str, ...]
    """Before the arguments of the first call, by tool."""
    further: tuple[str, ...]
    """Between the arguments of a call and of the next one, by the next tool; () for a call syntax
    with one call or with numbered calls."""
    end: str
    """After the arguments of the last call."""
    one_by_one: OneByOne | None = None
    """None if the arguments are one JSON object."""

    @property
    def opening(self) -> str:
        """The common beginning of every first call."""
        return os.path.commonprefix(self.first)  # noqa: RUF071


@functools.lru_cache(maxsize=256)
def notation_of(output: OutputFormat, names: tuple[str, ...]) -> Notation | None:
    """Returns the call syntax for these tools; None if it is unknown, or if a parser does not
    return the written arguments."""
    notation = _of_json(output, names)
    return notation if notation is not None else _of_texts(output, names)


@functools.lru_cache(maxsize=4096)
def reads_key(output: OutputFormat, tool: str, key: str) -> bool:
    """Returns True if the parser returns an argument with this name."""
    read = _read(output, write_one(output, tool, {key: 0}))
    return read is not None and [(name, *given) for name, given in read] == [(tool, key)]


def write_one(output: OutputFormat, tool: str, arguments: Any) -> str:
    """Returns one call as the format writes it."""
    return output.write([CallDelta(name=tool, arguments=json.dumps(arguments))])


def spelt(model: ChatModel, text: str) -> str:
    """Returns the spelling of text in a grammar, with added tokens as single tokens."""
    return " ".join(
        f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)
        for piece in model.added_tokens_in(text)
    )


def lark_escaped(text: str) -> str:
    """Escapes text for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def _of_json(output: OutputFormat, names: tuple[str, ...]) -> Notation | None:
    first, further, ends = [], [], set()
    for name in names:
        begin, *ending = _written(output, (name,)).split(_PROBE)
        if len(ending) != 1 or _read(output, f"{begin}{{}}{ending[0]}") != [(name, {})]:
            return None
        first.append(begin)
        ends.add(ending[0])
        between = _written(output, (name,) * 3).split(_PROBE)[1:-1]
        if len(between) == 2 and between[0] == between[1]:
            further.append(between[0])
    if len(ends) != 1:
        return None
    several = tuple(further) if len(further) == len(names) else ()
    return Notation(first=tuple(first), further=several, end=ends.pop())


def _of_texts(output: OutputFormat, names: tuple[str, ...]) -> Notation | None:
    first, further, ends, ways = [], [], set(), set()
    for name in names:
        opening, bare = output.opening(name), write_one(output, name, {})
        end = bare.removeprefix(opening)
        twice = output.write([CallDelta(name=name, arguments="{}")] * 2)
        way = _one_by_one(output, name, opening, end)
        if (
            way is None
            or not bare.startswith(opening)
            or not (twice.startswith(opening) and twice.endswith(end))
        ):
            return None
        first.append(opening)
        further.append(twice.removeprefix(opening).removesuffix(end))
        ends.add(end)
        ways.add(way)
    if len(ends) != 1 or len(ways) != 1:
        return None
    return Notation(
        first=tuple(first), further=tuple(further), end=ends.pop(), one_by_one=ways.pop()
    )


def _one_by_one(output: OutputFormat, name: str, opening: str, end: str) -> OneByOne | None:
    """Returns the form of one-by-one arguments; None if the format has another form."""
    written = write_one(output, name, {_KEY: _VALUE})
    quoted = json.dumps(_VALUE) in written
    value = json.dumps(_VALUE) if quoted else _VALUE
    around = written.removeprefix(opening).removesuffix(end)
    before, _, rest = around.partition(_KEY)
    between, _, behind = rest.partition(value)
    element = f"{before}{_KEY}{between}{value}{behind}"
    two = write_one(output, name, {_KEY: _VALUE, f"{_KEY}_2": _VALUE})
    separator = two.removeprefix(opening).removesuffix(end).removeprefix(element)
    separator = separator.removesuffix(element.replace(_KEY, f"{_KEY}_2"))
    tags = () if quoted else _tags(output, behind)
    if tags is None:
        return None
    made = OneByOne(
        before=before,
        between=between,
        behind=behind,
        separator=separator,
        tags=tags,
    )
    text = json.dumps(_LITERALS)
    both = [f"{before}{key}{between}{text}{behind}" for key in (_KEY, f"{_KEY}_2")]
    read = _read(output, f"{opening}{separator.join(both)}{end}")
    expected = {_KEY: _LITERALS, f"{_KEY}_2": _LITERALS}
    return made if read == [(name, expected)] else None


def _tags(output: OutputFormat, behind: str) -> tuple[str, ...] | None:
    """Returns the tags that no text may contain; None if unknown or not excludable."""
    if not isinstance(output, ElementFormat) or output.argument_end not in behind:
        return None
    tags = tuple(dict.fromkeys((output.argument_end, *output.inner)))
    begins = {tag[:1] for tag in tags}
    return tags if len(begins) == 1 and not any(tag[0] in tag[1:] for tag in tags) else None


def _written(output: OutputFormat, names: Sequence[str]) -> str:
    return output.write([CallDelta(name=name, arguments=_PROBE) for name in names])


def _read(output: OutputFormat, text: str) -> list[tuple[str, Any]] | None:
    """Parses the calls of an answer; returns None if it is malformed."""
    # A format with channels parses calls for tools alone; formats without types need none.
    parser = output.parser(SAMPLE_TOOLS if reads_channels(output) else ())
    answer = collect([*parser.feed(text), *parser.finish()], parser.error)
    if answer.error:
        return None
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]
