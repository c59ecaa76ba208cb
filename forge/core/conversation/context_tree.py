"""The prefix tree of contexts of one session.

Owns the message boundaries of a session: a node is a message behind a path of messages; a node of
an assistant names the turn that sampled it. Owns no tokens (`TokenPrefixes` has the ids of a turn)
and no template (`continuation`).

A request matches the deepest node whose messages agree with it (`messages` has the rules). Changes
of the history need no detection: an appended message goes deeper, a fork or an edit leaves the path
where it differs, a truncated or summarized history starts a new path. Sub-agents and parallel calls
are further paths of the same tree.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from forge.core.conversation.messages import Message, MessageKey, agree, same
from forge.core.trajectory import NO_PARENT

SHARED_OPENINGS = 2
"""Messages at the start of a context that sessions share: system prompt and task. Their text is
stored once."""


@dataclass(slots=True, eq=False)
class Node:
    """A boundary behind a message; a `Root` is before the first."""

    parent: Node | None
    depth: int
    """Messages from the root to here."""
    message: Message | None
    """None at a root. At a sampled node the model's own message, not the agent's copy."""
    turn: int = NO_PARENT
    """The turn that sampled this message."""
    opening: str = ""
    """Text of the answer that the prompt forced before the sampled text."""
    prompted: int = NO_PARENT
    """First turn whose prompt ended here without an opening."""
    child: Node | None = None
    """The only child, without a dict: most nodes have one, and there are millions of nodes."""
    children: dict[MessageKey, list[Node]] | None = None
    """Set for several children. Several have one key if parallel samples are equal, or differ
    only in their reasoning."""

    def below(self, message: Message) -> Iterable[Node]:
        """Return the children that agree with `message`."""
        if self.child is not None:
            return (self.child,) if same(_said(self.child), message) else ()
        if self.children is None:
            return ()
        found = self.children.get(message.key, ())
        return [child for child in found if agree(_said(child), message)]

    def add(self, message: Message) -> tuple[Node, bool]:
        """Add a child; return it, and whether another has the same key."""
        new = Node(parent=self, depth=self.depth + 1, message=message)
        if self.child is None and self.children is None:
            self.child = new
            return new, False
        if self.child is not None:
            self.children = {_said(self.child).key: [self.child]}
            self.child = None
        assert self.children is not None
        alike = self.children.setdefault(message.key, [])
        alike.append(new)
        return new, len(alike) > 1

    def path(self) -> list[Node]:
        """Return the nodes from the first message to this one; empty at a root."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def messages(self) -> list[Message]:
        """Return the messages from the first to this one."""
        return [_said(node) for node in self.path()]

    def ancestors(self) -> Iterator[Node]:
        """Yield this node and its ancestors, upward, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Root(Node):
    """Root of the conversations with one set of tools and one choice of template variables; they
    decide about the beginning of every prompt."""

    tools_json: str = ""
    """One spelling for equal tools."""
    sent_tools_json: str = ""
    """The tools of the first request, with its order of keys: templates render in that order."""
    template_kwargs: str = ""
    """Variables of the chat template as a JSON object; "" for none."""


class ContextTree:
    """All contexts of one session."""

    __slots__ = ("_roots", "twins")

    def __init__(self) -> None:
        self._roots: list[Root] = []
        self.twins = False
        """Whether a request may agree with several paths."""

    def root_of_tools(self, tools: Sequence[Mapping[str, Any]], template_kwargs: str = "") -> Root:
        """Return the root of conversations with these tools, as the agent sent them."""
        return self.root(_canonical(tools), template_kwargs, sent=tools)

    def root(
        self,
        tools_json: str,
        template_kwargs: str = "",
        *,
        sent: Sequence[Mapping[str, Any]] | None = None,
    ) -> Root:
        """Return the root of conversations with these tools and template variables; `sent` are the
        tools as the agent sent them."""
        for known in self._roots:
            if known.tools_json == tools_json and known.template_kwargs == template_kwargs:
                return known
        # Interned: all sessions have the same few sets of tools.
        root = Root(
            parent=None,
            depth=0,
            message=None,
            tools_json=sys.intern(tools_json),
            sent_tools_json=sys.intern(
                tools_json if sent is None else json.dumps(list(sent), ensure_ascii=False)
            ),
            template_kwargs=sys.intern(template_kwargs),
        )
        self._roots.append(root)
        return root

    def has(self, root: Root) -> bool:
        """Whether `root` is in this tree."""
        return any(known is root for known in self._roots)

    def match(self, start: Node, messages: Sequence[Message]) -> Node:
        """Return the deepest node below `start` whose path agrees with the first of `messages`.

        Of several (equal parallel samples) the one with most equal call ids wins, then the one
        sampled last. A message object of the tree counts for its own node.
        """
        # (votes of call ids, last turn, node)
        frontier = [(0, NO_PARENT, start)]
        for message in messages:
            deeper = [
                (votes + _speaks_for(message, child), max(turn, child.turn), child)
                for votes, turn, node in frontier
                for child in node.below(message)
            ]
            if not deeper:
                break
            frontier = deeper
        return max(frontier, key=itemgetter(0, 1))[2]

    def extend(self, node: Node, messages: Sequence[Message]) -> Node:
        """Return the node behind `messages` after `node`; add the missing ones."""
        for message in messages:
            known = tuple(node.below(message))
            node = known[-1] if known else self._add(node, message)
        return node

    def answer(self, node: Node, message: Message, *, turn: int, opening: str = "") -> Node:
        """Add the message of turn `turn` behind `node`, always as a new node."""
        if node.prompted == NO_PARENT and not opening:
            node.prompted = turn
        child = self._add(node, message)
        child.turn = turn
        child.opening = opening
        return child

    def _add(self, parent: Node, message: Message) -> Node:
        if parent.depth < SHARED_OPENINGS and message.role != "assistant":
            message = replace(message, content=sys.intern(message.content))
        child, twin = parent.add(message)
        self.twins = self.twins or twin
        return child


def common_depth(left: Node, right: Node) -> int:
    """Return the number of messages that two nodes share, from the root on."""
    while left is not right:
        if left.depth >= right.depth and left.parent is not None:
            left = left.parent
        elif right.parent is not None:
            right = right.parent
        else:  # two roots: different tools or template variables
            return 0
    return left.depth


def root_of(node: Node) -> Root:
    """Return the root of the path to `node`."""
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root), "only roots have no parent"
    return node


def _said(node: Node) -> Message:
    assert node.message is not None, "only roots have no message, and no root is a child"
    return node.message


def _speaks_for(message: Message, node: Node) -> bool:
    said = _said(node)
    return message is said or (bool(message.tool_calls) and said.call_ids == message.call_ids)


def _canonical(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return one spelling for equal tool definitions."""
    return json.dumps(list(tools), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
