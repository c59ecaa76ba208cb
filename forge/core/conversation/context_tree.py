"""The prefix tree of contexts of one session.

Owns which message boundaries a session has been at: a node is a message behind a path of
messages, and an assistant's node knows the turn that sampled it. Owns no token: a node names a
turn, and `TokenPrefixes` has its ids; and no template: see `continuation`.

A request is matched to the deepest node whose messages agree with it (`messages` has the rules).
What the agent did to its history needs no detection: appending goes deeper, a fork or an edit
leaves the path where it differs, a truncated or summarized history starts a path of its own.
Sub-agents and parallel calls are further paths of the same tree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from forge.core.conversation.messages import Message, MessageKey, agree, same
from forge.core.trajectory import NO_PARENT

SHARED_OPENINGS = 2
"""Messages at the start of a context that many sessions have: system prompt and task. Their text
is kept once."""


@dataclass(slots=True, eq=False)
class Node:
    """A boundary behind a message. A `Root` stands before the first."""

    parent: Node | None
    depth: int
    """Messages from the root to here."""
    message: Message | None
    """None at a root. At a sampled node it is what the model said, not what agents repeat."""
    turn: int = NO_PARENT
    """The turn that sampled this message."""
    opening: str = ""
    """Text put into the model's mouth before it sampled this message."""
    prompted: int = NO_PARENT
    """The first turn whose prompt ended here, with nothing put into the model's mouth."""
    child: Node | None = None
    """The only child; most nodes have one, and a hundred thousand sessions are many nodes."""
    children: dict[MessageKey, list[Node]] | None = None
    """Once there are more. Several under one key when parallel samples said the same, or thought
    differently."""

    def below(self, message: Message) -> Iterable[Node]:
        """The children that agree with `message`."""
        if self.child is not None:
            return (self.child,) if same(_said(self.child), message) else ()
        if self.children is None:
            return ()
        found = self.children.get(message.key, ())
        return [child for child in found if agree(_said(child), message)]

    def add(self, message: Message) -> tuple[Node, bool]:
        """A new child, and whether another has the same key."""
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
        """The nodes from the first message to this one; empty at a root."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def messages(self) -> list[Message]:
        """Those from the first one to this one."""
        return [_said(node) for node in self.path()]

    def ancestors(self) -> Iterator[Node]:
        """This node and those above it, upward, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Root(Node):
    """Where conversations with one set of tools begin; they are part of every prompt."""

    tools_json: str = ""


class ContextTree:
    """All contexts of one session."""

    __slots__ = ("_roots", "twins")

    def __init__(self) -> None:
        self._roots: list[Root] = []
        self.twins = False
        """Whether some request may ever have agreed with more than one path."""

    def root(self, tools_json: str) -> Root:
        """Where conversations with these tools begin."""
        for known in self._roots:
            if known.tools_json == tools_json:
                return known
        # Interned, as a hundred thousand sessions have the same few sets of tools.
        root = Root(parent=None, depth=0, message=None, tools_json=sys.intern(tools_json))
        self._roots.append(root)
        return root

    def has(self, root: Root) -> bool:
        """Whether it is this tree's."""
        return any(known is root for known in self._roots)

    def match(self, start: Node, messages: Sequence[Message]) -> Node:
        """The deepest node below `start` whose messages agree with the first of `messages`.

        Where several do (parallel samples that said the same), the one that the call ids speak
        for wins, then the one sampled last. A message taken from the tree speaks for its node.
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
        """The node behind `messages` after `node`, adding what is not there."""
        for message in messages:
            known = tuple(node.below(message))
            node = known[-1] if known else self._add(node, message)
        return node

    def answer(self, node: Node, message: Message, *, turn: int, opening: str = "") -> Node:
        """Adds what turn `turn` sampled behind `node`; never shared with another turn's."""
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
    """How many messages two nodes have in common, counted from the root."""
    while left is not right:
        if left.depth >= right.depth and left.parent is not None:
            left = left.parent
        elif right.parent is not None:
            right = right.parent
        else:  # two roots: different tools
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
