"""Matches one request to the longest known prefix of the context tree.

Owns the choice of the messages that are decoded: those after a known mark (see
`forge.core.conversation.request_prefix`) or after the turn that the request names. Earlier messages
are decoded only for a chat template that needs them. Owns no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from forge.core.conversation.context_tree import Node, Root, root_of
from forge.core.conversation.messages import Message
from forge.core.conversation.request_prefix import History, Mark
from forge.core.trajectory import NO_PARENT

MARKS_KEPT = 4
"""Marks kept per session, so that requests of several agents are recognized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """The mark of an answered request, with the node after its messages."""

    mark: Mark
    root: Root
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The position of a request in the context tree."""

    messages: Sequence[Message]
    """All messages of the request."""
    start: Node
    """The node of the recognized prefix; the root if no prefix was recognized."""
    new: Sequence[Message]
    """The messages after `start`."""
    node: Node
    """The deepest node that agrees with the request."""

    @property
    def beyond(self) -> tuple[Message, ...]:
        """The messages after `node`."""
        return tuple(self.new[self.node.depth - self.start.depth :])

    def answers(self) -> Iterator[Node]:
        """Returns the sampled answers in the matched history, latest first."""
        return (entry for entry in self.node.ancestors() if entry.turn != NO_PARENT)

    def history(self, first: int = 0) -> list[Message]:
        """Returns the messages from number `first` on, with the answers as they were sampled."""
        offset = first - self.start.depth
        requested = self.new[offset:] if offset >= 0 else self.messages[first:]
        matched: list[Node] = []
        for entry in self.node.ancestors():
            if entry.depth <= first:
                break
            matched.append(entry)
        matched.reverse()
        history = [
            entry.message if entry.turn != NO_PARENT and entry.message else message
            for entry, message in zip(matched, requested, strict=False)
        ]
        return [*history, *requested[len(matched) :]]


class NamedPrefix(Sequence[Message]):
    """The messages of a request that continues a named turn."""

    __slots__ = ("new", "node")

    def __init__(self, node: Node, new: Sequence[Message]) -> None:
        self.node = node
        """The turn's answer."""
        self.new = new

    def __len__(self) -> int:
        return self.node.depth + len(self.new)

    @overload
    def __getitem__(self, at: int) -> Message: ...
    @overload
    def __getitem__(self, at: slice) -> list[Message]: ...
    def __getitem__(self, at: int | slice) -> Message | list[Message]:
        return [*self.node.messages(), *self.new][at]


def recognized_prefix(
    messages: Sequence[Message], root: Root, marks: Sequence[Marked]
) -> tuple[Node, Sequence[Message]]:
    """Returns the node of the longest recognized prefix, and the messages after it."""
    # After a rebuild of the session the node is stale; then the messages are matched.
    if isinstance(messages, NamedPrefix) and root_of(messages.node) is root:
        return messages.node, messages.new
    if isinstance(messages, History):
        nodes = {marked.mark: marked.node for marked in marks if marked.root is root}
        mark = messages.known(nodes)
        if mark is not None:
            return nodes[mark], messages.behind(mark)
    return root, messages[:]
