"""Contexts of one session: exact prompt ids from messages, recorded turns from answers.

Owns the context tree and the token sequences of one trajectory, and the decision whether a request
continues, repeats or branches. Calls the tokenizer; has no I/O and no clock.

A prompt has one of four sources:

- continued: the last answer in the matched history keeps its sampled ids; only the template's text
  after it is encoded;
- repeated: the same messages were prompted before (`n` > 1, a retry) and keep their ids;
- branched: the template (see `forge.core.conversation.continuation`) or the agent changed the
  history, so all of it is rendered and encoded;
- first: the history has no answer yet.

From any source, a turn is stored after the longest prefix that it shares with another turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from sys import maxsize
from typing import Any

import msgspec

from forge.core.conversation.context_tree import ContextTree, Node, common_depth, root_of
from forge.core.conversation.continuation import STUB, Render, TemplateRefused, continuation
from forge.core.conversation.messages import Message, from_openai, to_openai
from forge.core.conversation.request_prefix import History
from forge.core.conversation.token_prefixes import NOTHING_SHARED, SharedPrefix, TokenPrefixes
from forge.core.errors import ContextTooLong, InvalidArgument
from forge.core.tasks.template_kwargs import kwargs_json
from forge.core.token_columns import TOKEN_BYTES, int32_array
from forge.core.trajectory import NO_PARENT
from forge.v1 import common_pb2
from services.gateway.conversation.handles import Handle, NamedTurn, Recalled
from services.gateway.conversation.prefix_match import (
    MARKS_KEPT,
    Marked,
    PrefixMatch,
    recognized_prefix,
)
from services.gateway.conversation.prompt import Place, Prompt, PromptDraft, SampledAnswer
from services.gateway.conversation.recorded_experts import record_experts
from services.gateway.errors import InvalidField
from services.gateway.model.chat_model import ChatModel, Tools
from services.gateway.model.chat_template import ChatTemplate

SESSION_BYTES = 8192
"""Memory of a session without turns, with its actor."""
TURN_BYTES = 1024
"""Memory of a turn without its text and tokens."""
MAX_ANSWERS_TRIED = 3
"""Number of latest answers that are tried for a continuation before a branch."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The contexts and turns of one session."""

    model: ChatModel
    tree: ContextTree = field(default_factory=ContextTree)
    prefixes: TokenPrefixes = field(default_factory=TokenPrefixes)
    nodes: list[Node | None] = field(default_factory=list)
    """The answer's node per turn; None for turns over token ids."""
    marks: list[Marked] = field(default_factory=list)
    """Marks of the latest requests, oldest first."""
    size_bytes: int = SESSION_BYTES
    """Approximate memory."""
    parse_errors: dict[int, str] = field(default_factory=dict)
    """Parse errors by turn index."""
    named_turns: dict[str, NamedTurn] = field(default_factory=dict)
    """Turns with a handle, by its name."""

    @property
    def turns(self) -> int:
        """Number of recorded turns."""
        return len(self.nodes)

    def draft(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        opening: str = "",
        template_kwargs: str = "",
        most: int = maxsize,
    ) -> PromptDraft:
        """Matches `messages` to the context tree and finds the text that must be encoded.

        Contexts with other tools or other template variables share no node. Raises
        `InvalidArgument` if the chat template refuses the messages, `ContextTooLong` for more than
        `most` new messages or tools.
        """
        _require_few(tools, most)
        try:
            root = self.tree.root_of_tools(tools, template_kwargs)
        except RecursionError:
            raise InvalidField("tools: the schemas are nested too deeply", param="tools") from None
        # With twins, a request may agree with several paths and must be matched from the root.
        start, new = recognized_prefix(messages, root, () if self.tree.twins else self.marks)
        _require_few(new, most)
        if not new and start is root:
            raise InvalidField("messages must not be empty", param="messages")
        node = self.tree.match(start, new)
        match = PrefixMatch(messages=messages, start=start, new=new, node=node)
        mark = messages.mark() if isinstance(messages, History) else None
        place = Place(root=root, node=node, beyond=match.beyond, mark=mark)
        if not place.beyond and node.prompted != NO_PARENT and not opening:
            shared = self.prefixes.whole_prompt(node.prompted)
            ids = self.prefixes.prompt(node.prompted)
            return PromptDraft(how="repeated", ids=ids, place=place, shared=shared)
        try:
            return self._rendered(match, place, tools, opening)
        except TemplateRefused as error:
            raise InvalidArgument(
                f"the model's chat template refuses the messages: {error}"
            ) from error

    def _rendered(
        self, match: PrefixMatch, place: Place, tools: Tools, opening: str
    ) -> PromptDraft:
        template = self.model.template_with(place.root.template_kwargs)
        render = template.renderer(tools)
        for answer in islice(match.answers(), MAX_ANSWERS_TRIED):
            text = self._text_after(template, render, match, answer)
            if text is not None:
                ids, text = self._without_end(answer.turn, text)
                return PromptDraft(
                    how="continued",
                    ids=ids,
                    text=text + opening,
                    place=place,
                    opening=opening,
                    shared=self.prefixes.whole(answer.turn),
                )
        text = render(match.history(), True)
        how = "branched" if self.turns else "first"
        return PromptDraft(how=how, ids=b"", text=text + opening, place=place, opening=opening)

    def record(
        self,
        prompt: Prompt,
        sampled: SampledAnswer,
        handle: Handle | None = None,
    ) -> common_pb2.Turn:
        """Adds a turn to the context tree; returns its record without the session's fields."""
        draft = prompt.draft
        place, shared = draft.place, draft.shared
        if place is not None and not self.tree.has(place.root):
            # The draft is older than the latest rebuild from the pool.
            place, shared = self._adopt(place), NOTHING_SHARED
        shared = self.prefixes.longest(prompt.ids, known=shared)
        tail = prompt.ids[shared.tokens * TOKEN_BYTES :]
        turn = self._append(shared, tail, sampled.ids, sampled.parse_error)
        node = None
        if place is not None and sampled.answer is not None:
            after = self.tree.extend(place.node, place.beyond)
            self._store_mark(place, after)
            node = self.tree.answer(after, sampled.answer, turn=turn, opening=draft.opening)
        self.nodes.append(node)
        record = common_pb2.Turn(
            turn_index=turn,
            parent_turn=shared.turn,
            prefix_tokens=shared.tokens,
            prompt_ids=tail,
            sampled=sampled.columns,
            finish_reason=sampled.finish_reason,
            timings=sampled.timings,
            cached_tokens=sampled.cached_tokens,
            engine=sampled.engine,
            messages_json=self._messages_json(shared, node, handle),
            parse_error=sampled.parse_error,
        )
        if handle is not None and node is not None:
            self._store_name(record, handle.name, handle.facts)
        self.size_bytes += TURN_BYTES + record.ByteSize()
        if sampled.routed_experts is not None:
            # The session keeps none of them.
            record_experts(record, sampled.routed_experts, length=prompt.tokens + sampled.tokens)
        return record

    def restore(self, turn: common_pb2.Turn) -> None:
        """Adds a turn that `record` returned earlier; turns come in order."""
        shared = SharedPrefix(turn=turn.parent_turn, tokens=turn.prefix_tokens)
        index = self._append(shared, turn.prompt_ids, turn.sampled.ids, turn.parse_error)
        node = None
        if turn.messages_json:
            context = json.loads(turn.messages_json)
            after = self.tree.extend(
                self._node_before(shared, context),
                [from_openai(plain) for plain in context["messages"]],
            )
            node = self.tree.answer(
                after,
                from_openai(context["answer"]),
                turn=index,
                opening=context.get("opening", ""),
            )
            for name, facts in context.get("handle", {}).items():
                self._store_name(turn, name, facts)
        self.nodes.append(node)
        self.size_bytes += TURN_BYTES + turn.ByteSize() - turn.sampled.routed_experts.ByteSize()

    def recall(self, name: str) -> Recalled | None:
        """Returns the turn with this name; None if the session has no such turn."""
        turn = self.named_turns.get(name)
        if turn is not None and turn.of_other is not None:
            return turn.of_other
        node = self.nodes[turn.turn_index] if turn is not None else None
        if turn is None or node is None:
            return None
        return Recalled(
            turn=turn,
            node=node,
            tools=json.loads(root_of(node).sent_tools_json),
            prompt_tokens=self.prefixes.whole_prompt(turn.turn_index).tokens,
            sampled_ids=self.prefixes.sampled(turn.turn_index),
        )

    def _store_name(self, turn: common_pb2.Turn, name: str, facts: Mapping[str, Any]) -> None:
        self.named_turns[name] = NamedTurn(
            turn_index=turn.turn_index,
            facts=facts,
            finish_reason=turn.finish_reason,
            cached_tokens=turn.cached_tokens,
        )

    def _append(
        self, shared: SharedPrefix, prompt_tail: bytes, sampled_ids: bytes, parse_error: str
    ) -> int:
        turn = self.prefixes.append(shared, prompt_tail, sampled_ids)
        if parse_error:
            self.parse_errors[turn] = parse_error
        return turn

    def _adopt(self, place: Place) -> Place:
        """Returns the same place in this conversation's tree."""
        tools = json.loads(place.root.sent_tools_json)
        root = self.tree.root_of_tools(tools, place.root.template_kwargs)
        return Place(root=root, node=root, beyond=(*place.node.messages(), *place.beyond))

    def _store_mark(self, place: Place, after: Node) -> None:
        if place.mark is None or any(marked.mark == place.mark for marked in self.marks):
            return
        marked = Marked(mark=place.mark, root=place.root, node=after)
        self.marks = [*self.marks[1 - MARKS_KEPT :], marked]

    def _text_after(
        self, template: ChatTemplate, render: Render, match: PrefixMatch, answer: Node
    ) -> str | None:
        """Returns the text after a sampled answer of the history; None if a branch is needed."""
        assert answer.message is not None, "an answer is a message"
        message, after = answer.message, match.history(answer.depth)
        sampled = answer.opening + self.model.decode(self.prefixes.sampled(answer.turn))
        ends = self.model.end_texts
        if template.looks_back_one_answer:
            try:
                return continuation(
                    template.stub_render, STUB, message, sampled, after, end_texts=ends
                )
            except TemplateRefused:
                # The template may need a message that the stub lacks.
                pass
        before = match.history()[: answer.depth - 1]
        return continuation(render, before, message, sampled, after, end_texts=ends)

    def _without_end(self, turn: int, text: str) -> tuple[bytes, str]:
        """Returns the ids of a turn and the text after it, with the end-of-turn token only once."""
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
        """Returns the messages of this turn's path that its parent lacks; "" for turns over ids."""
        if node is None or node.message is None:
            return ""
        parent = self.nodes[shared.turn] if shared.turn != NO_PARENT else None
        depth = common_depth(parent, node) if parent else 0
        context: dict[str, Any] = {"shared": depth}
        if parent is None or (not depth and root_of(parent) is not root_of(node)):
            context["tools"] = json.loads(root_of(node).sent_tools_json)
            if root_of(node).template_kwargs:
                context["template_kwargs"] = json.loads(root_of(node).template_kwargs)
        new = list(islice(node.ancestors(), 1, node.depth - depth))
        context["messages"] = [to_openai(entry.message) for entry in reversed(new) if entry.message]
        context["answer"] = to_openai(node.message)
        if node.opening:
            context["opening"] = node.opening
        if handle is not None:
            context["handle"] = {handle.name: handle.facts}
        return msgspec.json.encode(context).decode()

    def _node_before(self, shared: SharedPrefix, context: Mapping[str, Any]) -> Node:
        """Returns the node before the new messages of a recorded turn."""
        parent = self.nodes[shared.turn] if shared.turn != NO_PARENT else None
        if "tools" in context or parent is None:
            kwargs = kwargs_json(context.get("template_kwargs"))
            return self.tree.root_of_tools(context.get("tools", []), kwargs)
        depth = context["shared"]
        return next((node for node in parent.ancestors() if node.depth == depth), root_of(parent))


def _require_few(parts: Sequence[object], most: int) -> None:
    # Before their rendering: each has at least one token.
    if len(parts) > most:
        raise ContextTooLong.of(tokens=len(parts), limit=most, at_least=True)
