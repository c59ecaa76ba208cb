"""Grammar rules for arguments that are written one by one, in a call syntax that is not JSON.

Owns the values that a tool's schema allows for each argument. JSON values follow the argument's
schema. An unescaped text is a string, or a value of another type that it spells and the schema
allows (`forge.core.formats.parsers.calls` has the rule). So a schema is split into texts, listed
values, and JSON of the other types.

Arguments come in the schema's order, each at most once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from forge.core.errors import InvalidArgument
from forge.core.formats import OutputFormat
from forge.core.formats.parsers.calls import read_as, typed, untyped
from forge.grammar.answer_grammar import guided
from services.gateway.model.chat_model import ChatModel
from services.gateway.structured_output.call_syntax import OneByOne, lark_escaped, reads_key, spelt
from services.gateway.structured_output.whole_text import whole_text

_NOTES = frozenset(
    {"$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description"}
    | {"examples", "readOnly", "title", "writeOnly"}
)
"""Keywords that do not constrain values."""
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
_OF_TEXTS = frozenset({"type", "minLength", "maxLength", "pattern"})
_DEFINITIONS = ("#/$defs/", "#/definitions/")
_MAX_REFERENCES = 16
_MAX_CHOICES = 1000
_MAX_CHARACTERS = 500
"""Largest supported length bound; a larger one takes too long to compile."""
_SPACES = r"\s\x1c-\x1f"
_SPACE = f"[{_SPACES}]*"
"""White space before a JSON value."""
_BEGINNINGS = {"integer": r"\-0-9", "number": r"\-0-9", "array": r"\[", "object": r"\{"}
_NUMBER = r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?"
"""Excludes numbers that are too large for a float."""
_WORDS = {"null": "null|None", "boolean": "true|false|True|False"}


class Inexpressible(Exception):
    """A part of a schema that cannot be enforced in this call syntax, with a JSON pointer."""

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(why)
        self.place = place


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """Strings with bounded length that match a pattern."""

    shortest: int = 0
    longest: int | None = None
    pattern: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """One listed value."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Json:
    """Values of a type other than string."""

    schema: Mapping[str, Any]

    @property
    def free(self) -> bool:
        """True if every value of the type is allowed."""
        return self.schema.keys() <= _NOTES | {"type"}


_Choice = _Text | _Listed | _Json


def check_strict(tool: str, schema: Mapping[str, Any], output: OutputFormat, way: OneByOne) -> None:
    """Raises `InvalidArgument` with the part of a strict schema that cannot be enforced."""
    try:
        for name, value in _properties(schema, strict=True).items():
            _check_key(output, tool, name)
            _alternatives(value, schema, way, f"/properties/{name}")
    except Inexpressible as wrong:
        raise InvalidArgument(
            f"the parameters of {tool}{wrong.place} cannot be enforced in the model's call "
            f"syntax ({output.name}): {wrong}"
        ) from None


