"""OpenAI chat completion requests: schema and checks.

Owns the conversion of a request body to a `TurnRequest`. A field is refused if its type is wrong,
or if it asks for an effect that is not here; `fields` has those that are not used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from forge.core.conversation.messages import Message, ToolCall, normal_role
from forge.core.conversation.request_prefix import History
from forge.core.errors import InvalidArgument
from forge.core.formats import OutputFormat
from forge.core.tasks.template_kwargs import kwargs_json
from forge.v1 import common_pb2
from services.gateway.errors import InvalidField
from services.gateway.http.message_parts.images import ImagePolicy, refuse
from services.gateway.http.message_parts.prefill import split_prefill
from services.gateway.http.openai.completions.completion_fields import CompletionFields
from services.gateway.http.openai.completions.guided import guided_grammar_of
from services.gateway.http.openai.content import Part, content_of
from services.gateway.http.request_fields.parameters import add_ignored
from services.gateway.http.request_fields.request_body import (
    UNREADABLE,
    tool_to_call,
    top_logprobs_of,
    within,
    wrong_json,
)
from services.gateway.model.chat_model import Tools
from services.gateway.structured_output.response_format import answer_grammar

MAX_CHOICES = 128


class CallFunction(msgspec.Struct):
    """The function of a call."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON text; some clients send an object."""


class Call(msgspec.Struct):
    """A tool call."""

    function: CallFunction
    id: str | None = None


class ChatMessage(msgspec.Struct):
    """A message of the request."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Any = None
    """The predecessor of tool calls, refused; clients send null."""


class NamedFunction(msgspec.Struct):
    """The function of a named tool."""

    name: str


class NamedTool(msgspec.Struct):
    """A `tool_choice` with a name."""

    function: NamedFunction


class AnswerSchema(msgspec.Struct):
    """`response_format.json_schema`."""

    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: AnswerSchema | None = None


class ChatCompletionRequest(CompletionFields, kw_only=True):
    """The used fields of a request."""

    messages: msgspec.Raw
    """An array of `ChatMessage`; `messages_of` decodes its new part."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    web_search_options: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """Sets the template's variable of this name, if it has one."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def messages_of(request: ChatCompletionRequest, images: ImagePolicy = refuse) -> History:
    """Returns the messages; reading an invalid one raises `InvalidArgument`."""
    return History(memoryview(request.messages), partial(_read_messages, images))


def prefill_of(
    request: ChatCompletionRequest, messages: Sequence[Message]
) -> tuple[Sequence[Message], str]:
    """Returns the messages of the prompt and the beginning of the answer, "" for none. Raises
    `InvalidArgument` for flags that contradict each other."""
    if request.continue_final_message:
        if request.add_generation_prompt:
            raise InvalidField(
                "continue_final_message = true needs add_generation_prompt = false: the prompt "
                "ends with the last message",
                param="continue_final_message",
            )
        return split_prefill(messages)
    if request.add_generation_prompt is False:
        raise InvalidField(
            "add_generation_prompt = false is not supported without continue_final_message = true: "
            "every prompt ends where an answer begins",
            param="add_generation_prompt",
        )
    if request.echo:
        raise InvalidField("echo = true needs continue_final_message = true", param="echo")
    return messages, ""


def template_kwargs_of(
    request: ChatCompletionRequest, variables: Collection[str], headers: dict[str, str]
) -> str:
    """Returns the variables of the chat template. Without a variable for it, `reasoning_effort` is
    named in `headers`."""
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        if "reasoning_effort" in variables:
            kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        else:
            add_ignored(headers, "reasoning_effort")
    return kwargs_json(kwargs)


def _read_messages(images: ImagePolicy, array: bytes, first: int) -> list[Message]:
    try:
        messages = msgspec.json.decode(array, type=list[ChatMessage])
    except UNREADABLE as error:
        wrong = re.sub(r"`\$\[(\d+)", lambda at: f"`$[{first + int(at[1])}", str(error))
        raise wrong_json(wrong, within="messages") from None
    return [_message(message, first + at, images) for at, message in enumerate(messages)]


