"""The model without its weights: tokenizer, chat template, stop tokens, output formats.

Owns encoding and decoding, and the tests of the chat template at load time: its output formats and
its form of tool arguments (`chat_template` renders). Owns no conversation and no
weights: torch is never imported. A model directory has the layout of transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerFast

from forge.core.conversation.messages import Message
from forge.core.errors import ConfigError
from forge.core.formats import (
    SAMPLE_CALL,
    SAMPLE_TOOLS,
    OutputFormat,
    ReasoningFormat,
    Tools,
    detect_format,
    detect_reasoning,
    get_format,
    get_reasoning,
)
from forge.core.token_columns import TOKEN_BYTES, int32_array, int32_bytes
from services.gateway.model.chat_template import (
    ASKED,
    ChatTemplate,
    merged_kwargs,
    variables_of,
)
from services.gateway.model.encoding_cache import EncodingCache
from services.gateway.model.long_text import encode_within
from services.gateway.model.token_bound import longest_token_bytes

__all__ = ["ChatModel", "TextStream", "Tools"]

KEPT_TEMPLATES = 64
"""Choices of template variables whose tests are kept."""
FIRST_PROMPT_BYTES = 16 << 20
"""Size of the cache of first prompts, texts and ids."""


class ChatModel:
    """A model without its weights."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        name: str,
        context_tokens: int,
        stop_ids: Iterable[int],
        tool_format: str = "auto",
        reasoning_format: str = "auto",
    ) -> None:
        """Raises `ConfigError` when the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise ConfigError(
                f"model {name}: the tokenizer has no chat template; add a "
                "chat_template.jinja to its directory, or use an instruction-tuned model"
            )
        self.name = name
        self.context_tokens = context_tokens
        self.stop_ids = frozenset(stop_ids)
        self.vocabulary_tokens = len(tokenizer)
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self.encode_first = EncodingCache(self.encode, max_bytes=FIRST_PROMPT_BYTES)
        """Cached `encode` for first prompts, which are equal for all rollouts of a group."""
        self._longest_token_bytes = longest_token_bytes(self._backend)
        self._added_ids = frozenset(self._backend.get_added_tokens_decoder())
        self.end_texts = tuple(self.piece(token_id) for token_id in self.stop_ids)
        self.chat_template = template = str(tokenizer.chat_template)
        """The template's own text."""
        self.template_variables = variables_of(template)
        objects, texts = (
            ChatTemplate(tokenizer, {}, text_arguments=as_text) for as_text in (False, True)
        )
        self._text_arguments = not objects.rendered(_CALLED, SAMPLE_TOOLS) and bool(
            texts.rendered(_CALLED, SAMPLE_TOOLS)
        )
        written = self._written_call(texts if self._text_arguments else objects)
        self.format: OutputFormat = get_format(
            detect_format(template, written) if tool_format == "auto" else tool_format
        )
        self.reasoning: ReasoningFormat | None = get_reasoning(
            detect_reasoning(template) if reasoning_format == "auto" else reasoning_format
        )
        self._hidden_ids = self._hidden(tokenizer)
        self.template = self._template({})
        """The chat template without variables of a request."""
        self._templates: dict[str, ChatTemplate] = {}

    @classmethod
    def load(
        cls,
        path: str,
        *,
        name: str = "",
        context_tokens: int = 0,
        **formats: str,
    ) -> ChatModel:
        """Reads a model directory; `formats` as in the constructor. Raises `ConfigError` with the
        name of a missing file."""
        directory = Path(path)
        if not path or not (directory / "tokenizer.json").is_file():
            raise ConfigError(f"model_path = {path!r}: the directory has no tokenizer.json")
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
            **formats,
        )

    def template_with(self, kwargs: str) -> ChatTemplate:
        """Returns the chat template with these variables, as `template_kwargs` returns them."""
        if not kwargs:
            return self.template
        if kwargs not in self._templates:
            if len(self._templates) >= KEPT_TEMPLATES:
                # Threads draft large prompts: another one may have dropped it.
                self._templates.pop(next(iter(self._templates)), None)
            self._templates[kwargs] = self._template(json.loads(kwargs))
        return self._templates[kwargs]

    def template_kwargs(self, granted: str, asked: str) -> str:
        """Returns the variables of a session's token and those of a request over them, in one
        spelling. Raises `InvalidArgument` for a variable that the chat template does not have."""
        if not (granted or asked):
            return ""
        return merged_kwargs(self.template_variables, granted, asked)

    def encode(self, text: str, *, special: bool = False) -> bytes:
        """Returns int32 ids; special tokens in the text are recognized. `special` adds those of the
        tokenizer, as before a text without a template."""
        # A batch of one: only the batch call skips the offsets, which saves a quarter of the time.
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        return int32_bytes(encoded.ids)

    def encode_within(
        self, text: str, room: int, *, first: bool = False, special: bool = False
    ) -> tuple[int, bytes]:
        """Returns the number of tokens of a long text and its ids, without ids if more than `room`
        (`services.gateway.model.long_text`). `first`: through the cache of first prompts, without
        `special`."""
        return encode_within(
            self.encode,
            text,
            room,
            longest_token_bytes=self._longest_token_bytes,
            whole=self.encode_first if first else partial(self.encode, special=special),
        )

    def least_tokens(self, text: str) -> int:
        """Returns a lower bound of the tokens of a text without encoding it; 0: none is known."""
        if not self._longest_token_bytes:
            return 0
        return -(-len(text.encode(errors="surrogatepass")) // self._longest_token_bytes)

    def decode(self, ids: bytes | Sequence[int]) -> str:
        """Returns the text of ids, without special tokens except the tags of the output format."""
        numbers = int32_array(ids) if isinstance(ids, bytes) else ids
        shown = [i for i in numbers if i not in self._hidden_ids]
        return cast(str, self._backend.decode(shown, skip_special_tokens=False))

    def text_of(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, with special tokens."""
        return cast(str, self._backend.decode(list(ids), skip_special_tokens=False))

    def reasoning_tokens(self, answer: Message, sampled_ids: bytes) -> int:
        """Returns the number of reasoning tokens of an answer, with the closing tag."""
        if not answer.reasoning:
            return 0
        if self.reasoning is None:
            return len(self.encode(answer.reasoning)) // TOKEN_BYTES
        close = self._backend.encode(self.reasoning.close, add_special_tokens=False).ids
        if len(close) != 1:
            # A closing tag of several tokens has no exact position; the text is encoded instead.
            return len(self.encode(answer.reasoning)) // TOKEN_BYTES
        numbers = list(int32_array(sampled_ids))
        return numbers.index(close[0]) + 1 if close[0] in numbers else len(numbers)

    def added_tokens_in(self, text: str) -> list[str | int]:
        """Splits a text into ids of added tokens, such as tags and special tokens, and the text
        between them."""
        encoded = self._backend.encode(text, add_special_tokens=False)
        pieces: list[str | int] = []
        end = 0
        for token_id, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            if token_id in self._added_ids:
                pieces += [text[end:start], token_id]
                end = stop
        return [piece for piece in (*pieces, text[end:]) if piece != ""]

    def piece(self, token_id: int) -> str:
        """Returns the text of one token, special or not."""
        return cast(str, self._backend.decode([token_id], skip_special_tokens=False))

    def piece_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token, which may be a part of a character: `piece` shows such a
        part as U+FFFD."""
        text = self.piece(token_id)
        if "\ufffd" not in text:
            return text.encode()
        token = cast(str, self._backend.id_to_token(token_id))
        if _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        if all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        return text.encode()

    def starts_inside(self, prompt_ids: bytes, *, opening: str = "") -> bool:
        """Returns True if an answer to this prompt begins with reasoning that no tag opens.

        This depends on the prompt: some templates open the reasoning after a question, but not
        after a tool result. `opening` is the end of the prompt that begins the answer; the parser
        gets it too.
        """
        if self.reasoning is None:
            return False
        tail = len(opening) + _TAIL_TOKENS
        text = self.decode(prompt_ids[-tail * TOKEN_BYTES :])
        return self.reasoning.opened_by(text.removesuffix(opening))

    def _hidden(self, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
        """Returns the special tokens that are no text: all except the tags of the formats."""
        marks = self.format.marks | (self.reasoning.marks if self.reasoning else frozenset())
        kept = {self._backend.token_to_id(mark) for mark in marks}
        return (frozenset(tokenizer.all_special_ids) | self.stop_ids) - kept

    def _template(self, kwargs: Mapping[str, Any]) -> ChatTemplate:
        return ChatTemplate(
            self._tokenizer,
            kwargs,
            text_arguments=self._text_arguments,
            end_texts=self.end_texts,
            reasoning=self.reasoning,
        )

    def _written_call(self, template: ChatTemplate) -> str:
        """Returns a sample call as the template writes it; "" if it writes no calls."""
        before = template.rendered(ASKED, SAMPLE_TOOLS, generation_prompt=True)
        after = template.rendered(_CALLED, SAMPLE_TOOLS)
        if not before or not after:
            return ""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
        written = after[sum(1 for _ in same) :]
        ends = [at for end in self.end_texts if end and (at := written.rfind(end)) >= 0]
        return written[: max(ends)] if ends else written


class TextStream:
    """Decodes a stream of ids; never splits a character over two pieces."""

    CONTEXT_TOKENS = 4
    """Ids decoded again with the new ones, because some tokenizers space words by context; as many
    for each held character, which has at most four bytes."""
    KEPT_TOKENS = 32
    """Context length above which the context is cut."""
    MAX_HELD = 3
    """Incomplete characters at the end, as U+FFFD: one, or one for each of its bytes."""

    def __init__(self, model: ChatModel, *, special: bool = False) -> None:
        """`special`: with special tokens, as `ChatModel.text_of`; else as `ChatModel.decode`."""
        self._decode = model.text_of if special else model.decode
        self._context: list[int] = []
        self._shown = 0
        """Characters of the context that were returned."""

    def feed(self, ids: Sequence[int]) -> str:
        """Returns the text that later ids cannot change."""
        if not ids:
            return ""
        self._context += ids
        text = self._decode(self._context)[self._shown :]
        held = min(len(text) - len(text.rstrip("\ufffd")), self.MAX_HELD)
        text = text[: len(text) - held]
        self._shown += len(text)
        if len(self._context) > self.KEPT_TOKENS:
            self._context = self._context[-self.CONTEXT_TOKENS * (1 + held) :]
            self._shown = max(0, len(self._decode(self._context)) - held)
        return text

    def finish(self) -> str:
        """Returns the text that was held back."""
        text = self._decode(self._context)[self._shown :]
        self._shown += len(text)
        return text


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}


def _byte_alphabet() -> dict[str, int]:
    """Returns the bytes of the characters of byte-level tokens (GPT-2): printable ones stand for
    themselves, the others for those from 256 on, in order."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in own]
    shown = {chr(byte): byte for byte in own}
    return shown | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_alphabet()
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
"""A byte in a vocabulary of texts, for characters that it lacks."""
_CALLED = (*ASKED, Message(role="assistant", tool_calls=(SAMPLE_CALL,)))
_TAIL_TOKENS = 16
"""Tokens at the end of a prompt that show whether its template opened the reasoning."""