class Arguments:
    """The rules of one tool's arguments; `name` is the first rule and the prefix of the others.

    `values` has the value rules of earlier tools by their content, because most are equal.
    """

    def __init__(
        self,
        model: ChatModel,
        way: OneByOne,
        tool: str,
        schema: Mapping[str, Any],
        *,
        name: str,
        values: dict[str, str],
    ) -> None:
        self._model = model
        self._way = way
        self._tool = tool
        self._schema = schema
        self._name = name
        self._values_by_content = values
        self._rules: list[str] = []

    def rules(self, *, strict: bool) -> list[str] | None:
        """Returns None if a tool that is not strict does not name its arguments.

        Raises `InvalidArgument` for a strict schema that cannot be enforced.
        """
        if strict:
            check_strict(self._tool, self._schema, self._model.format, self._way)
        try:
            properties = _properties(self._schema, strict=strict)
            for key in properties:
                _check_key(self._model.format, self._tool, key)
        except Inexpressible:
            return None
        required = set(self._schema.get("required") or ()) if strict else set[str]()
        self._rules = []
        self._sequence(list(properties), required)
        for at, (key, schema) in enumerate(properties.items()):
            self._argument(at, key, schema if strict else True)
        return self._rules

    def _sequence(self, keys: Sequence[str], required: set[str]) -> None:
        """Adds the rules of the argument sequence; optional arguments may be missing."""
        name, separator = self._name, spelt(self._model, self._way.separator)
        # A head has no earlier argument, a tail has one; only a tail begins with a separator.
        self._rules.append(f"{name}: {name}_head_0")
        for at, key in enumerate(keys):
            given = f"{name}_{at} {name}_tail_{at + 1}"
            skipped = [] if key in required else [f"{name}_head_{at + 1}"]
            self._rules.append(f"{name}_head_{at}: {' | '.join([given, *skipped])}")
            given = f"{separator} {given}"
            skipped = [] if key in required else [f"{name}_tail_{at + 1}"]
            self._rules.append(f"{name}_tail_{at}: {' | '.join([given, *skipped])}")
        self._rules += [f'{name}_{kind}_{len(keys)}: ""' for kind in ("head", "tail")]

    def _argument(self, at: int, key: str, schema: Any) -> None:
        rule, way = f"{self._name}_{at}", self._way
        begin = spelt(self._model, f"{way.before}{key}{way.between}")
        self._rules.append(f"{rule}: {begin} ({' | '.join(self._values(schema))})")

    def _values(self, schema: Any) -> Iterator[str]:
        """Yields the alternatives of a value, each with the text after it."""
        choices = _alternatives(schema, self._schema, self._way)
        for choice in choices:
            match choice:
                case _Text():
                    yield from self._text(choice, schema, choices)
                case _Listed(value=value):
                    yield spelt(self._model, untyped(value) + self._way.behind)
                case _Json(schema={"type": "number"}) if choice.free:
                    value = self._shared("value", f"/{_NUMBER}/")
                    yield f"{value} {spelt(self._model, self._way.behind)}"
                case _Json():
                    document = self._document(choice.schema)
                    value = self._shared("value", f"%json {_json(document)}")
                    yield f"{value} {spelt(self._model, self._way.behind)}"

    def _text(self, text: _Text, schema: Any, choices: Sequence[_Choice]) -> Iterator[str]:
        behind = self._way.behind
        # One terminal up to the first tag that is a single token: the text after a value marks
        # its end.
        pieces = self._model.added_tokens_in(behind)
        split = any(isinstance(piece, int) for piece in pieces)
        frame = next((p for p in pieces[:1] if isinstance(p, str)), "") if split else behind
        close = lark_escaped(frame)
        parts = [f"/{_without(self._way.tags)}{close}/"]
        if text.shortest or text.longest is not None:
            most = "" if text.longest is None else text.longest
            parts.append(f"/(?s:.{{{text.shortest},{most}}}){close}/")
        if text.pattern:
            parts.append(f"/{_searched(text.pattern)}{close}/")
        parts += _other_readings(schema, choices, close)
        may_be_empty = split and not frame
        if may_be_empty:
            parts.append("/(?s:.+)/")
        terminal = self._shared("VALUE", " & ".join(parts))
        rest = spelt(self._model, behind[len(frame) :])
        if may_be_empty and not text.shortest and not text.pattern:
            yield rest
        yield f"{terminal} {rest}"

    def _shared(self, kind: str, matched: str) -> str:
        """Returns the shared rule, or the terminal (in capitals), with this content."""
        if matched not in self._values_by_content:
            self._values_by_content[matched] = f"{kind}_{len(self._values_by_content)}"
            self._rules.append(f"{self._values_by_content[matched]}: {matched}")
        return self._values_by_content[matched]

    def _document(self, schema: Any) -> dict[str, Any]:
        """Returns an argument's schema with its definitions."""
        if isinstance(schema, bool):
            schema = {}
        named = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
        return guided({**named, **schema})


