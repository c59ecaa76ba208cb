"""The decode pass of a device, without one: over extents, with torch's own attention.

What graphs and kernels compute is tested on a device (`tests/gpu`).
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.inference.engines.base import Reweighting
from services.inference.engines.embedded.kv.attention import Heads, attention
from services.inference.engines.embedded.kv.device_attention import plain_attention
from services.inference.engines.embedded.roles import wiring
from tests.contract.engines import (
    GREEDY,
    SAMPLED,
    Answer,
    draftable,
    embedded_both,
    prompt_ids,
    published,
    with_heads,
)


def one_by_one(heads: Heads, ends: torch.Tensor, *, longest: int) -> torch.Tensor:
    """A `PackedAttention`."""
    groups = heads.q_NQD.shape[1] // heads.k_NHD.shape[1]
    read = []
    for start, end in itertools.pairwise(ends.tolist()):
        assert end - start <= longest
        q_QSD, k_HSD, v_HSD = (one[start:end].transpose(0, 1) for one in heads[1:4])
        k_QSD, v_QSD = (one.repeat_interleave(groups, 0) for one in (k_HSD, v_HSD))
        out = attention(
            q_QSD[None], k_QSD[None], v_QSD[None], bias=None, heads=heads, is_causal=True
        )
        read.append(out[0].transpose(0, 1))
    return torch.cat(read)


async def test_device_pass_samples_what_slabs_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in packed passes; greedy, sampled, with cuts and penalties, beside each other, with
    drafts and seeds of 64 bits: the same tokens, log-probs and shares."""
    model = draftable()
    model.config.save_pretrained(tmp_path)
    asked = [
        replace(GREEDY, max_tokens=40),
        replace(SAMPLED, seed=2**64 - 3, temperature=0.7, max_tokens=40),
        replace(SAMPLED, seed=5, top_p=0.8, top_k=20),
        replace(SAMPLED, seed=6, reweighting=Reweighting(presence=0.5)),
    ]
    prompts = [prompt_ids(tokens, seed=tokens) for tokens in (3, 40, 90, 17)]
    found: list[list[Answer]] = []
    for device in (False, True):
        if device:
            monkeypatch.setattr(wiring, "device_attention", lambda shape: plain_attention)
            monkeypatch.setattr(wiring, "packed_attention", lambda shape: one_by_one)
        async with embedded_both(tmp_path, draft_tokens=2, adaptive_drafts=False) as pair:
            await pair.load(with_heads(published(model)), version=1)
            plain = await asyncio.gather(*map(pair.sample, prompts[:2], asked[:2]))
            mixed = await asyncio.gather(*map(pair.sample, prompts, asked))
        found.append([*plain, *mixed])
    for slabs, extents in zip(*found, strict=True):
        assert extents.ids == slabs.ids
        assert extents.logprobs == pytest.approx(slabs.logprobs, abs=1e-4)
        assert extents.allowed == pytest.approx(slabs.allowed, abs=1e-4)
