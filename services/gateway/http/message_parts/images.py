"""Images in the messages of agents.

Owns the policies of `http.images` and the text that stands for an image. A policy returns the text
of an image in the prompt, or refuses it; the message records the image's type and size. A policy
that passes images on returns the model's image tokens and keeps the data for the engine. It needs a
model with a vision tower and an engine that serves it; no engine of this release does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forge.core.conversation.messages import Image
from forge.core.errors import ConfigError, InvalidArgument
from services.gateway.config import ImageSetting
from services.gateway.metrics import IMAGES

UNKNOWN_TYPE = "image/*"
_MEDIA_TYPE = re.compile(r"image/[a-z0-9.+-]{1,40}")
_DATA_URL = re.compile(r"data:([^;,]{0,60})(?:;[^;,]{0,60})*;base64,")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenImage:
    """An image as a request has it."""

    part: str
    """Name of its content type in the protocol."""
    media_type: str = ""
    base64: str = ""
    """The data; "" for an image given by `url` or by the id of a file."""
    url: str = ""
    """A data URL, or the address of the image, which is never fetched."""

    def facts(self) -> Image:
        """Returns type and size; the data is neither decoded nor kept."""
        media_type, data, start = self.media_type.lower(), self.base64, 0
        if match := _DATA_URL.match(self.url):
            media_type, data, start = match[1].lower(), self.url, match.end()
        # The type is a part of the prompt, so only the form of a type is taken.
        known = media_type if _MEDIA_TYPE.fullmatch(media_type) else UNKNOWN_TYPE
        if not data:
            return Image(media_type=known)
        padding = len(data) - len(data.rstrip("="))
        return Image(media_type=known, size_bytes=(len(data) - start - padding) * 3 // 4)


ImagePolicy = Callable[[GivenImage], str]
"""Returns the text that stands for an image in the prompt. Raises `InvalidArgument` for a refused
image."""


def refuse(image: GivenImage) -> str:
    """Raises `InvalidArgument` for every image."""
    IMAGES.labels("refused").inc()
    raise InvalidArgument(
        f"content of type {image.part!r} is refused here (http.images = 'refuse'): "
        "the model takes text only"
    )


def placeholder(image: GivenImage) -> str:
    """Returns a text with type and size, for an image that the model does not see."""
    facts = image.facts()
    size = "unknown size" if facts.size_bytes is None else f"{facts.size_bytes} bytes"
    return f"[image omitted: {facts.media_type}, {size}]"


def image_policy(setting: ImageSetting, model_path: str) -> ImagePolicy:
    """Returns the policy of a setting. Raises `ConfigError` for `pass`, with the missing part."""
    if setting == "refuse":
        return refuse
    if setting == "placeholder":
        return placeholder
    config = Path(model_path) / "config.json"
    if not (config.is_file() and "vision_config" in json.loads(config.read_bytes())):
        raise ConfigError(
            f"http.images = 'pass': {config} has no vision_config, so the model has no vision "
            "tower; use 'placeholder' or 'refuse'"
        )
    raise ConfigError(
        "http.images = 'pass': no engine of this release serves images; "
        "use 'placeholder' or 'refuse'"
    )
