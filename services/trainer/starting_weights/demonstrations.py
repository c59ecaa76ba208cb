"""Turns conversations into supervised samples: the assistant's messages are the targets.

Owns reading conversations and rendering each answer as it would have been sampled: the context by
the model's chat template, then the answer's tokens up to its end token. No training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from forge.core.errors import InvalidArgument, NotFound
from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.runtime.files.json_lines import read_json_lines

Conversation = Mapping[str, Any]
"""`messages` in OpenAI's shape, and optionally `tools` and a `domain`."""


def read_conversations(path: Path) -> list[Conversation]:
    """One JSON object per line. Raises `NotFound`, `InvalidArgument` naming the line."""
    try:
        lines = read_json_lines(path)
    except OSError as error:
        raise NotFound(f"data = {str(path)!r}: {error.strerror}") from error
    found = []
    for number, entry in lines:
        messages = entry.get("messages") if isinstance(entry, dict) else None
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise InvalidArgument(f"{path}, line {number}: messages is not a list of objects")
        found.append(entry)
    return found


def lesson_samples(
    conversation: Conversation, tokenizer: PreTrainedTokenizerFast, *, source: str
) -> list[Sample]:
    """One sample per answer of the assistant. Raises `InvalidArgument` beginning with `source`."""
    messages = [_for_template(message) for message in conversation["messages"]]
    tools = conversation.get("tools") or None
    samples = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        try:
            context, whole = (
                tokenizer.apply_chat_template(
                    shown, tools=tools, tokenize=False, add_generation_prompt=prompts
                )
                for shown, prompts in ((messages[:index], True), (messages[: index + 1], False))
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise InvalidArgument(
                f"{source}: the chat template refuses messages[{index}]: {error}"
            ) from error
        if not whole.startswith(context):
            raise InvalidArgument(
                f"{source}: the chat template renders messages[{index}] with another beginning "
                "than its generation prompt; such an answer cannot be sampled"
            )
        prompt, answer = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (context, whole.removeprefix(context))
        )
        samples.append(
            _sample(prompt, _until_end(answer, tokenizer), str(conversation.get("domain", "")))
        )
    return samples


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with parsed arguments of calls: templates iterate over them."""
    shown = dict(message)
    if isinstance(shown.get("tool_calls"), list):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"])}}
            for call in shown["tool_calls"]
        ]
    return shown


def _parsed(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _until_end(answer: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The answer with its end token, without the template's text between messages."""
    ids = list(answer)
    end = tokenizer.eos_token_id
    return ids[: ids.index(end) + 1] if end in ids else ids


def _sample(prompt: Sequence[int], answer: Sequence[int], domain: str) -> Sample:
    count = len(answer)
    return Sample(
        ids=int32_bytes([*prompt, *answer]),
        trained=((len(prompt), len(prompt) + count),) if count and prompt else (),
        behavior_logprobs=float32_bytes([0.0] * (count if prompt else 0)),
        weight_versions=int32_bytes([0] * (count if prompt else 0)),
        advantages=float32_bytes([1.0] * (count if prompt else 0)),
        domain=domain,
    )
