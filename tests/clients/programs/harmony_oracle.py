"""OpenAI's own implementation of harmony: renders messages as text, and parses texts.

Reads {"messages": [[...], ...], "texts": [...]} from standard input. Writes the same fields: of
each list of messages its text, of each text its messages. The vocabulary is litellm's copy.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

import openai_harmony as harmony

O200K = "litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"
"""Name of the file by the hash of its address; the library checks the hash of its content."""


def encoding(directory: str) -> harmony.HarmonyEncoding:
    # Not imported, because it would call its maintainers' server.
    litellm = importlib.util.find_spec("litellm")
    vocabulary = Path(litellm.origin).parent / O200K
    (Path(directory) / "o200k_base.tiktoken").symlink_to(vocabulary)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = directory
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def message_of(plain: dict) -> harmony.Message:
    author = harmony.Author(role=harmony.Role(plain["role"]), name=plain.get("name"))
    message = harmony.Message.from_author_and_content(author, plain["content"])
    for field in ("channel", "recipient", "content_type"):
        if plain.get(field):
            message = getattr(message, f"with_{field}")(plain[field])
    return message


def plain_of(message: harmony.Message) -> dict:
    return {
        "role": message.author.role.value,
        "name": message.author.name or "",
        "channel": message.channel or "",
        "recipient": message.recipient or "",
        "content": "".join(part.text for part in message.content),
    }


def main() -> None:
    asked = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as directory:
        oracle = encoding(directory)
    keep = harmony.RenderConversationConfig(auto_drop_analysis=False)
    rendered = [
        oracle.render_conversation(
            harmony.Conversation.from_messages([message_of(one) for one in messages]), keep
        )
        for messages in asked["messages"]
    ]
    tokens = [oracle.encode(text, allowed_special="all") for text in asked["texts"]]
    parsed = [
        oracle.parse_messages_from_completion_tokens(
            ids, None if text.startswith("<|start|>") else harmony.Role.ASSISTANT
        )
        for text, ids in zip(asked["texts"], tokens, strict=True)
    ]
    json.dump(
        {
            "texts": [oracle.decode(ids) for ids in rendered],
            "messages": [[plain_of(one) for one in messages] for messages in parsed],
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
