"""One session's contexts: from messages to exact prompt ids, from an answer to a recorded turn.

Owns the tree of message boundaries and the token sequences of one trajectory, and the decision
whether a request continues, repeats or branches. Pure but for the tokenizer: no I/O, no clock.

A prompt is made in one of four ways:

- continued: the last answer in the matched history keeps its sampled ids; only what the template
  writes behind it is encoded;
- repeated: the same messages were prompted before (`n` > 1, a retry): the same ids;
- branched: the template rewrites history (see `forge.core.conversation.continuation`), or the agent
  did: everything is rendered and encoded;
- first: no answer is in the history yet.

However it was made, a turn is stored behind the longest prefix it shares with any other turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from forge.core.conversation.context_tree import ContextTree, Node, Root, common_depth, root_of
from forge.core.conversation.continuation import STUB, Render, TemplateRefused, continuation
from forge.core.conversation.messages import Message, from_openai, to_openai
from forge.core.conversation.request_prefix import History, Mark
from forge.core.conversation.token_prefixes import NOTHING_SHARED, SharedPrefix, TokenPrefixes
from forge.core.errors import InvalidArgument
from forge.core.token_columns import TOKEN_BYTES, int32_array
from forge.core.trajectory import NO_PARENT
from forge.v1 import common_pb2
from services.gateway.conversation.handles import Handle, Held, Recalled
from services.gateway.conversation.prefix_match import MARKS_KEPT, Marked, Reading, begin
from services.gateway.model.chat_model import ChatModel, Tools

SESSION_BYTES = 8192
"""Of a session without turns, its actor included."""
TURN_BYTES = 1024
"""Of a turn without its text and tokens."""
MAX_ANSWERS_TRIED = 3
"""Answers from the end of the history that a context may continue, before it branches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in the tree of contexts a prompt ends."""

    root: Root
    node: Node
    """The deepest known boundary."""
    beyond: tuple[Message, ...]
    """Messages of the request behind it."""
    mark: Mark | None = None
    """Recognizes the request, where its protocol lets it be."""

    @property
    def unknown_answers(self) -> bool:
        """Whether somebody answered in this session whom its tree does not know."""
        return any(message.role == "assistant" for message in self.beyond)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A prompt before its new text is encoded."""

    how: str
    """continued, repeated, branched, first or given."""
    ids: bytes
    """Ids known already."""
    text: str = ""
    """Text to encode behind them."""
    place: Place | None = None
    """None for prompts given as ids."""
    opening: str = ""
    """The end of the text that was put into the model's mouth."""
    known: SharedPrefix = NOTHING_SHARED
    """Where `ids` are from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What to sample from, and all that is needed to record the turn."""

    ids: bytes
    draft: Draft

    @property
    def tokens(self) -> int:
        return len(self.ids) // TOKEN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledAnswer:
    """What one call got out of the model."""

    ids: bytes
    logprobs: bytes
    weight_versions: bytes
    allowed_logprobs: bytes = b""
    """As in `SampledTokens`: empty without a grammar or a cut."""
    finish_reason: common_pb2.FinishReason.ValueType
    answer: Message | None
    """Parsed; None when ids were asked for."""
    parse_error: str = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0

    @property
    def tokens(self) -> int:
        return len(self.ids) // TOKEN_BYTES


