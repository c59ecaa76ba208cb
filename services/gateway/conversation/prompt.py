"""A prompt with its place in the context tree, and the sampled answer to it.

Owns the values that a `Conversation` returns and takes; it decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.core.conversation.context_tree import Node, Root
from forge.core.conversation.messages import Message
from forge.core.conversation.request_prefix import Mark
from forge.core.conversation.token_prefixes import NOTHING_SHARED, SharedPrefix
from forge.core.token_columns import TOKEN_BYTES
from forge.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The end of a prompt in the context tree."""

    root: Root
    node: Node
    """The deepest node of the request's prefix."""
    beyond: tuple[Message, ...]
    """Messages of the request after `node`."""
    mark: Mark | None = None
    """Recognizes later requests with this prefix; None if the protocol has no marks."""

    @property
    def unknown_answers(self) -> bool:
        """True if the request has answers that the context tree lacks."""
        return any(message.role == "assistant" for message in self.beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDraft:
    """A prompt before its new text is encoded."""

    how: str
    """Source: continued, repeated, branched, first, given or rebased."""
    ids: bytes
    """The ids before `text`."""
    text: str = ""
    """Text to encode after `ids`."""
    place: Place | None = None
    """None for prompts given as ids."""
    opening: str = ""
    """The end of `text` that begins the answer, for example a required call."""
    shared: SharedPrefix = NOTHING_SHARED
    """The earlier turn that has `ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt ids, with the draft for the record of the turn."""

    ids: bytes
    draft: PromptDraft

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids) // TOKEN_BYTES

    @property
    def new_images(self) -> int:
        """Number of images in the messages that the context tree lacks."""
        place = self.draft.place
        return sum(len(message.images) for message in place.beyond) if place is not None else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """The answer of one call as the router sampled it."""

    columns: common_pb2.SampledTokens
    """Without the likeliest tokens."""
    finish_reason: common_pb2.FinishReason.ValueType
    answer: Message | None
    """Parsed answer; None for a request over token ids."""
    routed_experts: common_pb2.RoutedExperts | None = None
    """Experts of tokens of prompt and answer; None if they were not recorded."""
    parse_error: str = ""
    timings: common_pb2.TurnTimings = field(default_factory=common_pb2.TurnTimings)
    cached_tokens: int = 0
    engine: str = ""
    """As SampleResponse.engine."""

    @property
    def ids(self) -> bytes:
        """The int32 ids of the answer."""
        return self.columns.ids

    @property
    def tokens(self) -> int:
        """Length of the answer."""
        return len(self.ids) // TOKEN_BYTES


def given(ids: bytes) -> PromptDraft:
    """Returns the draft of a prompt that the agent rendered."""
    return PromptDraft(how="given", ids=ids)
