"""The tiny policy's tokenizer and chat template.

Owns the vocabulary: marks, all 256 bytes, and frequent pieces of text. A piece is a word, a number
of at most two digits, or a run of other characters; it is one token if it is in the vocabulary. All
other text is spelled in bytes, so there is no unknown token and decoding inverts encoding exactly.
The vocabulary depends on the texts alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

PAD: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
_SPECIAL: Final = (PAD, START, END)
_FORMAT_MARKS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Single tokens, but ordinary text that the model samples."""
_PIECE: Final = r"[A-Za-z]+| ?[+-][0-9]{1,2}|[0-9]{1,2}(?:, (?=[0-9]))?|[^A-Za-z0-9+-]+|[+-]"
"""A number includes its sign, and its comma in a list: the token after it then depends on this
number alone, which makes lists easy to copy."""
_MARK: Final = re.compile("|".join(map(re.escape, (*_SPECIAL, *_FORMAT_MARKS))))
_MIN_COUNT: Final = 4


def chat_template() -> str:
    """The Jinja source of the chat template."""
    return (Path(__file__).parent / "chat_template.jinja").read_text()


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer for which each frequent piece of `texts` is one token."""
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *_FORMAT_MARKS))}
    for token in (*sorted(ByteLevel.alphabet()), *_frequent_pieces(texts)):
        vocabulary.setdefault(token, len(vocabulary))
    # No merges: a piece is in the vocabulary as a whole, or it is spelled byte by byte.
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    backend.pre_tokenizer = Sequence(
        [
            Split(Regex(_PIECE), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    backend.add_tokens([AddedToken(token, special=False) for token in _FORMAT_MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        chat_template=chat_template(),
        clean_up_tokenization_spaces=False,
    )


def _frequent_pieces(texts: Iterable[str]) -> list[str]:
    """Most frequent first, in the alphabet that stands for bytes."""
    counts: Counter[str] = Counter()
    for text in texts:
        for part in _MARK.split(text):
            counts.update(re.findall(_PIECE, part))
    in_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [
        in_bytes.pre_tokenize_str(piece)[0][0] for piece, count in ordered if count >= _MIN_COUNT
    ]
