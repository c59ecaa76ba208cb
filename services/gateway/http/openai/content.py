"""The content of OpenAI's messages: a text, or parts with text and images."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from forge.core.conversation.messages import Image
from forge.core.errors import InvalidArgument
from services.gateway.http.message_parts.images import GivenImage, ImagePolicy

IMAGE_PARTS = frozenset({"image_url", "input_image"})


class ImageUrl(msgspec.Struct):
    """The image of a chat message's part."""

    url: str = ""


class Part(msgspec.Struct):
    """A content part."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    """A URL with the data, or the address of the image."""


def content_of(
    content: str | list[Part] | None, kinds: Collection[str], images: ImagePolicy | None
) -> tuple[str, tuple[Image, ...]]:
    """Returns the joined text with the texts of images, and the images. Raises `InvalidArgument`
    for a part that is neither of `kinds` nor a refusal, and for an image that the policy refuses;
    without a policy, images are such parts."""
    if content is None or isinstance(content, str):
        return content or "", ()
    texts: list[str] = []
    seen: list[Image] = []
    for part in content:
        if part.type in IMAGE_PARTS and images is not None:
            image = _image(part)
            texts.append(images(image))
            seen.append(image.facts())
        else:
            texts.append(_text(part, kinds))
    return "".join(texts), tuple(seen)


def _text(part: Part, kinds: Collection[str]) -> str:
    if part.type not in kinds and part.type != "refusal":
        raise InvalidArgument(
            f"content of type {part.type[:40]!r} is not supported: the model takes text only"
        )
    return part.text or part.refusal or ""


def _image(part: Part) -> GivenImage:
    url = part.image_url
    return GivenImage(part=part.type, url=url.url if isinstance(url, ImageUrl) else url or "")
