"""Masks of allowed tokens: compiled grammars, and the state of each answer.

Owns llguidance's tokenizer, the cache of compiled grammars and their limits. A thread of its own
compiles, so that a slow grammar delays only other new ones. Imports no torch: masks are bits, which
the engine applies.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from forge.core.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from forge.core.token_columns import TOKEN_BYTES, int32_array
from forge.grammar.answer_grammar import LIMITS, one_line, source
from services.inference.engines.base import Grammar, Prompt
from services.inference.engines.metrics import GRAMMARS

Words = NDArray[np.uint32]
"""A mask: bit i of word w stands for token 32 * w + i."""

MAX_COMPILED = 64
MAX_COMPILING = 64
_Key = tuple[str, str, bool]


def mask_words(vocabulary: int) -> int:
    """Number of 32-bit words of a mask."""
    return -(-vocabulary // 32)


class Matcher(Protocol):
    """The tokens that one answer may continue with. For one thread at a time."""

    def fill(self, mask: Words) -> None:
        """Write the mask of allowed next tokens. Raises `InvalidArgument` if there is none."""

    def advance(self, token: int) -> None:
        """Take a sampled token; after one that does not match, `check` raises."""

    def check(self) -> None:
        """Raises `InvalidArgument` after a token outside the grammar or its limits."""

    def copy(self) -> Matcher:
        """Return the same state, to be advanced by itself."""


class GrammarMatcher:
    """The state of one answer in its grammar."""

    def __init__(
        self, matcher: LLMatcher, *, stop_ids: frozenset[int], stop: Words, end: Words
    ) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._stop = stop
        self._end = end
        """The tokenizer's end tokens, which llguidance allows at the end by itself."""

    def fill(self, mask: Words) -> None:
        """Write the mask of allowed next tokens.

        A stop token is allowed after a complete answer, or as part of the answer's text. Raises
        `InvalidArgument` when the grammar exceeds its limits, or when no token of the vocabulary
        continues it.
        """
        self.check()
        if self._matcher.is_stopped():
            mask[:] = self._stop
            return
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check()
        mask &= ~self._end
        if self._matcher.is_accepting():
            mask |= self._stop
        if not mask.any():
            raise InvalidArgument("no token of the vocabulary can continue the grammar")

    def advance(self, token: int) -> None:
        """Take a sampled token; after one that does not match, `check` raises."""
        if token not in self._stop_ids:
            self._matcher.consume_token(token)

    def check(self) -> None:
        """Raises `InvalidArgument` after a token outside the grammar or its limits."""
        if self._matcher.is_error():
            raise InvalidArgument(
                f"the grammar cannot be followed: {one_line(self._matcher.get_error())}"
            )

    def copy(self) -> GrammarMatcher:
        """Return a matcher at the same token of the grammar."""
        return GrammarMatcher(
            self._matcher.deep_copy(), stop_ids=self._stop_ids, stop=self._stop, end=self._end
        )


class LengthMatcher:
    """Allows stop tokens only after `least` tokens, and otherwise what `inner` allows."""

    def __init__(self, inner: Matcher | None, *, least: int, stop: Words) -> None:
        self._inner = inner
        self._left = least
        self._stop = stop

    def fill(self, mask: Words) -> None:
        """Write the mask of allowed next tokens, without stop tokens before `least`."""
        if self._inner is None:
            mask[:] = ~np.uint32(0)
        else:
            self._inner.fill(mask)
        if self._left > 0:
            mask &= ~self._stop
            if not mask.any():
                raise InvalidArgument(
                    f"min_tokens needs {self._left} more tokens, but the grammar allows none"
                )

    def advance(self, token: int) -> None:
        """Count a sampled token; `inner` takes it."""
        self._left -= 1
        if self._inner is not None:
            self._inner.advance(token)

    def check(self) -> None:
        """Raises what `inner.check` raises."""
        if self._inner is not None:
            self._inner.check()

    def copy(self) -> LengthMatcher:
        """Return a matcher with the same tokens left, and a copy of `inner`."""
        inner = None if self._inner is None else self._inner.copy()
        return LengthMatcher(inner, least=self._left, stop=self._stop)