def _properties(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    """Returns the schemas of a tool's arguments by name."""
    declared = schema.get("properties") or {}
    if not isinstance(declared, dict):
        raise Inexpressible("properties must be an object")
    if strict:
        for keyword in schema.keys() - _OF_OBJECTS - _NOTES:
            raise Inexpressible(f"{keyword} is not supported there")
        for key in schema.get("required") or ():
            if declared.get(key, False) is False:
                raise Inexpressible(f"{key!r} is required and not among the properties")
    elif not declared and schema.get("additionalProperties"):
        raise Inexpressible("arguments of any name")
    return {key: value for key, value in declared.items() if value is not False}


def _check_key(output: OutputFormat, tool: str, key: str) -> None:
    # A protocol declares no __hash__, but formats are plain objects.
    if not reads_key(output, tool, key):  # type: ignore[arg-type]
        raise Inexpressible("an argument of that name cannot be written", f"/properties/{key}")


def _alternatives(
    schema: Any, root: Mapping[str, Any], way: OneByOne, place: str = ""
) -> list[_Choice]:
    """Returns the alternatives of an argument. Raises `Inexpressible`."""
    try:
        if not way.tags:
            _check_references(schema)
            return [_Json(schema=schema if isinstance(schema, Mapping) else {})]
        choices = list(islice(_expanded(schema, root, _MAX_REFERENCES), _MAX_CHOICES + 1))
        if len(choices) > _MAX_CHOICES:
            raise Inexpressible(f"it leaves more than {_MAX_CHOICES} choices")
        for choice in choices:
            if isinstance(choice, _Listed):
                _check_listed(choice.value, schema, way)
            elif isinstance(choice, _Json):
                _check_references(choice.schema)
    except Inexpressible as wrong:
        raise Inexpressible(str(wrong), place) from None
    return choices


def _expanded(schema: Any, root: Mapping[str, Any], left: int) -> Iterator[_Choice]:
    if isinstance(schema, bool) or not schema.keys() - _NOTES:
        yield _Text()
        return
    keywords = schema.keys() - _NOTES
    if "$ref" in keywords:
        if keywords != {"$ref"} or left <= 0:
            raise Inexpressible("a reference with something beside it, or to itself")
        yield from _expanded(_referred(schema["$ref"], root), root, left - 1)
    elif "const" in keywords or "enum" in keywords:
        if keywords - {"const", "enum", "type"}:
            raise Inexpressible("enum and const are not supported with other keywords")
        for value in [schema["const"]] if "const" in keywords else schema["enum"]:
            yield _Listed(value=value)
    elif combined := keywords & {"anyOf", "oneOf", "allOf"}:
        (keyword, *more) = combined
        below = schema[keyword]
        if more or keywords - {keyword} or (keyword == "allOf" and len(below) != 1):
            raise Inexpressible(f"{keyword} is not supported with other keywords")
        for alternative in below:
            yield from _expanded(alternative, root, left - 1)
    elif "type" not in keywords:
        raise Inexpressible("it has no type")
    else:
        types = schema["type"]
        for kind in types if isinstance(types, list) else [types]:
            yield (_text_of(schema) if kind == "string" else _Json(schema={**schema, "type": kind}))


def _text_of(schema: Mapping[str, Any]) -> _Text:
    for keyword in schema.keys() - _OF_TEXTS - _NOTES:
        raise Inexpressible(f"{keyword} is not supported in a schema that allows a string")
    for keyword in ("minLength", "maxLength"):
        if (schema.get(keyword) or 0) > _MAX_CHARACTERS:
            raise Inexpressible(f"{keyword} may be at most {_MAX_CHARACTERS}")
    pattern = schema.get("pattern") or ""
    _searched(pattern)
    return _Text(
        shortest=int(schema.get("minLength") or 0), longest=schema.get("maxLength"), pattern=pattern
    )


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith(_DEFINITIONS):
        raise Inexpressible(f"only references to $defs are supported, not {str(reference)[:60]}")
    target: Any = root
    for step in reference.split("/")[1:]:
        target = target.get(step.replace("~1", "/").replace("~0", "~"))
        if not isinstance(target, dict):
            raise Inexpressible(f"there is no {reference[:60]}")
    return target


def _check_references(value: Any) -> None:
    """Raises `Inexpressible` for references outside the definitions."""
    if isinstance(value, Mapping):
        reference = value.get("$ref")
        if isinstance(reference, str) and not reference.startswith(_DEFINITIONS):
            raise Inexpressible(f"only references to $defs are supported, not {reference[:60]}")
        for below in value.values():
            _check_references(below)
    elif isinstance(value, list):
        for below in value:
            _check_references(below)


def _check_listed(value: Any, schema: Any, way: OneByOne) -> None:
    text = untyped(value)
    if any(tag in text for tag in way.tags):
        raise Inexpressible(f"{text[:60]!r} contains a tag of the call syntax")
    read = typed(text, schema)
    if json.dumps(read) != json.dumps(value):
        raise Inexpressible(f"{json.dumps(value)[:60]} would be read as {json.dumps(read)[:60]}")


def _other_readings(schema: Any, choices: Sequence[_Choice], close: str) -> Iterator[str]:
    """Yields constraints against texts that spell disallowed values of another type."""
    free = {
        choice.schema["type"] for choice in choices if isinstance(choice, _Json) and choice.free
    }
    if isinstance(schema, bool) or not schema.keys() - _NOTES:
        return
    bound = read_as(schema) - free
    # Integers are numbers.
    bound -= {"integer"} if "number" in free else set()
    begins = "".join(sorted({_BEGINNINGS[kind] for kind in bound if kind in _BEGINNINGS}))
    if begins:
        yield f"/{_SPACE}([^{_SPACES}{begins}](?s:.*))?{close}/"
    words = "|".join(sorted({_WORDS[kind] for kind in bound if kind in _WORDS}))
    if words:
        yield f"~/{_SPACE}({words}){_SPACE}{close}/"


def _without(tags: Sequence[str]) -> str:
    """Returns a regular expression for texts that contain none of the tags.

    All tags have the same first character and no other occurrence of it. So such a text consists of
    pieces that begin with this character and then differ from every tag. A complement would be much
    slower in llguidance.
    """
    begin = lark_escaped(tags[0][0])
    return f"[^{begin}]*({begin}{_differing(begin, [tag[1:] for tag in tags])})*"


def _differing(begin: str, rests: Sequence[str]) -> str:
    """Returns a regular expression for text after `begin` that begins with none of `rests`."""
    following: dict[str, list[str]] = {}
    for rest in rests:
        following.setdefault(rest[0], []).append(rest[1:])
    others = "".join(map(lark_escaped, sorted(following)))
    ways = [f"[^{begin}{others}][^{begin}]*"]
    for character, behind in sorted(following.items()):
        # At the end of a tag no differing text is left.
        if "" not in behind:
            ways.append(lark_escaped(character) + _differing(begin, behind))
    return f"({'|'.join(ways)})?"


def _searched(pattern: str) -> str:
    """Returns `whole_text(pattern)`; raises `Inexpressible` for its errors."""
    try:
        return whole_text(pattern)
    except ValueError as error:
        raise Inexpressible(str(error)[:200]) from None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
