"""One session's contexts: from messages to exact prompt ids, from an answer to a recorded turn.

Owns the tree of message boundaries and the token sequences of one trajectory, and the decision
whether a request continues, repeats or branches. Pure but for the tokenizer: no I/O, no clock.

A prompt is made in one of four ways:

- continued: the last answer in the matched history keeps its sampled ids; only what the template
  writes behind it is encoded;
- repeated: the same messages were prompted before (`n` > 1, a retry): the same ids;
- branched: the template rewrites history (see `forge.core.continuation`), or the agent did:
  everything is rendered and encoded;
- first: no answer is in the history yet.

However it was made, a turn is stored behind the longest prefix it shares with any other turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.core.context_tree import ContextTree, Node, common_depth
from forge.core.continuation import STUB, Render, TemplateRefused, continuation
from forge.core.errors import InvalidArgument
from forge.core.messages import Message, from_openai, to_openai
from forge.core.token_prefixes import SharedPrefix, TokenPrefixes
from forge.core.trajectory import NO_PARENT, TOKEN_BYTES, int32_array
from forge.v1 import common_pb2
from services.gateway.handles import Handle, Held, Recalled
from services.gateway.model import ChatModel, Tools

MAX_ANSWERS_TRIED = 3
"""Answers from the end of the history that a context may continue, before it branches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in the tree of contexts a prompt ends."""

    node: Node
    """The deepest known boundary."""
    beyond: tuple[Message, ...]
    """Messages of the request behind it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What to sample from, and all that is needed to record the turn."""

    ids: bytes
    draft: Draft

    @property
    def tokens(self) -> int:
        return len(self.ids) // TOKEN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What one call got out of the model."""

    ids: bytes
    logprobs: bytes
    weight_versions: bytes
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
    tools_of: dict[Node, str] = field(default_factory=dict)
    """Tools of each root, as JSON."""
    sampled_tokens: int = 0
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
        if not messages:
            raise InvalidArgument("messages must not be empty")
        try:
            root = self._root(canonical_tools(tools))
        except RecursionError:
            raise InvalidArgument("the tools are nested too deeply") from None
        node = self.tree.match(root, messages)
        place = Place(node=node, beyond=tuple(messages[node.depth :]))
        if not place.beyond and node.prompted != NO_PARENT and not opening:
            return Draft(how="repeated", ids=self.prefixes.prompt(node.prompted), place=place)
        known = node.path()
        # What the model said stands as it said it, whatever the agent left of it.
        history = [
            entry.message if entry.turn != NO_PARENT and entry.message else message
            for entry, message in zip(known, messages, strict=False)
        ] + list(place.beyond)
        answers = [entry for entry in reversed(known) if entry.turn != NO_PARENT]
        render = self.model.renderer(tools)
        try:
            for answer in answers[:MAX_ANSWERS_TRIED]:
                text = self._behind(render, history, answer)
                if text is not None:
                    ids, text = self._without_end(answer.turn, text)
                    return Draft(
                        how="continued", ids=ids, text=text + opening, place=place, opening=opening
                    )
            text = render(history, True)
        except TemplateRefused as error:
            raise InvalidArgument(
                f"the model's chat template refuses the messages: {error}"
            ) from error
        how = "branched" if self.turns else "first"
        return Draft(how=how, ids=b"", text=text + opening, place=place, opening=opening)

    def record(
        self, prompt: Prompt, sampled: Sampled, handle: Handle | None = None
    ) -> common_pb2.Turn:
        """Adds a turn to the tree and gives the record of it, as far as it is known here."""
        shared = self.prefixes.longest(prompt.ids)
        tail = prompt.ids[shared.tokens * TOKEN_BYTES :]
        turn = self._append(shared, tail, sampled.ids, sampled.parse_error)
        draft = prompt.draft
        node = None
        if draft.place is not None and sampled.answer is not None:
            behind = self.tree.extend(draft.place.node, draft.place.beyond)
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

    def recall(self, name: str) -> Recalled | None:
        """The turn of this name; None if none of this session has it."""
        held = self.held.get(name)
        node = self.nodes[held.turn_index] if held is not None else None
        if held is None or node is None:
            return None
        return Recalled(
            held=held,
            messages=[entry.message for entry in node.path() if entry.message is not None],
            tools=json.loads(self.tools_of[_root_of(node)]),
            prompt_tokens=len(self.prefixes.prompt(held.turn_index)) // TOKEN_BYTES,
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

    def _behind(self, render: Render, history: Sequence[Message], answer: Node) -> str | None:
        """The text behind a sampled answer of the history, or None if it calls for a branch."""
        before, said, after = (
            history[: answer.depth - 1],
            history[answer.depth - 1],
            history[answer.depth :],
        )
        sampled = answer.opening + self.model.decode(self.prefixes.sampled(answer.turn))
        ends = self.model.end_texts
        if self.model.looks_back_one_answer:
            try:
                stub_render = self.model.renderer(None)
                return continuation(stub_render, STUB, said, sampled, after, end_texts=ends)
            except TemplateRefused:
                # The template may miss in the stub what the whole history has.
                pass
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

    def _root(self, tools_json: str) -> Node:
        root = self.tree.root(tools_json)
        self.tools_of.setdefault(root, tools_json)
        return root

    def _messages_json(self, shared: SharedPrefix, node: Node | None, handle: Handle | None) -> str:
        """What this turn's path has that its parent's has not; "" for turns over ids."""
        if node is None or node.message is None:
            return ""
        parent = self.nodes[shared.turn] if shared.turn != NO_PARENT else None
        depth = common_depth(parent, node) if parent else 0
        path = node.path()
        said: dict[str, Any] = {"shared": depth}
        if not parent or _root_of(parent) is not _root_of(node):
            said["tools"] = json.loads(self.tools_of[_root_of(node)])
        said["messages"] = [to_openai(entry.message) for entry in path[depth:-1] if entry.message]
        said["answer"] = to_openai(node.message)
        if node.opening:
            said["opening"] = node.opening
        if handle is not None:
            said["handle"] = {handle.name: handle.facts}
        return json.dumps(said, ensure_ascii=False)

    def _boundary(self, shared: SharedPrefix, said: Mapping[str, Any]) -> Node:
        """The node that `messages` of a recorded turn stand behind."""
        parent = self.nodes[shared.turn] if shared.turn != NO_PARENT else None
        if "tools" in said or parent is None:
            return self._root(canonical_tools(said.get("tools", [])))
        depth = said["shared"]
        return next((node for node in parent.ancestors() if node.depth == depth), _root_of(parent))


def given(ids: bytes) -> Draft:
    """A prompt that the agent rendered for itself."""
    return Draft(how="given", ids=ids)


def canonical_tools(tools: Tools) -> str:
    """One spelling for equal tool definitions."""
    return json.dumps(list(tools), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _root_of(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node
