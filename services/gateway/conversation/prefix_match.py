"""One request, held against the tree of contexts.

Owns which of its messages are looked at: those behind a mark (see
`forge.core.conversation.request_prefix`) that the request is recognized by, or behind the turn that
it names, and those before only when a template asks for them. Knows nothing of tokens.
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
"""Requests of a session that later ones are recognized by: its own, and those of sub-agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """A request that was answered, and the boundary behind its messages."""

    mark: Mark
    root: Root
    node: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Where a request stands in the tree of contexts."""

    messages: Sequence[Message]
    """All of the request."""
    start: Node
    """The boundary it was recognized by; the root when all of it was read."""
    new: Sequence[Message]
    """The messages behind `start`."""
    node: Node
    """The deepest boundary that it agrees with."""

    @property
    def beyond(self) -> tuple[Message, ...]:
        """The messages that the tree does not have there."""
        return tuple(self.new[self.node.depth - self.start.depth :])

    def answers(self) -> Iterator[Node]:
        """The sampled answers in its history, the last one first."""
        return (entry for entry in self.node.ancestors() if entry.turn != NO_PARENT)

    def history(self, first: int = 0) -> list[Message]:
        """Its messages from number `first` on; what the model said stands as it said it, whatever
        the agent left of it."""
        begun = first - self.start.depth
        asked = self.new[begun:] if begun >= 0 else self.messages[first:]
        known: list[Node] = []
        for entry in self.node.ancestors():
            if entry.depth <= first:
                break
            known.append(entry)
        known.reverse()
        said = [
            entry.message if entry.turn != NO_PARENT and entry.message else message
            for entry, message in zip(known, asked, strict=False)
        ]
        return [*said, *asked[len(known) :]]


class Following(Sequence[Message]):
    """The messages of a request that goes on from a turn by its name."""

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


def begin(
    messages: Sequence[Message], root: Root, marks: Sequence[Marked]
) -> tuple[Node, Sequence[Message]]:
    """The deepest boundary that a request is recognized by, and its messages behind that."""
    # Where the session was read back in between, the turn is found again by what was said.
    if isinstance(messages, Following) and root_of(messages.node) is root:
        return messages.node, messages.new
    if isinstance(messages, History):
        here = {marked.mark: marked.node for marked in marks if marked.root is root}
        mark = messages.known(here)
        if mark is not None:
            return here[mark], messages.behind(mark)
    return root, messages[:]
