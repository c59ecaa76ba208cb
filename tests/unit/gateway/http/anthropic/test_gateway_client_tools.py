"""Anthropic's tools that the agent executes are functions with the documented input."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types.beta import BetaToolUnionParam

from forge.grammar.answer_grammar import check_schema
from services.gateway.http.anthropic.client_tools import Display, client_tool, known_types
from services.gateway.http.anthropic.schema import MessagesRequest, tools_of
from services.gateway.http.request_fields.request_body import decode

EXECUTED_BY_AGENTS = ("bash_", "text_editor_", "memory_", "computer_2")
SCREEN = Display(width_px=1024, height_px=768, zoom=True)


def sdk_types() -> dict[str, str]:
    """The name of each such tool by its type, as the SDK declares them."""
    found = {}
    for declared in get_args(BetaToolUnionParam):
        hints = get_type_hints(declared)
        kind, name = (next(iter(get_args(hints.get(key, str))), "") for key in ("type", "name"))
        if str(kind).startswith(EXECUTED_BY_AGENTS):
            found[kind] = name
    return found


def test_every_tool_type_of_the_sdk_is_known_by_its_name() -> None:
    """A new version of the SDK with another tool fails here."""
    types = sdk_types()
    assert len(types) >= 8
    for kind, name in types.items():
        tool = client_tool(kind, SCREEN)
        assert tool is not None, kind
        assert tool.name == name
    assert set(types) <= set(known_types())


@pytest.mark.parametrize("kind", known_types())
def test_input_of_anthropics_tools_can_be_enforced(kind: str) -> None:
    """`strict` is honoured for these tools too."""
    tool = client_tool(kind, SCREEN)
    assert tool is not None
    check_schema(tool.parameters, field="input_schema", lenient=False)


def test_anthropics_tool_is_a_function_in_the_prompt() -> None:
    """With the size of the screen, and with zoom only where it is enabled."""
    computer: dict[str, Any] = {
        "type": "computer_20251124",
        "name": "computer",
        "display_width_px": 1024,
        "display_height_px": 768,
        "display_number": 1,
    }
    (function,) = tools_of(_asked(computer))
    shown = function["function"]
    assert shown["name"] == "computer"
    assert "1024x768 pixels, display 1" in shown["description"]
    assert "zoom" not in shown["parameters"]["properties"]["action"]["enum"]
    (function,) = tools_of(_asked(computer | {"enable_zoom": True, "strict": True}))
    shown = function["function"]
    assert shown["strict"] is True
    assert "zoom" in shown["parameters"]["properties"]["action"]["enum"]
    assert shown["parameters"]["required"] == ["action"]


def _asked(tool: dict[str, Any]) -> MessagesRequest:
    body = {
        "model": "m",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
    }
    return decode(json.dumps(body).encode(), MessagesRequest)
