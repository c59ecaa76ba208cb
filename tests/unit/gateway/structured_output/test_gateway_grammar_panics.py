"""Schemas on which the grammar library panics: refused as any other wrong schema."""

from __future__ import annotations

from typing import Any

import pytest

from forge.core.errors import InvalidArgument
from forge.grammar.answer_grammar import check_schema

ODD: Any = {"type": "string", "pattern": ["😀" * 50]}
"""The error of the library is cut inside of a character."""


def test_check_of_a_schema_on_which_the_library_panics_names_the_place() -> None:
    """A panic is no `Exception`: it would end the connection without an answer."""
    schema = {"type": "object", "properties": {"a": ODD}}
    with pytest.raises(InvalidArgument, match="the schema/properties/a cannot be enforced"):
        check_schema(schema, field="the schema")
