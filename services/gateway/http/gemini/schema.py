"""Gemini requests: schema and checks.

Owns the fields besides the conversation: tools, generation config, thinking; `history` decodes the
conversation. The API takes fields in camel case and in snake case.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from forge.core.errors import InvalidArgument
from forge.core.formats import OutputFormat
from forge.core.tasks.template_kwargs import kwargs_json
from forge.v1 import common_pb2
from services.gateway.http.gemini.json_schema import json_schema
from services.gateway.http.openai.completions.guided import any_of
from services.gateway.http.request_fields.parameters import Fields, add_ignored
from services.gateway.http.request_fields.request_body import (
    checked_stops,
    sampling_params,
    tool_to_call,
    top_logprobs_of,
    within,
)
from services.gateway.http.request_fields.reshaping import Reshaping
from services.gateway.model.chat_model import Tools
from services.gateway.structured_output.response_format import answer_grammar

MAX_CANDIDATES = 128
WEB_SEARCH = frozenset({"googleSearch", "googleSearchRetrieval"})
"""Hosted tools for the setting `http.web_search`."""
FIELDS = Fields(
    harmless=frozenset({"model", "labels", "safetySettings", "safety_settings", "serviceTier"}),
    refused={
        "cachedContent": ("prefixes are cached without it", ()),
        "cached_content": ("prefixes are cached without it", ()),
    },
)
"""Fields that are not used."""
_IGNORED = ("mediaResolution", "enableEnhancedCivicAnswers")
_REFUSED = ("speechConfig", "audioTimestamp", "imageConfig", "routingConfig", "modelConfig")
_NULL = partial(msgspec.Raw, b"null")


class FunctionDeclaration(msgspec.Struct, rename="camel"):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A schema in OpenAPI's dialect."""
    parameters_json_schema: dict[str, Any] | None = None


class FunctionCallingConfig(msgspec.Struct, rename="camel"):
    """`toolConfig.functionCallingConfig`."""

    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] = "AUTO"
    allowed_function_names: list[str] = []


class ToolConfig(msgspec.Struct, rename="camel"):
    """`toolConfig`."""

    function_calling_config: FunctionCallingConfig | None = None


class ThinkingConfig(msgspec.Struct, rename="camel"):
    """`generationConfig.thinkingConfig`."""

    include_thoughts: bool | None = None
    thinking_budget: int | None = None
    thinking_level: str | None = None