class Grammars:
    """Compiled grammars of one model."""

    def __init__(self, model_path: str, *, vocabulary: int) -> None:
        """Reads no file: most workers never get a grammar."""
        self._model_path = model_path
        self._vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[_Key, LLMatcher] = OrderedDict()
        self._compiling: dict[_Key, asyncio.Future[LLMatcher]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    async def matcher(self, prompt: Prompt, sampled: Sequence[int] = ()) -> Matcher | None:
        """Return the state after `sampled`; None without a grammar and a least length.

        Raises `InvalidArgument` for a grammar that does not compile or does not match so far,
        `ResourceExhausted` when too many grammars wait for compilation.
        """
        inner = await self._grammar_matcher(prompt, sampled)
        least = prompt.sampling.min_tokens - len(sampled)
        if least <= 0:
            return inner
        stop = _bits(prompt.sampling.stop_ids, self._vocabulary)
        return LengthMatcher(inner, least=least, stop=stop)

    async def _grammar_matcher(self, prompt: Prompt, sampled: Sequence[int]) -> Matcher | None:
        grammar = prompt.sampling.grammar
        if grammar is None:
            return None
        compiled = await self._prototype(grammar)
        assert self._tokenizer is not None
        matcher = begin_answer(
            compiled,
            self._tokenizer,
            stop_ids=prompt.sampling.stop_ids,
            vocabulary=self._vocabulary,
        )
        matched = prompt.ids[len(prompt.ids) - grammar.matched_tokens * TOKEN_BYTES :]
        for token in (*int32_array(matched), *sampled):
            matcher.advance(token)
        matcher.check()
        return matcher

    def close(self) -> None:
        """Stop the compiling thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _prototype(self, grammar: Grammar) -> LLMatcher:
        key = (grammar.kind, grammar.text, grammar.lenient)
        if key in self._compiled:
            self._compiled.move_to_end(key)
            GRAMMARS.labels("cached").inc()
            return self._compiled[key]
        if key not in self._compiling:
            if len(self._compiling) >= MAX_COMPILING:
                raise ResourceExhausted(
                    f"{MAX_COMPILING} grammars already wait for compilation", retry_after_s=1.0
                )
            self._compiling[key] = asyncio.ensure_future(self._compile(key, grammar))
        # Shielded: others may wait for the same grammar.
        return await asyncio.shield(self._compiling[key])

    async def _compile(self, key: _Key, grammar: Grammar) -> LLMatcher:
        loop = asyncio.get_running_loop()
        try:
            compiled = await loop.run_in_executor(self._thread, self._compile_blocking, grammar)
        except BaseException:
            GRAMMARS.labels("refused").inc()
            raise
        finally:
            del self._compiling[key]
        GRAMMARS.labels("compiled").inc()
        self._compiled[key] = compiled
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return compiled

    def _compile_blocking(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._model_path, vocabulary=self._vocabulary)
        return compile_grammar(self._tokenizer, grammar)


def compile_grammar(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Return the state before the first token, to be copied. Raises `InvalidArgument`."""
    text = source(grammar.kind, grammar.text, lenient=grammar.lenient)
    compiled = LLMatcher(tokenizer, text, limits=LIMITS, log_level=0)
    # The first mask includes one-time work: do it here, not in a shared decode step.
    compiled.deep_copy().compute_bitmask()
    if compiled.is_error():
        raise InvalidArgument(
            f"sampling.grammar.{grammar.kind} does not compile: {one_line(compiled.get_error())}"
        )
    return compiled


def begin_answer(
    compiled: LLMatcher, tokenizer: LLTokenizer, *, stop_ids: frozenset[int], vocabulary: int
) -> GrammarMatcher:
    """Return the state of an answer without tokens."""
    return GrammarMatcher(
        compiled.deep_copy(),
        stop_ids=stop_ids,
        stop=_bits(stop_ids, vocabulary),
        end=_bits(tokenizer.eos_tokens, vocabulary),
    )


def _bits(ids: Iterable[int], vocabulary: int) -> Words:
    words = np.zeros(mask_words(vocabulary), dtype=np.uint32)
    for token in ids:
        if 0 <= token < vocabulary:
            words[token // 32] |= np.uint32(1 << token % 32)
    return words


def load_tokenizer(model_path: str, *, vocabulary: int) -> LLTokenizer:
    """Load llguidance's tokenizer. Raises `FailedPrecondition` without a tokenizer.json."""
    if not (Path(model_path) / "tokenizer.json").is_file():
        raise FailedPrecondition(
            f"grammars cannot be enforced: there is no tokenizer.json in {model_path!r}"
        )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_path)
    return from_tokenizer(tokenizer, n_vocab=vocabulary, slices=LLTokenizer.json_slices())