def tools_of(tools: Sequence[dict[str, Any]] | None) -> Tools:
    """Returns the tools in the form of chat templates. Raises `InvalidArgument` without a name."""
    for at, tool in enumerate(tools or ()):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidField(f"tools[{at}] must be a function with a name", param=f"tools[{at}]")
    return tools or ()


def required_tool(request: ChatCompletionRequest, output: OutputFormat) -> str | None:
    """Returns `TurnRequest.required_tool`; raises `InvalidArgument` if no call is possible."""
    choice = request.tool_choice
    if choice is None or choice in ("none", "auto"):
        return None
    wanted = choice.function.name if isinstance(choice, NamedTool) else ""
    return tool_to_call(wanted, tools_of(request.tools), output)


def sampling_of(request: ChatCompletionRequest) -> common_pb2.SamplingParams:
    """Returns the sampling parameters; raises `InvalidArgument` out of range."""
    if request.max_completion_tokens is None:
        sampling = request.sampling(request.max_tokens)
    else:
        sampling = request.sampling(
            request.max_completion_tokens, max_tokens_name="max_completion_tokens"
        )
    if request.top_logprobs and not request.logprobs:
        raise InvalidField("top_logprobs needs logprobs: true", param="top_logprobs")
    sampling.top_logprobs = top_logprobs_of(request.top_logprobs)
    return sampling


async def answer_grammar_of(request: ChatCompletionRequest) -> common_pb2.Grammar | None:
    """Returns the grammar of `response_format` or of guided decoding; raises `InvalidArgument` if
    it cannot be enforced."""
    wanted, guided = request.response_format, await guided_grammar_of(request)
    if guided is not None and wanted is not None and wanted.type != "text":
        raise InvalidField(
            "response_format and guided decoding exclude each other", param="response_format"
        )
    if wanted is None or guided is not None:
        return guided
    described = wanted.json_schema
    if wanted.type == "json_schema" and described is None:
        raise InvalidField("response_format.json_schema is missing", param="response_format")
    return await answer_grammar(
        wanted.type,
        described.schema if described else None,
        strict=bool(described and described.strict),
        field="response_format.json_schema.schema",
    )


def choices_of(request: ChatCompletionRequest) -> int:
    """Returns the number of answers; raises `InvalidArgument` for unsupported fields."""
    if request.functions:
        raise InvalidField("functions are not supported: send them as tools", param="functions")
    if request.web_search_options is not None:
        raise InvalidField(
            "web_search_options is not supported: there is no web search here",
            param="web_search_options",
        )
    for modality in request.modalities or ():
        if modality != "text":
            raise InvalidField(
                f"modalities has {modality[:40]!r}; only 'text' is supported", param="modalities"
            )
    return int(within("n", 1 if request.n is None else request.n, 1, MAX_CHOICES))


def _message(message: ChatMessage, at: int, images: ImagePolicy) -> Message:
    field = "role"
    try:
        role = normal_role(message.role)
        field = "content"
        content, seen = content_of(message.content, ("text",), images)
        if message.function_call:
            field = "function_call"
            raise InvalidArgument("function_call is not supported: send it in tool_calls")
        if message.content is None and role != "assistant":  # empty answers may be sent as null
            raise InvalidArgument(f"content is missing: a message of role {role} needs it")
    except InvalidArgument as error:
        place = f"messages[{at}]"
        raise InvalidField(f"{place}: {error}", param=f"{place}.{field}") from None
    calls = tuple(
        ToolCall(
            name=call.function.name,
            arguments=_arguments(call.function.arguments),
            call_id=call.id or "",
        )
        for call in message.tool_calls or ()
    )
    return Message(
        role=role,
        content=content,
        reasoning=message.reasoning_content or message.reasoning or "",
        tool_calls=calls,
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        images=seen,
    )


def _arguments(arguments: str | dict[str, Any] | None) -> str:
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments or ""
