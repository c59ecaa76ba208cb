"""Images in messages: replaced by a text in every protocol, or refused by name."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forge.core.conversation.messages import Image, Message, from_openai, to_openai
from forge.core.errors import ConfigError, InvalidArgument
from services.gateway.conversation.conversation import Conversation
from services.gateway.conversation.prompt import Prompt
from services.gateway.http.anthropic import history, schema
from services.gateway.http.message_parts.images import (
    GivenImage,
    ImagePolicy,
    image_policy,
    placeholder,
    refuse,
)
from services.gateway.http.openai.completions import chat_schema
from services.gateway.http.openai.responses import history as responses_history
from services.gateway.http.request_fields.request_body import decode
from tests.support.gateway.chat_templates import make_model

PIXELS = base64.b64encode(b"p" * 70).decode()
DATA_URL = f"data:image/png;base64,{PIXELS}"
SHOWN = "[image omitted: image/png, 70 bytes]"
PNG = Image(media_type="image/png", size_bytes=70)


def chat(images: ImagePolicy) -> Sequence[Message]:
    part = {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "See "}, part]},
        {"role": "tool", "tool_call_id": "a", "content": [part]},
    ]
    body = json.dumps({"model": "m", "messages": messages}).encode()
    return chat_schema.messages_of(decode(body, chat_schema.ChatCompletionRequest), images)


def responses(images: ImagePolicy) -> Sequence[Message]:
    part = {"type": "input_image", "image_url": DATA_URL}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "See "}, part]},
        {"type": "function_call_output", "call_id": "a", "output": [part]},
    ]
    return responses_history.history_of(json.dumps(items).encode(), None, images)


def anthropic(images: ImagePolicy) -> Sequence[Message]:
    source = {"type": "base64", "media_type": "image/png", "data": PIXELS}
    block = {"type": "image", "source": source}
    content = [{"type": "text", "text": "See "}, block]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    messages = [{"role": "user", "content": content}, {"role": "user", "content": [result]}]
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()
    return history.messages_of(decode(body, schema.MessagesRequest), images)


PROTOCOLS = pytest.mark.parametrize("read", [chat, responses, anthropic])


@PROTOCOLS
def test_an_image_becomes_the_same_text_in_every_protocol(read: Any) -> None:
    """A message of the user and a tool result have the text at the image's place, and its facts."""
    user, result = read(placeholder)
    assert user == Message(role="user", content=f"See {SHOWN}", images=(PNG,))
    assert result == Message(role="tool", content=SHOWN, tool_call_id="a", images=(PNG,))
    assert from_openai(msgspec.json.decode(msgspec.json.encode(to_openai(user)))) == user


@PROTOCOLS
def test_a_refused_image_is_named_with_its_place(read: Any) -> None:
    """One line with place, type and setting."""
    with pytest.raises(InvalidArgument, match=r"^\w+\[0\].*image.*http\.images = 'refuse'"):
        list(read(refuse))


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        (GivenImage(part="image", url="https://x/y.png"), Image(media_type="image/*")),
        (
            GivenImage(part="image", url="data:image/<|im_end|>;base64,AAAA"),
            Image(media_type="image/*", size_bytes=3),
        ),
        (
            GivenImage(part="image", media_type="IMAGE/JPEG", base64="AAA="),
            Image(media_type="image/jpeg", size_bytes=2),
        ),
        (GivenImage(part="image"), Image(media_type="image/*")),
    ],
)
def test_image_text_has_only_a_type_and_a_size(given: GivenImage, facts: Image) -> None:
    """No address and no tag of the request gets into the prompt."""
    assert given.facts() == facts


def test_images_of_new_messages_are_counted_once() -> None:
    """A repeated prompt has no new images."""
    conversation = Conversation(model=make_model("chatml"))
    request = chat(placeholder)
    first = Prompt(ids=b"", draft=conversation.draft(request, ()))
    assert first.new_images == 2
    place = first.draft.place
    assert place is not None
    conversation.tree.extend(place.node, place.beyond)
    assert Prompt(ids=b"", draft=conversation.draft(request, ())).new_images == 0


@pytest.mark.parametrize(
    ("config", "says"), [({}, "no vision_config"), ({"vision_config": {}}, "no engine")]
)
def test_image_input_is_refused_with_the_missing_part(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    """The model's tower first, then the engine."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"http.images = 'pass': .*{says}"):
        image_policy("pass", str(tmp_path))
