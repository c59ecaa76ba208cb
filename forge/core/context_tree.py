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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from forge.core.messages import Message, MessageKey, agree
from forge.core.trajectory import NO_PARENT


@dataclass(slots=True, eq=False)
class Node:
    """A boundary behind a message. A root stands before the first, one per set of tools."""

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
    children: dict[MessageKey, list[Node]] = field(default_factory=dict)
    """Several under one key when parallel samples said the same, or thought differently."""

    def path(self) -> list[Node]:
        """The nodes from the first message to this one; empty at a root."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def ancestors(self) -> Iterator[Node]:
        """This node and those above it, upward, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class ContextTree:
    """All contexts of one session."""

    def __init__(self) -> None:
        self._roots: dict[str, Node] = {}

    def root(self, tools_json: str) -> Node:
        """Where conversations with these tools begin; tools are part of the rendered prompt."""
        root = self._roots.get(tools_json)
        if root is None:
            root = self._roots[tools_json] = Node(parent=None, depth=0, message=None)
        return root

    def match(self, root: Node, messages: Sequence[Message]) -> Node:
        """The deepest node below `root` whose messages agree with the first of `messages`.

        Where several do (parallel samples that said the same), the one that the call ids speak
        for wins, then the one sampled last. A message taken from the tree speaks for its node.
        """
        # (votes of call ids, last turn, node): this runs over the whole history of each request.
        frontier = [(0, NO_PARENT, root)]
        for message in messages:
            key = message.key
            deeper = [
                (votes + _speaks_for(message, child), max(turn, child.turn), child)
                for votes, turn, node in frontier
                for child in node.children.get(key, ())
                if agree(_said(child), message)
            ]
            if not deeper:
                break
            frontier = deeper
        return max(frontier, key=itemgetter(0, 1))[2]

    def extend(self, node: Node, messages: Sequence[Message]) -> Node:
        """The node behind `messages` after `node`, adding what is not there."""
        for message in messages:
            key = message.key
            known = [child for child in node.children.get(key, ()) if agree(_said(child), message)]
            node = known[-1] if known else _add(node, key, message)
        return node

    def answer(self, node: Node, message: Message, *, turn: int, opening: str = "") -> Node:
        """Adds what turn `turn` sampled behind `node`; never shared with another turn's."""
        if node.prompted == NO_PARENT and not opening:
            node.prompted = turn
        child = _add(node, message.key, message)
        child.turn = turn
        child.opening = opening
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


def _add(parent: Node, key: MessageKey, message: Message) -> Node:
    child = Node(parent=parent, depth=parent.depth + 1, message=message)
    parent.children.setdefault(key, []).append(child)
    return child


def _said(node: Node) -> Message:
    assert node.message is not None, "only roots have no message, and no root is a child"
    return node.message


def _speaks_for(message: Message, node: Node) -> bool:
    said = _said(node)
    return message is said or (bool(message.tool_calls) and said.call_ids == message.call_ids)
