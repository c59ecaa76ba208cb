"""Grammars of answers: their limits, and the errors of a wrong one.

Owns the translation for llguidance and the texts of its errors, so that gateway and engine accept
the same schemas. Not here: matching tokens, which is the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from llguidance import LLMatcher, LLParserLimits

from forge.core.errors import InvalidArgument

Kind = Literal["json_schema", "regex", "lark"]

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_PROPERTIES = 500
"""Most properties of one object: n optional properties take on the order of n^2 rules."""
MAX_LOCATING_TRIES = 200
"""Most compilations to locate an error in a schema."""
LIMITS = LLParserLimits(
    # About 1.5 KiB each, for the life of the compiled grammar.
    max_lexer_states=10_000,
    # Per token: a few milliseconds; an answer that needs more ends with an error.
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    # Once: some tens of milliseconds.
    initial_lexer_fuel=1_000_000,
    max_grammar_size=200_000,
    # A grammar may have text of the agent's prompt; logs must not.
    verbose_errors=False,
)

_SPACE = r"[ \n\t\r]{0,64}"
"""White space between JSON's tokens; bounded, since a model may never end it."""
_ONE_BELOW = ("additionalProperties", "items", "not", "if", "then", "else", "contains")
_LIST_BELOW = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_MAP_BELOW = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")


def source(kind: Kind, text: str, *, lenient: bool = False) -> str:
    """Return the grammar for llguidance's matcher. Raises `InvalidArgument`, before compilation,
    for a too large grammar and for a text that is no JSON Schema."""
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
    """Return the schema with our compile options in place of its own."""
    return {**schema, "x-guidance": {"whitespace_pattern": _SPACE, "lenient": lenient}}


def check_schema(schema: Mapping[str, Any], *, field: str, lenient: bool = False) -> None:
    """Raises `InvalidArgument` with the place in `field` that cannot be enforced.

    Blocks for up to about a second: not for an event loop.
    """
    check_shape(schema, field=field)
    wrong = _wrong_with(schema, lenient=lenient)
    if wrong:
        place, wrong = _located(schema, wrong, lenient=lenient)
        raise InvalidArgument(f"{field}{place} cannot be enforced: {wrong}")


def check_shape(schema: Mapping[str, Any], *, field: str) -> None:
    """Raises `InvalidArgument` for an object with too many properties to check it in reasonable
    time."""
    for place, below in _walk(schema):
        properties = below.get("properties")
        if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
            raise InvalidArgument(
                f"{field}{place} has {len(properties)} properties; at most {MAX_PROPERTIES}"
            )


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raises `ValueError` for a panic of llguidance, which is no `Exception`: it would end the
    connection of a request with an odd schema. A matcher reports its panics itself."""
    try:
        yield
    except BaseException as error:
        # Its class is not importable.
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError("the grammar library failed on it") from None


def _loaded(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidArgument(f"the schema must be a JSON object; it is {text[:40]!r}")
    return schema


def _wrong_with(schema: Mapping[str, Any], *, lenient: bool) -> str:
    """Return llguidance's error, or ""."""
    try:
        with _panics_as_errors():
            compilable = _compilable(schema, lenient=lenient)
            failed, messages = LLMatcher.validate_grammar_with_warnings(
                compilable, None, limits=LIMITS
            )
    except (ValueError, RecursionError) as error:
        return one_line(str(error))
    return one_line(messages[0]) if failed else ""


def _compilable(schema: Mapping[str, Any], *, lenient: bool) -> str:
    return LLMatcher.grammar_from_json_schema(guided(schema, lenient=lenient))


def _located(schema: Mapping[str, Any], wrong: str, *, lenient: bool) -> tuple[str, str]:
    """Return the innermost part that cannot be enforced, and the reason; references stay whole."""
    try:
        root = _rebased(schema)
    except RecursionError:
        return "", wrong
    place, tries = "", 0
    descending = True
    while descending:
        descending = False
        # References last, so that the error names the referenced part.
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
    """Yield every schema in a schema, itself first, with its JSON pointer; not `deep`: only its
    direct parts."""
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
    """Return the schema for its new place below #/$defs/root, with adapted references."""
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
    """Return llguidance's message as one line."""
    plain = message.partition(" while processing json-schema:")[0].replace("<non-verbose/>", "")
    return " ".join(plain.split())[:300]
