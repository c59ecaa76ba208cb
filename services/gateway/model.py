"""The model as the gateway sees it: tokenizer, chat template, stop tokens, output format.

Owns text to ids and back, and rendering. Owns no conversation and no weights: torch is never
imported. A model directory has the layout of transformers; `tokenizer.json` is taken as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerFast

from forge.core.continuation import Render, TemplateRefused, looks_back_one_answer
from forge.core.errors import ConfigError
from forge.core.formats import OutputFormat, detect_format, get_format
from forge.core.formats.think import CLOSE as THINK_CLOSE
from forge.core.formats.think import MARKS as THINK_MARKS
from forge.core.formats.think import OPEN as THINK_OPEN
from forge.core.messages import Message
from forge.core.trajectory import TOKEN_BYTES, int32_array, int32_bytes

Tools = Sequence[Mapping[str, Any]]

_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""What a template may raise over messages and tools it was not written for."""


class ChatModel:
    """Everything of a model but its weights."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        name: str,
        context_tokens: int,
        stop_ids: Iterable[int],
        tool_format: str = "auto",
    ) -> None:
        """Raises `ConfigError` when the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise ConfigError(f"model {name}: the tokenizer has no chat template")
        self.name = name
        self.context_tokens = context_tokens
        self.stop_ids = frozenset(stop_ids)
        template = str(tokenizer.chat_template)
        self.format: OutputFormat = get_format(
            detect_format(template) if tool_format == "auto" else tool_format
        )
        self.thinks = THINK_OPEN in template
        self.vocabulary_tokens = len(tokenizer)
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._hidden_ids = self._hidden(tokenizer)
        self.end_texts = tuple(
            self._backend.decode([i], skip_special_tokens=False) for i in self.stop_ids
        )
        self.opens_reasoning = self.thinks and self._opens_reasoning()
        self.looks_back_one_answer = looks_back_one_answer(
            self.renderer(None), end_texts=self.end_texts
        ) and looks_back_one_answer(self.renderer(_SAMPLE_TOOLS), end_texts=self.end_texts)

    @classmethod
    def load(
        cls, path: str, *, name: str = "", context_tokens: int = 0, tool_format: str = "auto"
    ) -> ChatModel:
        """Reads a model directory. Raises `ConfigError` naming the file that is missing."""
        directory = Path(path)
        if not path or not (directory / "tokenizer.json").is_file():
            raise ConfigError(f"model_path = {path!r}: there is no tokenizer.json in it")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        config = _read_json(directory / "config.json")
        context_tokens = context_tokens or int(config.get("max_position_embeddings", 0))
        if not context_tokens:
            raise ConfigError(
                f"{directory / 'config.json'} has no max_position_embeddings: set context_tokens"
            )
        eos = _read_json(directory / "generation_config.json").get(
            "eos_token_id", config.get("eos_token_id")
        )
        stop_ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id} - {None}
        return cls(
            tokenizer,
            name=name or directory.resolve().name,
            context_tokens=context_tokens,
            stop_ids=cast(set[int], stop_ids),
            tool_format=tool_format,
        )

    def renderer(self, tools: Tools | None) -> Render:
        """Rendering of messages with these tools."""

        def render(messages: Sequence[Message], generation_prompt: bool) -> str:
            try:
                text = self._tokenizer.apply_chat_template(
                    [template_message(message) for message in messages],
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                )
            except _TEMPLATE_ERRORS as error:
                raise TemplateRefused(str(error)) from error
            return cast(str, text)

        return render

    def encode(self, text: str) -> bytes:
        """int32 ids; special tokens are recognized, none are added."""
        return int32_bytes(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: bytes | Sequence[int]) -> str:
        """Text of ids, without special tokens other than the marks of the output format."""
        numbers = int32_array(ids) if isinstance(ids, bytes) else ids
        shown = [i for i in numbers if i not in self._hidden_ids]
        return cast(str, self._backend.decode(shown, skip_special_tokens=False))

    def reasoning_tokens(self, answer: Message, sampled_ids: bytes) -> int:
        """How many of an answer's tokens are reasoning, the mark behind it included."""
        if not answer.reasoning:
            return 0
        close = self._backend.encode(THINK_CLOSE, add_special_tokens=False).ids
        if len(close) != 1:
            # Text has no exact length in tokens when its end is spread over some of them.
            return len(self.encode(answer.reasoning)) // TOKEN_BYTES
        numbers = list(int32_array(sampled_ids))
        return numbers.index(close[0]) + 1 if close[0] in numbers else len(numbers)

    def piece(self, token_id: int) -> str:
        """The text of one token by itself, special or not."""
        return cast(str, self._backend.decode([token_id], skip_special_tokens=False))

    def _hidden(self, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
        """Special tokens are no text, except where a format writes with them."""
        marks = self.format.marks | (THINK_MARKS if self.thinks else frozenset())
        kept = {tokenizer.convert_tokens_to_ids(mark) for mark in marks}
        return (frozenset(tokenizer.all_special_ids) | self.stop_ids) - kept

    def _opens_reasoning(self) -> bool:
        asked = self.renderer(None)([Message(role="user", content=".")], True)
        return asked.rstrip().endswith(THINK_OPEN)


class TextStream:
    """Turns ids into text as they come, never splitting a character over two pieces."""

    CONTEXT_TOKENS = 4
    """Ids decoded again with the new ones, for tokenizers that space words by what precedes."""
    MAX_HELD_TOKENS = 3
    """A character of UTF-8 has four bytes; what does not complete by then never will."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._context: list[int] = []
        self._held: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        """Text that is certain by now."""
        ids = [*self._held, *ids]
        for held in range(min(self.MAX_HELD_TOKENS, len(ids)) + 1):
            text = self._text(ids[: len(ids) - held])
            if not text.endswith("\ufffd"):
                return self._give(text, ids, held=held)
        # No character is that long: the policy sampled nonsense, or U+FFFD itself.
        return self._give(self._text(ids), ids, held=0)

    def finish(self) -> str:
        """What was held back."""
        return self._give(self._text(self._held), self._held, held=0)

    def _text(self, ids: Sequence[int]) -> str:
        """What `ids` add to the text before them."""
        before = self._model.decode(self._context)
        return self._model.decode([*self._context, *ids])[len(before) :]

    def _give(self, text: str, ids: Sequence[int], *, held: int) -> str:
        given = len(ids) - held
        self._held = list(ids[given:])
        self._context = [*self._context, *ids[:given]][-self.CONTEXT_TOKENS :]
        return text


def template_message(message: Message) -> dict[str, Any]:
    """A message as chat templates expect it: arguments as an object wherever they are one."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": _object_or_text(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.name:
        plain["name"] = message.name
    return plain


def _object_or_text(arguments: str) -> Any:
    try:
        # Stricter than json: no half surrogates, which no tokenizer can encode.
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


_SAMPLE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look somewhere.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    },
)
