"""Greedy answers and log-probs of transformers' own models, which engines must equal."""

from __future__ import annotations

from typing import Any

import torch


def greedy_of(model: Any, ids: list[int], tokens: int) -> list[int]:
    """The answer of transformers' own generate."""
    out = model.generate(
        torch.tensor([ids]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
    )
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def logprobs_of(model: Any, ids: list[int], sampled: list[int]) -> torch.Tensor:
    """Log-probs of `sampled` after `ids`, by one full forward."""
    logits = model(torch.tensor([ids + sampled])).logits[0, len(ids) - 1 : -1]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(sampled)[:, None])[:, 0]
    return found
