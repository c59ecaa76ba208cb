"""Lower bound of a text's tokens by its length, for tokenizers that lose no byte of it.

No token covers more bytes than the longest of the vocabulary, so a text of n bytes has at least
n / longest tokens. Owns the list of tokenizer parts for which this holds. Encodes nothing.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_SHRINK = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "ByteLevel": 1, "Prepend": 1}
"""Most bytes of a text per byte of its normal form: a mathematical letter has four, `A` one."""
_SPLITTERS = {"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation", "UnicodeScripts"}


def longest_token_bytes(tokenizer: Tokenizer) -> int:
    """Returns the most bytes of text that one token covers; 0 if there is no bound."""
    plan = json.loads(tokenizer.to_str())
    added = plan["added_tokens"]
    normalizers = _parts(plan["normalizer"], "normalizers")
    splitters = _parts(plan["pre_tokenizer"], "pretokenizers")
    bytes_only = any(part["type"] == "ByteLevel" for part in (*splitters, *normalizers))
    shrink = 1
    for part in normalizers:
        shrink *= _shrink(part)
    if (
        plan["truncation"]
        # These take any amount of white space with them.
        or any(token["lstrip"] or token["rstrip"] for token in added)
        or not all(part["type"] in _SPLITTERS for part in splitters)
        or any(part.get("behavior") == "Removed" for part in splitters)
        or not _covers(plan["model"], bytes_only=bytes_only)
    ):
        return 0
    contents = {token["content"] for token in added}
    texts = plan["model"]["vocab"]
    # A character of a byte-level token stands for one byte.
    own = (len(text) if bytes_only else len(text.encode()) for text in texts)
    return shrink * max(1, *own, *(len(text.encode()) for text in contents))


def _parts(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for child in part[name] for inner in _parts(child, name)]


def _shrink(normalizer: dict[str, Any]) -> int:
    if normalizer["type"] == "Replace" and "String" in normalizer["pattern"]:
        before, after = normalizer["pattern"]["String"].encode(), normalizer["content"].encode()
        return -(-len(before) // len(after)) if after else 0
    return _SHRINK.get(normalizer["type"], 0)


def _covers(model: dict[str, Any], *, bytes_only: bool) -> bool:
    """Whether every character of a text is in some token."""
    if model["type"] != "BPE":
        return False
    vocab = model["vocab"]
    if bytes_only:
        return all(letter in vocab for letter in ByteLevel.alphabet())
    return bool(model["byte_fallback"]) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
