"""From logits to tokens: reweightings, then grammars, then each request's cuts and random stream.

Owns the application of penalties, biases and masks, and the probability of each token without them.
Not here: the masks (`services.inference.engines.grammar_masks`), the draw (`forge.rl.sampling`).

Shape suffixes: R rows, M rows with a grammar, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from forge.core.errors import ForgeError
from forge.core.token_columns import int32_array
from forge.rl.sampling import TokenSubset, race_noise, sample
from services.inference.engines.base import Likeliest, Prompt, Sampling, Tokens
from services.inference.engines.grammar_masks import Matcher, mask_words


class DrawnToken(NamedTuple):
    """One sampled token."""

    token: int
    logprob: float
    """Log-prob in the sampled distribution."""
    allowed: float
    """See `Tokens.allowed`; 0 without any."""
    top: Likeliest
    """Empty without `top_logprobs`."""


def tokens_of(drawn: Sequence[tuple[DrawnToken, int]], sampling: Sampling) -> Tokens:
    """Return tokens, each with the version of the weights that sampled it, as columns."""
    return Tokens(
        ids=tuple(token.token for token, _ in drawn),
        logprobs=tuple(token.logprob for token, _ in drawn),
        versions=tuple(version for _, version in drawn),
        allowed=tuple(token.allowed for token, _ in drawn) if sampling.reshapes else (),
        top=tuple(token.top for token, _ in drawn if token.top),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token per row."""

    ids: list[int]
    logprobs: list[float]
    allowed: Mapping[int, float]
    """Allowed log-probs of rows with a reweighting, a grammar or a cut, and perhaps of others."""
    top: Mapping[int, Likeliest]
    """Likeliest tokens of rows with `top_logprobs`."""
    failed: Mapping[int, ForgeError]
    """Rows whose grammar cannot be continued; their tokens have no meaning."""

    def row(self, row: int) -> DrawnToken:
        """Return the token of one row."""
        return DrawnToken(
            self.ids[row], self.logprobs[row], self.allowed.get(row, 0.0), self.top.get(row, ())
        )


def is_uncut(sampling: Sampling) -> bool:
    """Whether the model's own distribution is sampled at a temperature, without anything else; a
    grammar and a least length are the matcher's."""
    cut = sampling.top_p != 1 or sampling.top_k or sampling.min_p
    return not (cut or sampling.top_logprobs or sampling.reweighting is not None)


def draw(
    logits_RV: torch.Tensor,
    prompts: Sequence[Prompt],
    *,
    positions: Sequence[int],
    matchers: Sequence[Matcher | None],
    answers: Sequence[Sequence[int]],
    among: TokenSubset | None = None,
) -> Drawn:
    """Sample one token per row, after `answers`, the tokens sampled behind the prompts.

    Changes `logits_RV` in place for rows with a reweighting or a grammar. `among`: the logits are
    those of these tokens alone, and no row gets likeliest tokens.
    """
    device = logits_RV.device
    settings = [prompt.sampling for prompt in prompts]
    vocabulary = logits_RV.shape[-1] if among is None else among.vocabulary
    keep_all = among is None and any(s.top_logprobs for s in settings)
    if among is not None and (any(matchers) or any(s.reweighting for s in settings)):
        logits_RV, among = among.spread(logits_RV), None
    allowed: dict[int, float] = {}
    plain = _reweight(logits_RV, prompts, answers)
    failed: Mapping[int, ForgeError] = {}
    if any(matchers):
        allowed, failed = _mask(logits_RV, matchers, [s.temperature for s in settings])
    drawn = sample(
        logits_RV,
        temperature_B=torch.tensor([s.temperature for s in settings], device=device),
        top_p_B=_cuts([s.top_p for s in settings], none=1.0, device=device),
        top_k_B=_cuts([s.top_k for s in settings], none=0, device=device),
        noise_BN=race_noise(
            [s.seed for s in settings], positions, vocabulary=vocabulary, device=device
        ),
        min_p_B=_cuts([s.min_p for s in settings], none=0.0, device=device),
        keep_all=keep_all,
        among=among,
    )
    if drawn.kept_logprobs is not None:
        # The cuts apply after the grammar: shares multiply.
        kept = drawn.kept_logprobs.tolist()
        allowed = {row: share + allowed.get(row, 0.0) for row, share in enumerate(kept)}
    ids, logprobs = drawn.ids.tolist(), drawn.logprobs.tolist()
    return Drawn(
        ids=ids,
        logprobs=logprobs,
        allowed=allowed | _unweighted(plain, settings, ids, logprobs),
        top=_likeliest(drawn.all_logprobs, [s.top_logprobs for s in settings]),
        failed=failed,
    )


