"""Tools of the Responses API, and their names in the prompt.

A prompt has functions only. So the functions of a namespace get the namespace in their names, and a
custom tool becomes a function with one text. Answers restore both. Owns the rules in both
directions; `items` and `history` apply them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from services.gateway.errors import InvalidField
from services.gateway.metrics import OMITTED_TOOLS
from services.gateway.model.chat_model import Tools
from services.gateway.structured_output.lark_pattern import pattern_of

INPUT = "input"
"""Name of the only argument of a custom tool in the prompt."""
TOOLS_OMITTED = "X-Forge-Tools-Omitted"
"""Header of the response: types of the tools that were left out."""

Given = Mapping[str, Any]


class CustomFormat(msgspec.Struct):
    """`format` of a custom tool."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolName:
    """A tool as the agent knows it."""

    name: str
    namespace: str = ""
    custom: bool = False


ToolNames = Mapping[str, ToolName]
"""By the name in the prompt; without functions that have the same name there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSet:
    """The tools of one request."""

    tools: Tools
    """In the format of chat completions, so both protocols make equal prompts."""
    names: ToolNames
    omitted: tuple[str, ...] = ()
    """Types of the tools that were left out."""


def tool_set(given: Sequence[Given] | None, *, omit_web_search: bool) -> ToolSet:
    """Returns the tools of a request. Raises `InvalidArgument` for a tool that the agent does not
    execute, for a grammar that cannot be enforced, and for a name that occurs twice."""
    tools: list[dict[str, Any]] = []
    names: dict[str, ToolName] = {}
    omitted: list[str] = []
    seen: set[str] = set()
    for at, tool in enumerate(given or ()):
        if omit_web_search and str(tool.get("type")).startswith("web_search"):
            omitted.append("web_search")
            continue
        for function, named in _functions(tool, f"tools[{at}]"):
            flat = function["name"]
            if flat in seen and (named is not None or flat in names):
                raise InvalidField(f"tools[{at}]: {flat!r} names two tools", param=f"tools[{at}]")
            seen.add(flat)
            if named is not None:
                names[flat] = named
            tools.append({"type": "function", "function": function})
    return ToolSet(tools=tools, names=names, omitted=tuple(dict.fromkeys(omitted)))


def count_omitted(omitted: Sequence[str]) -> dict[str, str]:
    """Counts the tools that were left out; returns the header that says so."""
    for kind in omitted:
        OMITTED_TOOLS.labels(kind).inc()
    return {TOOLS_OMITTED: ", ".join(omitted)} if omitted else {}


def flat_name(name: str, namespace: str | None) -> str:
    """Returns the name of a tool in the prompt."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def responses_tools(tools: Tools, names: ToolNames) -> list[dict[str, Any]]:
    """Returns tools in the format of the Responses API, those of a namespace together."""
    shown: list[dict[str, Any]] = []
    spaces: dict[str, list[dict[str, Any]]] = {}
    for tool in tools:
        function = tool["function"]
        named = names.get(function["name"])
        item = _shown(function, named)
        if named is None or not named.namespace:
            shown.append(item)
            continue
        if named.namespace not in spaces:
            spaces[named.namespace] = []
            shown.append(
                {
                    "type": "namespace",
                    "name": named.namespace,
                    "description": "",
                    "tools": spaces[named.namespace],
                }
            )
        spaces[named.namespace].append(item)
    return shown


def input_of(arguments: str) -> str | None:
    """Returns the text for a custom tool from the arguments of a call; None for other arguments,
    which the tool gets as they are, so that it can refuse them."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and value.keys() == {INPUT} and isinstance(value[INPUT], str):
        text: str = value[INPUT]
        return text
    return None


def arguments_of(text: str) -> str:
    """Returns the arguments of the call of a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def _functions(tool: Given, place: str) -> Iterator[tuple[dict[str, Any], ToolName | None]]:
    """Yields the functions of a tool, each with the agent's name for it unless it is the same."""
    kind = tool.get("type")
    if kind != "namespace":
        yield _function(tool, place, namespace="")
        return
    namespace, description = tool.get("name"), tool.get("description")
    members = tool.get("tools")
    if not isinstance(namespace, str) or not namespace or not isinstance(members, list):
        raise InvalidField(f"{place} must be a namespace with a name and tools", param=place)
    for at, member in enumerate(members):
        if not isinstance(member, dict):
            below = f"{place}.tools[{at}]"
            raise InvalidField(f"{below} must be a tool", param=below)
        function, named = _function(member, f"{place}.tools[{at}]", namespace=namespace)
        if not at and isinstance(description, str) and description:
            # A prompt has no place for namespaces: the first function describes all.
            own = function.get("description")
            function["description"] = f"{description}\n\n{own}" if own else description
        yield function, named


def _function(tool: Given, place: str, *, namespace: str) -> tuple[dict[str, Any], ToolName | None]:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom"):
        raise InvalidField(
            f"{place} is of type {str(kind)[:40]!r}; only 'function', 'custom' and 'namespace' "
            "tools can be called here",
            param=place,
        )
    if not isinstance(name, str):
        raise InvalidField(f"{place} must be a {kind} with a name", param=place)
    named = ToolName(name=name, namespace=namespace, custom=kind == "custom")
    if kind == "custom":
        function = _custom(tool, place)
    else:
        keys = ("name", "description", "parameters", "strict")
        function = {key: tool[key] for key in keys if tool.get(key) is not None}
    function["name"] = flat_name(name, namespace)
    return function, named if namespace or named.custom else None


def _custom(tool: Given, place: str) -> dict[str, Any]:
    """Returns a function with one text; a grammar is enforced as for a strict function."""
    pattern = _pattern(tool.get("format"), f"{place}.format")
    text: dict[str, Any] = {"type": "string"}
    if pattern is not None:
        text["pattern"] = f"^(?:{pattern})$"
    function: dict[str, Any] = {"name": ""}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    function["parameters"] = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    if pattern is not None:
        function["strict"] = True
    return function


def _pattern(given: Any, field: str) -> str | None:
    if given is None:
        return None
    try:
        wanted = msgspec.convert(given, CustomFormat)
    except msgspec.ValidationError as error:
        raise InvalidField(f"{field} is not valid: {error}", param=field) from None
    if wanted.type == "text":
        return None
    if wanted.syntax is None or wanted.definition is None:
        raise InvalidField(f"{field} needs a syntax and a definition", param=field)
    if wanted.syntax == "regex":
        return wanted.definition
    return pattern_of(wanted.definition, field=f"{field}.definition")


def _shown(function: Given, named: ToolName | None) -> dict[str, Any]:
    if named is not None and named.custom:
        description = function.get("description")
        return {"type": "custom", "name": named.name, "description": description}
    blank = {"description": None, "parameters": None, "strict": None}
    name = function["name"] if named is None else named.name
    return {"type": "function", **blank, **function, "name": name}
