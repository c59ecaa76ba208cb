"""What an engine must record of an answer under a grammar, computed the slow way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from forge.core.token_columns import int32_bytes
from services.inference.engines.base import Grammar, Prompt, Sampling
from services.inference.engines.grammar_masks import Grammars, mask_words


async def masked_logprobs(
    model: Any,
    model_path: Path,
    ids: list[int],
    sampled: list[int],
    *,
    grammar: Grammar,
    stop_ids: frozenset[int],
    temperature: float,
) -> tuple[list[float], list[float]]:
    """Log-probs and allowed shares of `sampled` behind `ids`: one full forward of transformers'
    model, and masks of a matcher that begins at the first sampled token."""
    vocabulary = model.config.vocab_size
    logits_TV = model(torch.tensor([ids + sampled])).logits[0, len(ids) - 1 : -1] / temperature
    sampling = Sampling(
        temperature=temperature, top_p=1.0, top_k=0, max_tokens=1, stop_ids=stop_ids, seed=0,
        grammar=grammar,
    )  # fmt: skip
    prompt = Prompt(request_id="check", ids=int32_bytes(ids), sampling=sampling)
    matcher = await Grammars(str(model_path), vocabulary=vocabulary).matcher(prompt)
    assert matcher is not None
    logprobs, allowed = [], []
    for token, logits_V in zip(sampled, logits_TV, strict=True):
        mask = np.zeros(mask_words(vocabulary), dtype=np.uint32)
        matcher.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocabulary]
        masked_V = logits_V.masked_fill(~torch.from_numpy(bits).bool(), -torch.inf)
        logprobs.append(masked_V.log_softmax(-1)[token].item())
        allowed.append((masked_V.logsumexp(-1) - logits_V.logsumexp(-1)).item())
        matcher.advance(token)
    return logprobs, allowed
