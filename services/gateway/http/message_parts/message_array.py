"""The messages of a request as one JSON array, the system prompt first.

Owns how such an array is made and decoded, and the place that an error names. The protocols own
their messages and the rules for them.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import msgspec

from forge.core.conversation.messages import Message
from forge.core.errors import InvalidArgument
from services.gateway.http.message_parts.images import ImagePolicy
from services.gateway.http.request_fields.request_body import UNREADABLE

Item = TypeVar("Item")


def with_first(item: bytes, array: bytes) -> bytes:
    """Returns a JSON array with one more item at its front: so the recognized prefix of a request
    includes its system prompt. `array` begins with "["."""
    comma = b"" if array[1:].lstrip().startswith(b"]") else b","
    return b"[" + item + comma + array[1:]


@dataclass(frozen=True, kw_only=True)
class ArrayReader(Generic[Item]):
    """Decodes the messages of a request, or its last ones; a subclass has the protocol's items."""

    item_type: ClassVar[type]
    array_name: ClassVar[str]
    system_name: ClassVar[str]

    array: bytes
    """All messages."""
    has_system: bool
    images: ImagePolicy

    def __call__(self, array: bytes, first: int) -> list[Message]:
        """Returns the messages of `array`; `first` is the index of its first message."""
        try:
            return self._read(array, whole=not first)
        except InvalidArgument:
            if not first:
                raise
            # `first` counts converted messages, and one of the agent's may become several. Only a
            # decoding of all messages gives the place of the error.
            return self._read(self.array, whole=True)[first:]

    @abstractmethod
    def messages(self, item: Item, where: str, *, is_system: bool) -> Iterable[Message]:
        """Converts one item. Raises `InvalidArgument` with its place."""

    def _read(self, array: bytes, *, whole: bool) -> list[Message]:
        items: list[Item]
        try:
            items = msgspec.json.decode(array, type=list[self.item_type])  # type: ignore[name-defined]
        except UNREADABLE as error:
            wrong = re.sub(r"\$\[(\d+)\]", lambda at: self._where(int(at[1])), str(error))
            raise InvalidArgument(f"the request body is not valid: {wrong}") from None
        if whole and len(items) == self.has_system:
            raise InvalidArgument(f"{self.array_name} must not be empty")
        return [
            message
            for at, item in enumerate(items)
            for message in self.messages(
                item, self._where(at), is_system=whole and self.has_system and not at
            )
        ]

    def _where(self, at: int) -> str:
        if self.has_system and not at:
            return self.system_name
        return f"{self.array_name}[{at - self.has_system}]"
