"""A gateway's conversation with the engine it samples from and the trainer that reads it back.

Owns what the tests of exact tokens share: a `Session` remembers what the engine was truly sent
and what it sampled, so that the record can be held against it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.core.conversation.messages import Message, from_openai, to_openai
from forge.core.conversation.request_prefix import History
from forge.core.formats import Parser
from forge.core.token_columns import float32_bytes, int32_array, int32_bytes
from forge.v1 import common_pb2
from services.gateway.conversation.conversation import Conversation
from services.gateway.conversation.prompt import Prompt, PromptDraft, SampledAnswer, given
from services.gateway.turns.answer_parser import AnswerParser
from tests.support.gateway.chat_templates import make_model, make_tokenizer
from tests.support.pool.records import recorded_tree

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]
PIECE_BYTES = 12
"""Three tokens: as many as a speculative decoder gives at once."""
LINEAR = ["chatml", "tiny", "smollm2", "llama3", "numbered", "deepseek"]
"""Families whose template never rewrites history, without reasoning."""


def user(text: str) -> Message:
    return Message(role="user", content=text)


def result(text: str, call_id: str = "call00000") -> Message:
    return Message(role="tool", content=text, tool_call_id=call_id)


def as_sent(messages: Sequence[Message]) -> History:
    """Messages as they come over HTTP, where what was sent before is known by its bytes."""

    def read(raw: bytes, first: int) -> list[Message]:
        return [from_openai(plain) for plain in json.loads(raw)]

    return History(json.dumps([to_openai(message) for message in messages]).encode(), read)


@dataclass
class Session:
    """A conversation together with the engine it talks to."""

    family: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    """Prompt of each turn, as the engine got it."""
    sampled: list[bytes] = field(default_factory=list)
    turns: list[common_pb2.Turn] = field(default_factory=list)
    how: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = make_model(self.family)
        self.conversation = Conversation(model=self.model)

    def prompt(
        self, messages: Sequence[Message], opening: str = "", template_kwargs: str = ""
    ) -> Prompt:
        draft = self.conversation.draft(
            messages, self.tools, opening=opening, template_kwargs=template_kwargs
        )
        return self.whole(draft)

    def whole(self, draft: PromptDraft) -> Prompt:
        """The prompt of a draft, its text encoded."""
        return Prompt(ids=draft.ids + self.model.encode(draft.text), draft=draft)

    def turn(
        self,
        messages: Sequence[Message],
        text: str,
        *,
        ended: bool = True,
        by_character: bool = False,
        opening: str = "",
        template_kwargs: str = "",
    ) -> Message:
        """One call: the engine says `text`, spelt canonically or one character at a time."""
        prompt = self.prompt(messages, opening, template_kwargs)
        ids = self.spelt(text, by_character=by_character)
        if ended:
            ids += int32_bytes([self.end_id(text)])
        answer = self.parse(prompt, opening, ids)
        self.record(prompt, ids, answer)
        return answer

    def end_id(self, text: str) -> int:
        """The token that ends an answer; gpt-oss ends calls with another."""
        calls = self.family == "harmony" and " to=functions." in text.split("<|message|>")[-2:][0]
        if calls:
            return int(make_tokenizer(self.family).convert_tokens_to_ids("<|call|>"))
        return min(self.model.stop_ids)

    def generate(self, prompt_ids: bytes, sampled_ids: bytes) -> None:
        """One call of an agent that renders for itself."""
        self.record(Prompt(ids=prompt_ids, draft=given(prompt_ids)), sampled_ids, None)

    def spelt(self, text: str, *, by_character: bool) -> bytes:
        """Ids of a text; a policy may well sample others than the tokenizer would give."""
        pieces = list(text) if by_character else [text]
        return b"".join(self.model.encode(piece) for piece in pieces)

    def record(self, prompt: Prompt, ids: bytes, answer: Message | None) -> None:
        turn = self.conversation.record(prompt, self.sample(ids, answer))
        self.sent.append(prompt.ids)
        self.sampled.append(ids)
        self.turns.append(turn)
        self.how.append(prompt.draft.how)

    def sample(self, ids: bytes, answer: Message | None) -> SampledAnswer:
        """What the engine says of these ids: no log-prob and no version twice in a session."""
        first = sum(len(sampled) // 4 for sampled in self.sampled)
        numbers = range(first, first + len(ids) // 4)
        return SampledAnswer(
            columns=common_pb2.SampledTokens(
                ids=ids,
                logprobs=float32_bytes(-0.5 * number for number in numbers),
                weight_versions=int32_bytes(numbers),
            ),
            finish_reason=common_pb2.FINISH_REASON_STOP,
            answer=answer,
        )

    def parse(self, prompt: Prompt, opening: str, ids: bytes) -> Message:
        """The answer as a turn parses it."""

        def new_parser() -> Parser:
            parser: Parser = self.model.format.parser(self.tools)
            if self.model.reasoning is None:
                return parser
            inside = self.model.starts_inside(prompt.ids, opening=opening)
            return self.model.reasoning.parser(parser, inside=inside)

        numbers = itertools.count(100 * len(self.turns))
        answer = AnswerParser(
            self.model, new_parser, new_call_id=lambda: f"call{next(numbers):05}", opening=opening
        )
        for at in range(0, len(ids), PIECE_BYTES):
            piece = ids[at : at + PIECE_BYTES]
            answer.feed(common_pb2.SampledTokens(ids=piece, logprobs=piece, weight_versions=piece))
        answer.finish()
        return answer.message()

    def restored(self) -> Conversation:
        """The conversation as another gateway reads it back from the pool."""
        conversation = Conversation(model=self.model)
        for turn in self.turns:
            conversation.restore(common_pb2.Turn.FromString(turn.SerializeToString()))
        return conversation

    def text(self, ids: bytes) -> str:
        """Text with special tokens."""
        return str(make_tokenizer(self.family).decode(list(int32_array(ids))))

    def template(self, messages: Sequence[Message]) -> str:
        """The template's own rendering."""
        return self.model.template.renderer(self.tools)(messages, True)

    def check_record(self) -> None:
        """What a trainer composes of the turns is what the engine was sent and sampled, with the
        log-prob and version of each token."""
        tree = recorded_tree(self.turns)
        first = 0
        for at, (sent, sampled) in enumerate(zip(self.sent, self.sampled, strict=True)):
            assert tree.context(at) == sent
            assert tree.sequence(at) == sent + sampled
            numbers = range(first, first := first + len(sampled) // 4)
            assert tree.turns[at].weight_versions == int32_bytes(numbers)
            assert tree.turns[at].logprobs == float32_bytes(-0.5 * number for number in numbers)