class GenerationConfig(msgspec.Struct, rename="camel"):
    """`generationConfig`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    candidate_count: int | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    response_logprobs: bool | None = None
    logprobs: int | None = None
    response_modalities: list[str] | None = None
    thinking_config: ThinkingConfig | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class GenerateContentRequest(msgspec.Struct, rename="camel"):
    """The used fields of a request."""

    contents: msgspec.Raw = msgspec.field(default_factory=partial(msgspec.Raw, b"[]"))
    """Decoded by `history`, like `systemInstruction`."""
    system_instruction: msgspec.Raw = msgspec.field(default_factory=_NULL)
    snake_system_instruction: msgspec.Raw = msgspec.field(
        default_factory=_NULL, name="system_instruction"
    )
    tools: list[dict[str, Any]] | None = None
    tool_config: ToolConfig | None = None
    snake_tool_config: dict[str, Any] | None = msgspec.field(default=None, name="tool_config")
    generation_config: dict[str, Any] | None = None
    snake_generation_config: dict[str, Any] | None = msgspec.field(
        default=None, name="generation_config"
    )

    @property
    def system(self) -> bytes:
        """The system instruction as JSON; `null` without one."""
        camel = bytes(self.system_instruction)
        return camel if camel != b"null" else bytes(self.snake_system_instruction)


class CountTokensRequest(GenerateContentRequest, kw_only=True, rename="camel"):
    """A request for a number of tokens: its fields, or a whole request."""

    generate_content_request: GenerateContentRequest | None = None

    @property
    def whole(self) -> GenerateContentRequest:
        """The request whose prompt is counted."""
        return self.generate_content_request or self


def config_of(request: GenerateContentRequest, headers: dict[str, str]) -> GenerationConfig:
    """Returns the generation config. Names options without effect in `headers`; raises
    `InvalidArgument` for unsupported ones."""
    given = _camel(request.generation_config or request.snake_generation_config or {})
    known = {one.encode_name for one in msgspec.structs.fields(GenerationConfig)}
    for name in _REFUSED:
        if given.get(name):
            raise InvalidArgument(f"generationConfig.{name} is not supported: answers are texts")
    ignored = [name for name in given if name not in known and given[name]]
    for name in ignored:
        shown = name if name in _IGNORED else "unknown"
        add_ignored(headers, f"generationConfig.{shown}")
    if "thinkingConfig" in given and isinstance(given["thinkingConfig"], dict):
        given["thinkingConfig"] = _camel(given["thinkingConfig"])
    config: GenerationConfig = _converted(given, GenerationConfig, "generationConfig")
    return config


def sampling_of(config: GenerationConfig) -> common_pb2.SamplingParams:
    """Returns the sampling parameters; raises `InvalidArgument` out of range."""
    sampling = sampling_params(
        max_tokens=config.max_output_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=None if config.top_k is None else int(within("topK", config.top_k, -1, 2**31 - 1)),
        max_tokens_name="maxOutputTokens",
    )
    Reshaping(
        presence_penalty=config.presence_penalty, frequency_penalty=config.frequency_penalty
    ).write_reshaping(sampling)
    if config.seed is not None:
        sampling.seed = config.seed % 2**64
    if config.logprobs and not config.response_logprobs:
        raise InvalidArgument("logprobs needs responseLogprobs: true")
    sampling.top_logprobs = top_logprobs_of(config.logprobs)
    for modality in config.response_modalities or ():
        if modality.upper() not in ("TEXT", "MODALITY_UNSPECIFIED"):
            raise InvalidArgument(
                f"responseModalities has {modality[:40]!r}; only TEXT is supported"
            )
    return sampling


async def grammar_of(config: GenerationConfig) -> common_pb2.Grammar | None:
    """Returns the grammar of the answer; raises `InvalidArgument` if it cannot be enforced."""
    schema, field = config.response_json_schema, "generationConfig.responseJsonSchema"
    if config.response_schema is not None:
        field = "generationConfig.responseSchema"
        schema = json_schema(config.response_schema)
    match config.response_mime_type or "text/plain":
        case "application/json" if schema is None:
            return await answer_grammar("json_object", field=field)
        case "application/json":
            return await answer_grammar("json_schema", schema, strict=True, field=field)
        case "text/x.enum" if schema is not None and schema.get("enum"):
            return common_pb2.Grammar(regex=any_of(field, [str(one) for one in schema["enum"]]))
        case "text/plain" if schema is None:
            return None
        case other:
            raise InvalidArgument(
                f"generationConfig.responseMimeType = {other[:40]!r} "
                f"{'with' if schema else 'without'} a schema is not supported; use "
                "'application/json', 'text/x.enum' with an enum, or 'text/plain' without a schema"
            )


def stops_of(config: GenerationConfig) -> Sequence[str]:
    """Returns the stop strings; raises `InvalidArgument` for too many."""
    return checked_stops("stopSequences", config.stop_sequences)


def candidates_of(config: GenerationConfig) -> int:
    """Returns the number of answers."""
    return int(within("candidateCount", config.candidate_count or 1, 1, MAX_CANDIDATES))


def tools_of(
    request: GenerateContentRequest, *, omit_web_search: bool
) -> tuple[Tools, Sequence[str]]:
    """Returns the tools in the form of chat templates, and the hosted tools that were left out.

    Raises `InvalidArgument` for tools that run at Google.
    """
    tools: list[dict[str, Any]] = []
    omitted: list[str] = []
    for at, given in enumerate(request.tools or ()):
        tool = _camel(given)
        for kind in tool:
            if kind == "functionDeclarations":
                continue
            if not (kind in WEB_SEARCH and omit_web_search):
                raise InvalidArgument(
                    f"tools[{at}].{kind[:40]} is not supported: no tools run here; "
                    "functionDeclarations are"
                )
            omitted.append(kind)
        place = f"tools[{at}].functionDeclarations"
        declared = tool.get("functionDeclarations") or []
        functions: list[dict[str, Any]] = _converted(declared, list[dict[str, Any]], place)
        tools += [
            _function(_converted(_camel(one), FunctionDeclaration, place), request)
            for one in functions
        ]
    return tools, omitted


def required_tool(
    request: GenerateContentRequest, tools: Tools, output: OutputFormat
) -> str | None:
    """Returns `TurnRequest.required_tool`; raises `InvalidArgument` if no call is possible."""
    config = calling_of(request)
    if config.mode != "ANY":
        return None
    allowed = config.allowed_function_names
    if len(allowed) == 1:
        return tool_to_call(allowed[0], tools, output)
    if allowed and set(allowed) != {tool["function"]["name"] for tool in tools}:
        raise InvalidArgument(
            "allowedFunctionNames must be one function or all: send only the tools that are allowed"
        )
    return tool_to_call("", tools, output)


def calling_of(request: GenerateContentRequest) -> FunctionCallingConfig:
    """Returns the mode of function calls."""
    config = request.tool_config
    if config is None and request.snake_tool_config:
        given = _camel(request.snake_tool_config)
        inner = _camel(given.get("functionCallingConfig") or {})
        place = "tool_config.function_calling_config"
        snake: FunctionCallingConfig = _converted(inner, FunctionCallingConfig, place)
        return snake
    return (config and config.function_calling_config) or FunctionCallingConfig()


def template_kwargs_of(
    config: GenerationConfig, variables: Collection[str], headers: dict[str, str]
) -> str:
    """Returns the variables of the chat template for `thinkingConfig`; options without a variable
    for them are named in `headers`."""
    thinking = config.thinking_config or ThinkingConfig()
    kwargs: dict[str, Any] = {}
    if thinking.thinking_budget == 0 and "enable_thinking" in variables:
        kwargs["enable_thinking"] = False
    elif thinking.thinking_budget not in (None, -1):
        add_ignored(headers, "generationConfig.thinkingConfig.thinkingBudget")
    if thinking.thinking_level and "reasoning_effort" in variables:
        kwargs["reasoning_effort"] = thinking.thinking_level.lower()
    elif thinking.thinking_level:
        add_ignored(headers, "generationConfig.thinkingConfig.thinkingLevel")
    return kwargs_json(kwargs)


def _function(one: FunctionDeclaration, request: GenerateContentRequest) -> dict[str, Any]:
    function: dict[str, Any] = {"name": one.name}
    if one.description is not None:
        function["description"] = one.description
    if one.parameters_json_schema is not None:
        function["parameters"] = one.parameters_json_schema
    elif one.parameters is not None:
        function["parameters"] = json_schema(one.parameters)
    if calling_of(request).mode == "VALIDATED":
        function["strict"] = True
    return {"type": "function", "function": function}


def _camel(given: dict[str, Any]) -> dict[str, Any]:
    """Returns an object with its names in camel case."""
    return {re.sub(r"_([a-z])", lambda at: at[1].upper(), name): given[name] for name in given}


def _converted(given: Any, kind: type[Any], place: str) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{place} is not valid: {error}") from None


def shown(value: Any) -> str:
    """Returns a value as JSON."""
    return json.dumps(value, ensure_ascii=False)
