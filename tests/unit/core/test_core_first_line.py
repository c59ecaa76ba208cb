"""The first line of an error's text."""

from __future__ import annotations

import pytest

from forge.core.errors import first_line


@pytest.mark.parametrize(
    ("text", "line"), [("", ""), ("\n", ""), ("a", "a"), (" a b\nc\n", "a b"), ("\na\nb", "a")]
)
def test_an_error_has_one_line_in_a_log(text: str, line: str) -> None:
    """An error without a text has an empty line."""
    assert first_line(RuntimeError(text)) == line