def _cuts(values: Sequence[float], *, none: float, device: torch.device) -> torch.Tensor | None:
    """A cut of each row; None where no row has one, which saves several small operations."""
    if all(value == none for value in values):
        return None
    return torch.tensor(values, device=device)


def _reweight(
    logits_RV: torch.Tensor, prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]
) -> dict[int, torch.Tensor]:
    """Apply the reweightings in place; return the float32 logits of these rows before it."""
    plain: dict[int, torch.Tensor] = {}
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        change = prompt.sampling.reweighting
        if change is None:
            continue
        logits_V = logits_RV[row].to(torch.float32, copy=True)
        plain[row] = logits_V
        known = torch.tensor([*int32_array(prompt.ids), *answer], device=logits_V.device)
        answered = known[prompt.tokens - change.answered_tokens :]
        counts_V = torch.bincount(answered, minlength=len(logits_V))
        # Repetition depends on the sign of a logit, so the order counts: vLLM's.
        logits_V = logits_V.clone()
        for token, bias in change.bias:
            logits_V[token] += bias
        if change.repetition != 1:
            seen = torch.unique(known)
            seen_S = logits_V[seen]
            logits_V[seen] = torch.where(
                seen_S > 0, seen_S / change.repetition, seen_S * change.repetition
            )
        logits_V = logits_V - change.presence * (counts_V > 0) - change.frequency * counts_V
        logits_RV[row] = logits_V
    return plain


def _unweighted(
    plain: Mapping[int, torch.Tensor],
    settings: Sequence[Sampling],
    ids: Sequence[int],
    logprobs: Sequence[float],
) -> dict[int, float]:
    """Return `Drawn.allowed` of reweighted rows: the log-prob by the model's own logits less that
    of the draw."""
    return {
        row: float((logits_V / heat).log_softmax(-1)[ids[row]]) - logprobs[row]
        for row, logits_V in plain.items()
        # A greedy row has no distribution.
        if (heat := settings[row].temperature)
    }


def _likeliest(logprobs_RV: torch.Tensor | None, counts: Sequence[int]) -> dict[int, Likeliest]:
    """Return the `counts` likeliest tokens of each row with a count above 0."""
    if logprobs_RV is None:
        return {}
    rows = [row for row, count in enumerate(counts) if count]
    most = min(max(counts), logprobs_RV.shape[-1])
    top = logprobs_RV[rows].topk(most, dim=-1)
    return {
        row: tuple(zip(ids[: counts[row]], logprobs[: counts[row]], strict=True))
        for row, ids, logprobs in zip(rows, top.indices.tolist(), top.values.tolist(), strict=True)
    }


def _mask(
    logits_RV: torch.Tensor,
    matchers: Sequence[Matcher | None],
    temperatures: Sequence[float],
) -> tuple[dict[int, float], dict[int, ForgeError]]:
    """Apply the grammars; return each row's allowed share and its failure."""
    vocabulary = logits_RV.shape[-1]
    rows: list[int] = []
    failed: dict[int, ForgeError] = {}
    words = np.zeros((len(matchers), mask_words(vocabulary)), dtype=np.uint32)
    for row, matcher in enumerate(matchers):
        if matcher is None:
            continue
        try:
            matcher.fill(words[len(rows)])
        except ForgeError as error:
            failed[row] = error
            continue
        rows.append(row)
    if not rows:
        return {}, failed
    bits = np.unpackbits(words[: len(rows)].view(np.uint8), axis=1, bitorder="little")
    allowed_MV = torch.from_numpy(bits[:, :vocabulary]).to(logits_RV.device).bool()
    logits_MV = logits_RV[rows]
    masked_MV = logits_MV.masked_fill(~allowed_MV, -torch.inf)
    logits_RV[rows] = masked_MV
    # A greedy row has no distribution: any temperature works, and its share is unused.
    heat_M = [temperatures[row] or 1.0 for row in rows]
    heat_M1 = torch.tensor(heat_M, device=logits_RV.device)[:, None]
    left_M = (masked_MV.float() / heat_M1).logsumexp(-1)
    all_M = (logits_MV.float() / heat_M1).logsumexp(-1)
    # Rounding may exceed 1.
    shares = (left_M - all_M).clamp(max=0).tolist()
    allowed = {
        row: share if temperatures[row] > 0 else 0.0
        for row, share in zip(rows, shares, strict=True)
    }
    return allowed, failed
