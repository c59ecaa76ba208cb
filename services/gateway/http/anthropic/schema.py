"""Anthropic Messages requests: schema and checks.

Owns the fields besides the conversation: tools, sampling, thinking; `history` decodes the
conversation. A known field with a wrong type or an unsupported effect is refused; unknown ones are
named in a header of the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any, Literal

import msgspec

from forge.core.errors import InvalidArgument
from forge.core.formats import OutputFormat
from forge.v1 import common_pb2
from services.gateway.http.anthropic.client_tools import (
    ClientTool,
    Display,
    client_tool,
    known_types,
)
from services.gateway.http.request_fields.parameters import Fields
from services.gateway.http.request_fields.request_body import (
    checked_stops,
    sampling_params,
    tool_to_call,
)
from services.gateway.model.chat_model import Tools
from services.gateway.structured_output.response_format import answer_grammar

EDITS_WITHOUT_EFFECT = ("clear_thinking_",)
"""Context edits without effect: the chat template decides which thinking stays."""


_HARMLESS = frozenset(
    {"metadata", "service_tier", "speed", "inference_geo", "diagnostics", "cache_control", "betas"}
)
FIELDS = Fields(harmless=_HARMLESS)
"""Fields that are not used."""
COUNT_FIELDS = Fields(
    harmless=_HARMLESS | {"max_tokens", "stream", "temperature", "top_p", "top_k", "stop_sequences"}
)
"""Unused fields of a request for a number of tokens."""


class Tool(msgspec.Struct):
    """A tool definition."""

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    display_width_px: int | None = None
    """Field of computer tools, like the next three."""
    display_height_px: int | None = None
    display_number: int | None = None
    enable_zoom: bool | None = None


class ToolChoice(msgspec.Struct):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    """`thinking`."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    display: Literal["summarized", "omitted"] | None = None


class AnswerFormat(msgspec.Struct):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """`output_config`."""

    format: AnswerFormat | None = None


class ContextEdit(msgspec.Struct):
    """One edit of `context_management`."""

    type: str


class ContextManagement(msgspec.Struct):
    """`context_management`."""

    edits: list[ContextEdit] = []


class CountTokensRequest(msgspec.Struct):
    """The fields of a prompt."""

    model: str
    messages: msgspec.Raw
    """Decoded by `history`, like `system`."""
    system: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b"null"))
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: AnswerFormat | None = None
    """Name of `output_config.format` in the beta API."""
    context_management: ContextManagement | None = None
    container: Any = None
    mcp_servers: list[Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A prompt with the parameters of its answer."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None


class Shown(Enum):
    """The part of the model's thinking that an agent gets."""

    NOTHING = "nothing"
    BLOCKS = "blocks"
    """Empty thinking blocks."""
    TEXT = "text"


def check(request: CountTokensRequest) -> None:
    """Raises `InvalidArgument` for unsupported fields."""
    edits = request.context_management.edits if request.context_management else ()
    for edit in edits:
        if not edit.type.startswith(EDITS_WITHOUT_EFFECT):
            raise InvalidArgument(
                f"context_management: an edit of type {edit.type[:40]!r} is not supported; "
                "only agents change contexts"
            )
    if request.container is not None:
        raise InvalidArgument("container is not supported: no tools run here")
    if request.mcp_servers:
        raise InvalidArgument("mcp_servers are not supported: no tools run here")


def tools_of(request: CountTokensRequest) -> Tools:
    """Returns the tools in the form of chat templates. Raises `InvalidArgument` for tools that run
    at Anthropic."""
    return [_tool(tool, at) for at, tool in enumerate(request.tools or ())]


def calls_tools(request: CountTokensRequest) -> bool:
    """Returns False for a `tool_choice` of none."""
    return request.tool_choice is None or request.tool_choice.type != "none"


def parallel_calls(request: CountTokensRequest) -> bool:
    """Returns False if the answer may have one call only."""
    choice = request.tool_choice
    return choice is None or not choice.disable_parallel_tool_use


def required_tool(request: CountTokensRequest, tools: Tools, output: OutputFormat) -> str | None:
    """Returns `TurnRequest.required_tool`; raises `InvalidArgument` if no call is possible."""
    choice = request.tool_choice
    if choice is None or choice.type in ("auto", "none"):
        return None
    if choice.type == "any":
        return tool_to_call("", tools, output)
    if not choice.name:
        raise InvalidArgument("tool_choice of type 'tool' needs a name")
    return tool_to_call(choice.name, tools, output)


def sampling_of(request: MessagesRequest) -> common_pb2.SamplingParams:
    """Returns the sampling parameters; raises `InvalidArgument` out of range."""
    return sampling_params(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )


async def grammar_of(request: CountTokensRequest) -> common_pb2.Grammar | None:
    """Returns the grammar of the answer; raises `InvalidArgument` if it cannot be enforced."""
    wanted = request.output_config.format if request.output_config else None
    wanted = wanted or request.output_format
    if wanted is None:
        return None
    field = "output_config.format.schema"
    return await answer_grammar("json_schema", wanted.schema, strict=True, field=field)


def stops_of(request: MessagesRequest) -> Sequence[str]:
    """Returns the stop strings; raises `InvalidArgument` for too many."""
    return checked_stops("stop_sequences", request.stop_sequences)


def shown_of(request: CountTokensRequest) -> Shown:
    """Returns `NOTHING` unless the agent requests thinking."""
    thinking = request.thinking
    if thinking is None or thinking.type == "disabled":
        return Shown.NOTHING
    return Shown.BLOCKS if thinking.display == "omitted" else Shown.TEXT


def _tool(tool: Tool, at: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        return _function(_client_tool(tool, tool.type, at), strict=tool.strict)
    if not tool.name or tool.input_schema is None:
        raise InvalidArgument(f"tools[{at}] must have a name and an input_schema")
    return _function(tool, strict=tool.strict)


def _function(tool: Tool | ClientTool, *, strict: bool | None) -> dict[str, Any]:
    schema = tool.parameters if isinstance(tool, ClientTool) else tool.input_schema
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = schema
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def _client_tool(tool: Tool, kind: str, at: int) -> ClientTool:
    display = Display(
        width_px=tool.display_width_px,
        height_px=tool.display_height_px,
        number=tool.display_number,
        zoom=bool(tool.enable_zoom),
    )
    try:
        found = client_tool(kind, display)
    except InvalidArgument as error:
        raise InvalidArgument(f"tools[{at}]: {error}") from None
    if found is None:
        raise InvalidArgument(
            f"tools[{at}] of type {kind[:40]!r} is not supported; a tool has a name and an "
            f"input_schema, or is executed by the agent: {', '.join(known_types())}"
        )
    if tool.name != found.name:
        raise InvalidArgument(
            f"tools[{at}] of type {kind!r} must be named {found.name!r}, not {tool.name[:40]!r}"
        )
    return found
