"""The part of a large vocabulary that is drafted: the tokens that the policy samples most.

A draft head reads the rows of the language-model head for these tokens alone, as in FR-Spec (arXiv
2502.14856). A token outside is never a draft, and the policy samples it as without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from forge.rl.sampling import TokenSubset

DRAFTED_TOKENS = 8192
LEAST_VOCABULARY = 2 * DRAFTED_TOKENS
"""A smaller vocabulary is drafted whole."""
REFRESH_TOKENS = 1024
"""Sampled tokens between two choices."""
_KEPT = 0.98
"""Share of each count that a choice keeps."""
_PRIOR = 1e-3
"""Count of token 0 before the first token; 0 behind the last id. Tokenizers that merge pairs number
tokens by their frequency."""


class DraftVocabulary:
    """Counts sampled tokens, and chooses among them."""

    def __init__(self, vocabulary: int, *, most: int = DRAFTED_TOKENS) -> None:
        """`most`: tokens that are drafted, below the vocabulary."""
        self._most = most
        self._counts_V = np.zeros(vocabulary)
        self._prior_V = _PRIOR * np.linspace(1.0, 0.0, vocabulary)
        self._new = 0
        self.tokens = self._chosen()
        """Another object after each change."""

    def observe(self, tokens: Sequence[int]) -> None:
        """Count sampled tokens, and choose again after many of them."""
        np.add.at(self._counts_V, tokens, 1.0)
        self._new += len(tokens)
        if self._new < REFRESH_TOKENS:
            return
        self._new = 0
        chosen = self._chosen()
        if not torch.equal(chosen.tokens_S, self.tokens.tokens_S):
            self.tokens = chosen
        self._counts_V *= _KEPT

    def _chosen(self) -> TokenSubset:
        score_V = self._counts_V + self._prior_V
        tokens_S = np.sort(np.argpartition(-score_V, self._most)[: self._most])
        return TokenSubset(torch.from_numpy(tokens_S), vocabulary=len(score_V))
