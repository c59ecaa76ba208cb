"""What stands around the arguments of calls, found out by having a format write some.

Owns the two ways in which formats write arguments: as one JSON object, or one by one, each behind
its name; and how a notation's text is spelt in a grammar. Knows nothing of schemas: see
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

from forge.core.formats import CallDelta, OutputFormat, collect
from forge.core.formats.base import ElementFormat
from services.gateway.model.chat_model import ChatModel

_PROBE = '{"forge": 0}'
"""Arguments that no notation would write in another way, if it writes JSON at all."""
_KEY, _VALUE = "forge_key", "forge_value"
_LITERALS: Any = {"a": ["b\n\\\"'", 1.5, True, None], "c": {}}
"""A value that shows whether JSON is read where an argument stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneByOne:
    """The text around arguments that are written each by itself."""

    before: str
    """Before the name of each."""
    between: str
    """Between a name and its value."""
    behind: str
    """Behind each value."""
    separator: str
    """Between two arguments."""
    tags: tuple[str, ...]
    """What no value that is a text may have in it, as nothing is escaped: the tag in `behind`, and
    others. All begin with a character that they have nowhere else. () where values are JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """The text around the arguments of calls."""

    first: tuple[str, ...]
    """Before those of the first call, by tool."""
    further: tuple[str, ...]
    """Between those of one call and the next, by the next one's tool; () where a notation has only
    one call, or numbers them."""
    end: str
    """Behind the last ones."""
    one_by_one: OneByOne | None = None
    """None: a call's arguments are one JSON object."""

    @property
    def opening(self) -> str:
        """What every first call begins with."""
        return os.path.commonprefix(self.first)  # noqa: RUF071


@functools.lru_cache(maxsize=256)
def notation_of(output: OutputFormat, names: tuple[str, ...]) -> Notation | None:
    """What stands around the arguments of calls of these tools; None where that cannot be told, or
    is not read back as it was written."""
    notation = _of_json(output, names)
    return notation if notation is not None else _of_texts(output, names)


@functools.lru_cache(maxsize=4096)
def reads_key(output: OutputFormat, tool: str, key: str) -> bool:
    """Whether an argument of that name is read back under it."""
    read = _read(output, write_one(output, tool, {key: 0}))
    return read is not None and [(name, *given) for name, given in read] == [(tool, key)]


def write_one(output: OutputFormat, tool: str, arguments: Any) -> str:
    """One call as the format writes it."""
    return output.write([CallDelta(name=tool, arguments=json.dumps(arguments))])


def spelt(model: ChatModel, text: str) -> str:
    """Text in a grammar: what the tokenizer has a token of its own for is that token."""
    return " ".join(
        f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)
        for piece in model.added_tokens_in(text)
    )


def lark_escaped(text: str) -> str:
    """For the inside of a regular expression between slashes."""
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
    """How arguments of this tool are written; None if the format does not write them so."""
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
    """What no text may have in it; None if that is not known, or cannot be kept out."""
    if not isinstance(output, ElementFormat) or output.argument_end not in behind:
        return None
    tags = tuple(dict.fromkeys((output.argument_end, *output.inner)))
    begins = {tag[:1] for tag in tags}
    return tags if len(begins) == 1 and not any(tag[0] in tag[1:] for tag in tags) else None


def _written(output: OutputFormat, names: Sequence[str]) -> str:
    return output.write([CallDelta(name=name, arguments=_PROBE) for name in names])


def _read(output: OutputFormat, text: str) -> list[tuple[str, Any]] | None:
    """The calls of an answer; None if it is malformed."""
    parser = output.parser()
    answer = collect([*parser.feed(text), *parser.finish()], parser.error)
    if answer.error:
        return None
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]
