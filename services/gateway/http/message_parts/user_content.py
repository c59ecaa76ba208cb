"""Content of a user's message: texts and images, and results of tools between them.

Owns the rules that protocols with parts of a message share. The parts are the protocols' own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forge.core.conversation.messages import Image, Message
from forge.core.errors import InvalidArgument
from services.gateway.http.message_parts.images import GivenImage, ImagePolicy

Heard = tuple[str, Image | None]
"""The text of a part, and the image that it stands for."""


def heard_message(role: str, heard: Sequence[Heard], *, tool_call_id: str = "") -> Message:
    """Returns a message of texts and images."""
    return Message(
        role=role,
        content="".join(text for text, _ in heard),
        images=tuple(image for _, image in heard if image is not None),
        tool_call_id=tool_call_id,
    )


def user_messages(parts: Sequence[Heard | Message]) -> Iterator[Message]:
    """Yields the messages of a user's parts, split at the results of tools, which are messages."""
    heard: list[Heard] = []
    for part in parts:
        if isinstance(part, Message):
            if heard:
                yield heard_message("user", heard)
                heard = []
            yield part
        else:
            heard.append(part)
    if heard or not parts:
        yield heard_message("user", heard)


def heard_image(image: GivenImage, images: ImagePolicy, where: str) -> Heard:
    """Returns what stands for an image. Raises `InvalidArgument` where images are refused."""
    try:
        return images(image), image.facts()
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}") from None
