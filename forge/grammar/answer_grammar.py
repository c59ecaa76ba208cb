"""Grammars that an answer can be held to: their bounds, and what is wrong with one.

Owns the translation into llguidance's terms and the wording of what it refuses, so that who takes
a schema from an agent and who enforces it judge alike. Matching tokens is the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from llguidance import LLMatcher, LLParserLimits

from forge.core.errors import InvalidArgument

Kind = Literal["json_schema", "regex", "lark"]
KINDS: tuple[Kind, ...] = ("json_schema", "regex", "lark")

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_PROPERTIES = 500
"""In one object: leaving out any of n properties takes of the order of n^2 rules."""
MAX_LOCATING_TRIES = 200
"""Compilations spent on finding out where in a schema the trouble is."""
LIMITS = LLParserLimits(
    # About 1.5 KiB each, kept for as long as the compiled grammar is.
    max_lexer_states=10_000,
    # Per token: a few milliseconds; an answer that needs more ends with an error.
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    # Once: some tens of milliseconds.
    initial_lexer_fuel=1_000_000,
    max_grammar_size=200_000,
    # The grammar may hold what the agent's prompt holds; logs must not.
    verbose_errors=False,
)

_SPACE = r"[ \n\t\r]{0,64}"
"""Between JSON's tokens. Bounded, for a model may like white space better than an end."""
_ONE_BELOW = ("additionalProperties", "items", "not", "if", "then", "else", "contains")
_LIST_BELOW = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_MAP_BELOW = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")


def source(kind: Kind, text: str, *, lenient: bool = False) -> str:
    """The grammar as llguidance's matcher takes it. Raises `InvalidArgument`, before anything is
    compiled, for what is too large or no JSON Schema at all."""
    if len(text) > MAX_GRAMMAR_BYTES or len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes")
    match kind:
        case "json_schema":
            schema = _loaded(text)
            check_shape(schema, field="the schema")
            try:
                return _compilable(schema, lenient=lenient)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(f"the schema: {one_line(str(error))}") from None
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "lark":
            return LLMatcher.grammar_from_lark(text)


def guided(schema: Mapping[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """The schema with the options it is compiled by; what it says of those itself is ignored."""
    return {**schema, "x-guidance": {"whitespace_pattern": _SPACE, "lenient": lenient}}


def check_schema(schema: Mapping[str, Any], *, field: str, lenient: bool = False) -> None:
    """Raises `InvalidArgument` naming the place in `field` that cannot be enforced.

    Blocks for up to a second or so: not for an event loop.
    """
    check_shape(schema, field=field)
    wrong = _wrong_with(schema, lenient=lenient)
    if wrong:
        place, wrong = _located(schema, wrong, lenient=lenient)
        raise InvalidArgument(f"{field}{place} cannot be enforced: {wrong}")


def check_shape(schema: Mapping[str, Any], *, field: str) -> None:
    """Raises `InvalidArgument` for an object with so many properties that it would take too long
    to find out whether it can be enforced."""
    for place, below in _walk(schema):
        properties = below.get("properties")
        if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
            raise InvalidArgument(
                f"{field}{place} has {len(properties)} properties; at most {MAX_PROPERTIES}"
            )


def _loaded(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidArgument(f"the schema must be a JSON object; it is {text[:40]!r}")
    return schema


def _wrong_with(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """ "" or what llguidance says."""
    try:
        compilable = _compilable(schema, lenient=lenient)
    except (ValueError, RecursionError) as error:
        return one_line(str(error))
    failed, messages = LLMatcher.validate_grammar_with_warnings(compilable, None, limits=LIMITS)
    return one_line(messages[0]) if failed else ""


def _compilable(schema: Mapping[str, Any], *, lenient: bool) -> str:
    return LLMatcher.grammar_from_json_schema(guided(schema, lenient=lenient))


def _located(schema: Mapping[str, Any], wrong: str, *, lenient: bool) -> tuple[str, str]:
    """The innermost part that cannot be enforced by itself, and why; references are kept whole."""
    try:
        root = _rebased(schema)
    except RecursionError:
        return "", wrong
    place, tries = "", 0
    descending = True
    while descending:
        descending = False
        # What only refers to another part comes last, so that the other one is named.
        below = sorted(_walk(_at(schema, place), deep=False), key=lambda found: "$ref" in found[1])
        for step, _ in below:
            tries += 1
            if tries > MAX_LOCATING_TRIES:
                return place, wrong
            part = {"$defs": {"root": root}, "$ref": f"#/$defs/root{place}{step}"}
            found = _wrong_with(part, lenient=lenient)
            if found:
                place, wrong, descending = place + step, found, True
                break
    return place, wrong


def _walk(
    schema: Mapping[str, Any], place: str = "", *, deep: bool = True
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every schema in a schema, itself first, with its JSON pointer; not `deep`: those directly
    below it alone."""
    pending = [(place, schema)]
    while pending:
        at, one = pending.pop()
        if deep or one is not schema:
            yield at, one
        if deep or one is schema:
            below = [(f"{at}/{key}", one.get(key)) for key in _ONE_BELOW]
            for key in _LIST_BELOW:
                values = one.get(key)
                if isinstance(values, list):
                    below += [(f"{at}/{key}/{index}", v) for index, v in enumerate(values)]
            for key in _MAP_BELOW:
                named = one.get(key)
                if isinstance(named, dict):
                    below += [(f"{at}/{key}/{_escaped(name)}", v) for name, v in named.items()]
            pending += [(path, value) for path, value in reversed(below) if isinstance(value, dict)]


def _at(schema: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    found: Any = schema
    for step in place.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found  # type: ignore[no-any-return]


def _rebased(value: Any) -> Any:
    """The schema for its new place below #/$defs/root: references within it still hit."""
    if isinstance(value, list):
        return [_rebased(one) for one in value]
    if not isinstance(value, dict):
        return value
    rebased = {key: _rebased(one) for key, one in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        rebased["$ref"] = "#/$defs/root" + reference[1:]
    return rebased


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def one_line(message: str) -> str:
    """What llguidance says, fit for an error message."""
    plain = message.partition(" while processing json-schema:")[0].replace("<non-verbose/>", "")
    return " ".join(plain.split())[:300]
