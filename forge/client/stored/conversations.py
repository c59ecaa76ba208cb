"""The chat conversations of a recorded trajectory, from the messages of its turns.

Owns the path of messages of each turn, and the choice of conversations: one for each path that no
later call continues. A turn records only the messages that its parent lacks.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from forge.client.stored.trajectory_tree import TrajectoryTree
from forge.core.conversation.context_tree import ContextTree, Node, root_of
from forge.core.conversation.messages import Message, from_openai
from forge.core.credit.side_calls import SideCall
from forge.v1 import common_pb2 as pb

Unused = Literal["other_model", "aborted", "no_messages"] | SideCall
"""Reason why no conversation ends with the answer of a turn: another model than the policy
answered; its agent left before the end; the record has no messages, as of an agent that sends token
ids; it is a side call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredConversation:
    """Messages that end with an answer of the policy."""

    turn_index: int
    """The turn of the last message."""
    messages: tuple[Message, ...]
    answers: frozenset[int]
    """Positions of the messages that the policy sampled."""
    tools: Sequence[Mapping[str, Any]]
    template_kwargs: Mapping[str, Any]


def conversations(
    turns: Sequence[pb.Turn],
) -> tuple[list[StoredConversation], Counter[Unused]]:
    """Returns the conversations of a trajectory in the order of their last turns, and the turns
    whose answers end none, by reason. Raises `InvalidArgument` if the turns form no tree.

    A conversation that is the beginning of another one is not returned.
    """
    aside = TrajectoryTree(turns).aside
    nodes = _nodes(turns)
    unused: Counter[Unused] = Counter()
    ends: list[Node] = []
    for index, (turn, node) in enumerate(zip(turns, nodes, strict=True)):
        if turn.HasField("other_model"):
            unused["other_model"] += 1
        elif turn.finish_reason == pb.FINISH_REASON_ABORTED:
            unused["aborted"] += 1
        elif node is None:
            unused["no_messages"] += 1
        elif index in aside:
            unused[aside[index]] += 1
        else:
            ends.append(node)
    continued = {id(before) for end in ends for before in end.ancestors() if before is not end}
    return [_conversation(end) for end in ends if id(end) not in continued], unused


def _conversation(end: Node) -> StoredConversation:
    path, root = end.path(), root_of(end)
    return StoredConversation(
        turn_index=end.turn,
        messages=tuple(node.message for node in path if node.message is not None),
        answers=frozenset(place for place, node in enumerate(path) if node.turn >= 0),
        tools=json.loads(root.sent_tools_json),
        template_kwargs=json.loads(root.template_kwargs or "{}"),
    )


def _nodes(turns: Sequence[pb.Turn]) -> list[Node | None]:
    """The answer of each turn in the tree of messages; None if its messages are not on record."""
    tree = ContextTree()
    nodes: list[Node | None] = []
    for turn in turns:
        node = None
        if turn.messages_json and not turn.HasField("other_model"):
            parent = nodes[turn.parent_turn] if turn.parent_turn >= 0 else None
            try:
                node = _answer(tree, parent, turn)
            except (ValueError, LookupError, TypeError, AttributeError):
                # Written by a client of its own: the pool accepts any text.
                node = None
        nodes.append(node)
    return nodes


def _answer(tree: ContextTree, parent: Node | None, turn: pb.Turn) -> Node:
    context = json.loads(turn.messages_json)
    if "tools" in context or parent is None:
        start: Node = tree.root_of_tools(
            context.get("tools", []), json.dumps(context.get("template_kwargs", {}))
        )
    else:
        depth = context["shared"]
        start = next((node for node in parent.ancestors() if node.depth == depth), root_of(parent))
    after = tree.extend(start, [from_openai(plain) for plain in context["messages"]])
    return tree.answer(after, from_openai(context["answer"]), turn=turn.turn_index)