@dataclass(slots=True, kw_only=True)
class Conversation:
    """All that a session remembers of its turns."""

    model: ChatModel
    tree: ContextTree = field(default_factory=ContextTree)
    prefixes: TokenPrefixes = field(default_factory=TokenPrefixes)
    nodes: list[Node | None] = field(default_factory=list)
    """The node of each turn's answer; None for turns over ids."""
    marks: list[Marked] = field(default_factory=list)
    """The last requests, the latest last."""
    sampled_tokens: int = 0
    size_bytes: int = SESSION_BYTES
    """About what it takes in memory."""
    parse_errors: dict[int, str] = field(default_factory=dict)
    """By turn."""
    held: dict[str, Held] = field(default_factory=dict)
    """Turns that were given a name, by that name."""

    @property
    def turns(self) -> int:
        return len(self.nodes)

    def draft(self, messages: Sequence[Message], tools: Tools, *, opening: str = "") -> Draft:
        """Finds where `messages` stand in the tree and what has to be encoded for them.

        Raises `InvalidArgument` when the chat template does not take them.
        """
        try:
            root = self.tree.root(canonical_tools(tools))
        except RecursionError:
            raise InvalidArgument("the tools are nested too deeply") from None
        # A request that may agree with several paths has to be read from the start.
        start, new = begin(messages, root, () if self.tree.twins else self.marks)
        if not new and start is root:
            raise InvalidArgument("messages must not be empty")
        node = self.tree.match(start, new)
        reading = Reading(messages=messages, start=start, new=new, node=node)
        mark = messages.mark() if isinstance(messages, History) else None
        place = Place(root=root, node=node, beyond=reading.beyond, mark=mark)
        if not place.beyond and node.prompted != NO_PARENT and not opening:
            known = self.prefixes.whole_prompt(node.prompted)
            ids = self.prefixes.prompt(node.prompted)
            return Draft(how="repeated", ids=ids, place=place, known=known)
        try:
            return self._rendered(reading, place, self.model.renderer(tools), opening)
        except TemplateRefused as error:
            raise InvalidArgument(
                f"the model's chat template refuses the messages: {error}"
            ) from error

    def _rendered(self, reading: Reading, place: Place, render: Render, opening: str) -> Draft:
        for answer in islice(reading.answers(), MAX_ANSWERS_TRIED):
            text = self._behind(render, reading, answer)
            if text is not None:
                ids, text = self._without_end(answer.turn, text)
                return Draft(
                    how="continued",
                    ids=ids,
                    text=text + opening,
                    place=place,
                    opening=opening,
                    known=self.prefixes.whole(answer.turn),
                )
        text = render(reading.history(), True)
        how = "branched" if self.turns else "first"
        return Draft(how=how, ids=b"", text=text + opening, place=place, opening=opening)

    def record(
        self,
        prompt: Prompt,
        sampled: SampledAnswer,
        handle: Handle | None = None,
    ) -> common_pb2.Turn:
        """Adds a turn to the tree and gives the record of it, as far as it is known here."""
        draft = prompt.draft
        place, known = draft.place, draft.known
        if place is not None and not self.tree.has(place.root):
            # Drafted before the session was read back from the pool.
            place, known = self._adopt(place), NOTHING_SHARED
        shared = self.prefixes.longest(prompt.ids, known=known)
        tail = prompt.ids[shared.tokens * TOKEN_BYTES :]
        turn = self._append(shared, tail, sampled.ids, sampled.parse_error)
        node = None
        if place is not None and sampled.answer is not None:
            behind = self.tree.extend(place.node, place.beyond)
            self._remember(place, behind)
            node = self.tree.answer(behind, sampled.answer, turn=turn, opening=draft.opening)
        self.nodes.append(node)
        record = common_pb2.Turn(
            turn_index=turn,
            parent_turn=shared.turn,
            prefix_tokens=shared.tokens,
            prompt_ids=tail,
            sampled=common_pb2.SampledTokens(
                ids=sampled.ids,
                logprobs=sampled.logprobs,
                weight_versions=sampled.weight_versions,
                allowed_logprobs=sampled.allowed_logprobs,
            ),
            finish_reason=sampled.finish_reason,
            timings=common_pb2.TurnTimings(
                queue_s=sampled.queue_s, prefill_s=sampled.prefill_s, decode_s=sampled.decode_s
            ),
            cached_tokens=sampled.cached_tokens,
            messages_json=self._messages_json(shared, node, handle),
            parse_error=sampled.parse_error,
        )
        if handle is not None and node is not None:
            self._hold(record, handle.name, handle.facts)
        self.size_bytes += TURN_BYTES + record.ByteSize()
        return record

    def restore(self, turn: common_pb2.Turn) -> None:
        """Takes back a turn that `record` gave; turns come in order."""
        shared = SharedPrefix(turn=turn.parent_turn, tokens=turn.prefix_tokens)
        index = self._append(shared, turn.prompt_ids, turn.sampled.ids, turn.parse_error)
        node = None
        if turn.messages_json:
            said = json.loads(turn.messages_json)
            behind = self.tree.extend(
                self._boundary(shared, said), [from_openai(plain) for plain in said["messages"]]
            )
            node = self.tree.answer(
                behind, from_openai(said["answer"]), turn=index, opening=said.get("opening", "")
            )
            for name, facts in said.get("handle", {}).items():
                self._hold(turn, name, facts)
        self.nodes.append(node)
        self.size_bytes += TURN_BYTES + turn.ByteSize()

    def recall(self, name: str) -> Recalled | None:
        """The turn of this name; None if none of this session has it."""
        held = self.held.get(name)
        node = self.nodes[held.turn_index] if held is not None else None
        if held is None or node is None:
            return None
        return Recalled(
            held=held,
            node=node,
            tools=json.loads(root_of(node).tools_json),
            prompt_tokens=self.prefixes.whole_prompt(held.turn_index).tokens,
            sampled_ids=self.prefixes.sampled(held.turn_index),
        )

    def _hold(self, turn: common_pb2.Turn, name: str, facts: Mapping[str, Any]) -> None:
        self.held[name] = Held(
            turn_index=turn.turn_index,
            facts=facts,
            finish_reason=turn.finish_reason,
            cached_tokens=turn.cached_tokens,
        )

    def _append(
        self, shared: SharedPrefix, prompt_tail: bytes, sampled_ids: bytes, parse_error: str
    ) -> int:
        turn = self.prefixes.append(shared, prompt_tail, sampled_ids)
        self.sampled_tokens += len(sampled_ids) // TOKEN_BYTES
        if parse_error:
            self.parse_errors[turn] = parse_error
        return turn

    def _adopt(self, place: Place) -> Place:
        """The same place in this conversation's tree."""
        root = self.tree.root(place.root.tools_json)
        return Place(root=root, node=root, beyond=(*place.node.messages(), *place.beyond))

    def _remember(self, place: Place, behind: Node) -> None:
        if place.mark is None or any(known.mark == place.mark for known in self.marks):
            return
        marked = Marked(mark=place.mark, root=place.root, node=behind)
        self.marks = [*self.marks[1 - MARKS_KEPT :], marked]

    def _behind(self, render: Render, reading: Reading, answer: Node) -> str | None:
        """The text behind a sampled answer of the history, or None if it calls for a branch."""
        assert answer.message is not None, "an answer is a message"
        said, after = answer.message, reading.history(answer.depth)
        sampled = answer.opening + self.model.decode(self.prefixes.sampled(answer.turn))
        ends = self.model.end_texts
        if self.model.looks_back_one_answer:
            try:
                return continuation(
                    self.model.stub_render, STUB, said, sampled, after, end_texts=ends
                )
            except TemplateRefused:
                # The template may miss in the stub what the whole history has.
                pass
        before = reading.history()[: answer.depth - 1]
        return continuation(render, before, said, sampled, after, end_texts=ends)

    def _without_end(self, turn: int, text: str) -> tuple[bytes, str]:
        """Ids of a turn and the text behind it, with the end-of-turn token in one of them only."""
        ids = self.prefixes.sequence(turn)
        sampled = self.prefixes.sampled(turn)
        if sampled and int32_array(sampled[-TOKEN_BYTES:])[0] in self.model.stop_ids:
            for end in self.model.end_texts:
                if text.startswith(end):
                    return ids, text[len(end) :]
        return ids, text

    def _messages_json(
        self,
        shared: SharedPrefix,
        node: Node | None,
        handle: Handle | None,
    ) -> str:
        """What this turn's path has that its parent's has not; "" for turns over ids."""
        if node is None or node.message is None:
            return ""
        parent = self.nodes[shared.turn] if shared.turn != NO_PARENT else None
        depth = common_depth(parent, node) if parent else 0
        said: dict[str, Any] = {"shared": depth}
        if parent is None or (not depth and root_of(parent) is not root_of(node)):
            said["tools"] = json.loads(root_of(node).tools_json)
        new = list(islice(node.ancestors(), 1, node.depth - depth))
        said["messages"] = [to_openai(entry.message) for entry in reversed(new) if entry.message]
        said["answer"] = to_openai(node.message)
        if node.opening:
            said["opening"] = node.opening
        if handle is not None:
            said["handle"] = {handle.name: handle.facts}
        return msgspec.json.encode(said).decode()

    def _boundary(self, shared: SharedPrefix, said: Mapping[str, Any]) -> Node:
        """The node that `messages` of a recorded turn stand behind."""
        parent = self.nodes[shared.turn] if shared.turn != NO_PARENT else None
        if "tools" in said or parent is None:
            return self.tree.root(canonical_tools(said.get("tools", [])))
        depth = said["shared"]
        return next((node for node in parent.ancestors() if node.depth == depth), root_of(parent))


def given(ids: bytes) -> Draft:
    """A prompt that the agent rendered for itself."""
    return Draft(how="given", ids=ids)


def canonical_tools(tools: Tools) -> str:
    """One spelling for equal tool definitions."""
    return json.dumps(list(tools), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
