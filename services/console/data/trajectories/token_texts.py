"""Texts of tokens, by the tokenizer of the model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge.runtime.telemetry import log


class TokenTexts:
    """The text of each token id; unknown without a tokenizer."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    @classmethod
    def load(cls, model_path: str) -> TokenTexts:
        """Read tokenizer.json; without it, or without the package tokenizers, texts are unknown."""
        if not model_path:
            return cls()
        try:
            # Late import: the console serves without it.
            from tokenizers import Tokenizer

            return cls(Tokenizer.from_file(str(Path(model_path) / "tokenizer.json")))
        except Exception as error:
            # The library raises plain exceptions for a missing and for an invalid file.
            log.warning("tokenizer_not_read", model_path=model_path, error=str(error))
            return cls()

    @property
    def known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._tokenizer is not None

    def of(self, token_id: int) -> str:
        """Return the text of a token; bytes that are no whole character are U+FFFD."""
        text = self._known.get(token_id)
        if text is None:
            text = self._known[token_id] = self._decode(token_id)
        return text

    def _decode(self, token_id: int) -> str:
        piece = self._tokenizer.id_to_token(token_id) if self._tokenizer is not None else None
        if piece is None:
            return f"<{token_id}>"
        if all(character in _BYTES for character in piece):
            return bytes(_BYTES[character] for character in piece).decode(errors="replace")
        return str(piece).replace("\N{LOWER ONE EIGHTH BLOCK}", " ")


def _byte_characters() -> dict[str, int]:
    """By character that stands for it, each byte: the alphabet of byte-level BPE (GPT-2)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


_BYTES = _byte_characters()
