"""Arguments without a type: the schema of the tool decides, by one rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.core.formats import CallDelta, get_format
from forge.core.formats.parsers.calls import typed, untyped
from tests.support.core.format_samples import read, said

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=2),
)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ('"12"', {"type": "string"}, '"12"'),
        ("12", {"type": "integer"}, 12),
        ("12.0", {"type": "integer"}, 12.0),
        ("1.5", {"type": "integer"}, "1.5"),
        ("12", {"type": "number"}, 12),
        ("twelve", {"type": "integer"}, "twelve"),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("12", {"type": ["string", "null"]}, "12"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1]", {"type": "object"}, "[1]"),
        ("12", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 12),
        ("12", {"enum": ["12", "13"]}, "12"),
        ("12", {"$ref": "#/defs/x"}, 12),
        ("12", {}, 12),
        ("12", None, 12),
        ('"12"', None, '"12"'),
        (" a ", None, " a "),
        ("NaN", {"type": "number"}, "NaN"),
    ],
)
def test_schema_types_text_arguments(text: str, schema: object, value: object) -> None:
    """Strings stay strings; other values are parsed as JSON where the schema allows their type or
    gives none."""
    found = typed(text, schema)
    assert (found, type(found)) == (value, type(value))


@given(JSON_VALUES, st.text())
def test_argument_values_survive_as_texts(value: object, text: str) -> None:
    """Without a schema all but strings are restored; strings are restored where the schema asks for
    one."""
    assert typed(untyped(value), None) == value
    assert typed(untyped(text), {"type": "string"}) == text


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax_m2"])
def test_argument_types_come_from_the_tools_of_the_request(name: str) -> None:
    """The same text is a number for one tool and a string for another."""
    output = get_format(name)
    text = output.write([CallDelta(name="look", arguments='{"at": "12"}')])
    for kind, value in (("string", "12"), ("integer", 12)):
        properties = {"at": {"type": kind}}
        tools = [{"function": {"name": "look", "parameters": {"properties": properties}}}]
        answer, _ = read(output.parser(tools), [text])
        assert said(answer.calls) == [("look", {"at": value})]


@pytest.mark.parametrize(
    "tools",
    [[{}], [{"function": {"name": "look"}}], [{"function": {"name": "look", "parameters": 3}}]],
)
def test_unusable_schemas_type_no_arguments(tools: list[dict[str, object]]) -> None:
    """A tool without parameters, or with parameters that are no schema, leaves texts untyped."""
    output = get_format("glm")
    text = output.write([CallDelta(name="look", arguments='{"at": 12}')])
    assert said(read(output.parser(tools), [text])[0].calls) == [("look", {"at": 12})]
