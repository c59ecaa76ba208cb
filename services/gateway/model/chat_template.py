"""The chat template of a model, with one choice of its variables.

Owns rendering, the variables of a template (`chat_template_kwargs`, for example `enable_thinking`),
and the tests of a template that depend on them: whether it opens the reasoning, and whether the
last answer alone continues a conversation. Owns no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import msgspec
from jinja2 import Environment, TemplateSyntaxError
from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerFast

from forge.core.conversation.continuation import (
    STUB,
    Render,
    TemplateRefused,
    looks_back_one_answer,
)
from forge.core.conversation.messages import Message, to_openai
from forge.core.formats import SAMPLE_TOOLS, ReasoningFormat, Tools
from forge.core.tasks import template_kwargs
from services.gateway.errors import InvalidField

ASKED = (Message(role="user", content="."),)
"""A conversation that every template renders."""
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"chat_template", "conversation", "tokenize", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
    | {"bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now"}
)
"""Names that the gateway or transformers sets."""
_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""Exceptions of templates for messages and tools that they do not support."""


class ChatTemplate:
    """A chat template with fixed variables."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        kwargs: Mapping[str, Any],
        *,
        text_arguments: bool,
        end_texts: Sequence[str] = (),
        reasoning: ReasoningFormat | None = None,
    ) -> None:
        """`text_arguments`: the template needs call arguments as text. `end_texts`: texts of the
        tokens that end a turn."""
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs)
        self._text_arguments = text_arguments
        self._reasoning_key = reasoning_key(str(tokenizer.chat_template))
        self._end_texts = end_texts
        self._reasoning = reasoning
        self._stub_text = self.rendered(STUB, None, generation_prompt=True)

    @cached_property
    def opens_reasoning(self) -> bool:
        """True if the generation prompt begins the reasoning."""
        return self._reasoning is not None and self._reasoning.opened_by(
            self.rendered(ASKED, None, generation_prompt=True)
        )

    @cached_property
    def looks_back_one_answer(self) -> bool:
        """True if the last answer alone continues a conversation."""
        return bool(self._stub_text) and all(
            looks_back_one_answer(self.renderer(tools), self.stub_render, end_texts=self._end_texts)
            for tools in (None, SAMPLE_TOOLS)
        )

    def renderer(self, tools: Tools | None) -> Render:
        """Returns the function that renders messages with these tools."""

        def render(messages: Sequence[Message], generation_prompt: bool) -> str:
            try:
                text = self._tokenizer.apply_chat_template(
                    [
                        template_message(
                            message,
                            text_arguments=self._text_arguments,
                            reasoning_key=self._reasoning_key,
                        )
                        for message in messages
                    ],
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **self._kwargs,
                )
            except _TEMPLATE_ERRORS as error:
                raise TemplateRefused(str(error)) from error
            return cast(str, text)

        return render

    def stub_render(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """Renders messages after `STUB`, without tools; the text of `STUB` alone is cached."""
        if messages is STUB and generation_prompt:
            return self._stub_text
        return self.renderer(None)(messages, generation_prompt)

    def rendered(
        self, messages: Sequence[Message], tools: Tools | None, *, generation_prompt: bool = False
    ) -> str:
        """Renders sample messages; returns "" if the template refuses them."""
        try:
            return self.renderer(tools)(messages, generation_prompt)
        except TemplateRefused:
            return ""


def variables_of(template: str) -> frozenset[str]:
    """Returns the names of a template's variables that a request may set."""
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True).parse(
            template
        )
        names = find_undeclared_variables(parsed)
    except TemplateSyntaxError:
        # Tags of transformers alone, such as `generation`.
        names = set(re.findall(r"[a-z_]\w*", template))
    return frozenset(names) - _RESERVED


def merged_kwargs(variables: frozenset[str], granted: str, asked: str) -> str:
    """Returns the variables of a session's token and those of a request over them, as
    `kwargs_json`.

    Raises `InvalidArgument` for a request's that are no JSON object or too large, and for a name
    that is not in `variables`; the message has the name and the value.
    """
    merged = template_kwargs.merged(granted) | template_kwargs.checked(asked)
    for name, value in merged.items():
        if name not in variables:
            field = f"chat_template_kwargs.{name[:60]}"
            raise InvalidField(
                f"{field} = {json.dumps(value)[:60]}: the model's chat template has no such "
                f"variable; it has {sorted(variables) or 'none'}",
                param=field,
            )
    return template_kwargs.kwargs_json(merged)


def reasoning_key(template: str) -> str:
    """Returns the name of an assistant's reasoning in a template; gpt-oss has its own."""
    harmony = "thinking" in template and "reasoning_content" not in template
    return "thinking" if harmony and "<|channel|>" in template else "reasoning_content"


def template_message(
    message: Message, *, text_arguments: bool = False, reasoning_key: str = "reasoning_content"
) -> dict[str, Any]:
    """Returns a message in the form of chat templates: the arguments of calls as an object if
    possible, or as text for templates that need text."""
    plain = to_openai(message)
    plain.pop("images", None)
    if "reasoning_content" in plain:
        plain[reasoning_key] = plain.pop("reasoning_content")
    for call in plain.get("tool_calls", ()):
        function, text = call["function"], call["function"]["arguments"]
        function["arguments"] = text or "{}" if text_arguments else _object_or_text(text)
    return plain


def _object_or_text(arguments: str) -> Any:
    try:
        # msgspec also refuses half surrogates, which no tokenizer can encode.
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
