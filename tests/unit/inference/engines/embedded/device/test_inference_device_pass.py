"""The decode pass of a device, without one: over extents, with torch's own attention, and with
graphs that run again what they captured.

What graphs and kernels compute is tested on a device (`tests/gpu`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from services.inference.engines.base import Reweighting
from services.inference.engines.embedded.device import forward_pass
from services.inference.engines.embedded.device.drafter import DeviceDrafter
from services.inference.engines.embedded.device.forward_pass import DevicePass
from services.inference.engines.embedded.kv.attention import Heads, attention
from services.inference.engines.embedded.kv.device_attention import plain_attention
from services.inference.engines.embedded.metrics import ACCEPTED
from services.inference.engines.embedded.model import head
from services.inference.engines.embedded.roles import wiring
from tests.contract import engines
from tests.contract.engines import (
    GREEDY,
    SAMPLED,
    Answer,
    Pair,
    draftable,
    embedded_both,
    is_greedy,
    prompt_ids,
    published,
    reference,
    with_heads,
)
from tests.support.inference.stand_in_graphs import StandInGraphs


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


@asynccontextmanager
async def with_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[tuple[Pair, list[StandInGraphs]]]:
    """An engine over extents with stand-in graphs of plain layers."""
    made: list[StandInGraphs] = []

    def graphs(device: torch.device) -> StandInGraphs:
        made.append(StandInGraphs(device))
        return made[-1]

    plain = SimpleNamespace(used=nullcontext)
    with monkeypatch.context() as patched:
        patched.setattr(wiring, "device_attention", lambda shape: plain_attention)
        patched.setattr(wiring, "DeviceGraphs", graphs)
        patched.setattr(forward_pass, "FusedLayers", lambda model: plain)
        async with embedded_both(folder, **options) as pair:
            yield pair, made


async def test_graphs_record_the_experts_of_slabs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request has its own rows, in draws of the graph and in draws from its logits."""
    engines.ROUTED.save_pretrained(tmp_path)
    weights = published(reference("qwen3_moe"))
    asked = [
        replace(GREEDY, max_tokens=30, routes_from=0),
        replace(SAMPLED, seed=3, max_tokens=20, routes_from=4),
        replace(SAMPLED, seed=4, max_tokens=25, routes_from=40),
    ]
    cut = replace(SAMPLED, seed=5, top_p=0.8, max_tokens=20, routes_from=0)
    prompts = [prompt_ids(tokens, seed=tokens) for tokens in (3, 17, 40)]

    async def sampled(pair: Pair) -> list[Answer]:
        await pair.load(weights, version=1)
        plain = await asyncio.gather(*map(pair.sample, prompts, asked))
        mixed = await asyncio.gather(
            *map(pair.sample, [*prompts, prompt_ids(9, seed=9)], [*asked, cut])
        )
        return [*plain, *mixed]

    async with embedded_both(tmp_path) as pair:
        expected = await sampled(pair)
    with capture_logs() as logs:
        async with with_graphs(tmp_path, monkeypatch) as (pair, made):
            found = await sampled(pair)
    assert [one["event"] for one in logs if one["event"].startswith("decode_")] == [
        "decode_graphs_used"
    ]
    # The check's, and of 2 to 4 rows with draws and with logits.
    assert 3 <= made[0].captures <= 5
    for slabs, extents in zip(expected, found, strict=True):
        assert extents.ids == slabs.ids
        rows = [[(one.start, one.routes.ids) for one in each.routes] for each in (slabs, extents)]
        assert rows[0] and rows[1] == rows[0]


async def test_graphs_of_drafts_last_over_publications(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights overwrite those of as many heads; other numbers of heads are captured again. The
    answers are those of the new weights, and drafts are accepted."""
    model = draftable()
    model.config.save_pretrained(tmp_path)
    monkeypatch.setattr(head.ServedDrafts, "_overwrites", property(lambda heads: True))
    monkeypatch.setattr(head, "host_copy", lambda one, kind: one.to(kind, copy=True))
    accepted = ACCEPTED.labels("1")._value.get
    versions = [
        with_heads(published(model)),
        with_heads(published(draftable(seed=1))),
        published(model),
        with_heads(published(model), count=1),
        with_heads(published(model)),
    ]
    captured: list[tuple[int, int]] = []

    def capture(self: DeviceDrafter, size: int, depth: int, dtype: torch.dtype) -> Any:
        captured.append((size, depth))
        return whole(self, size, depth, dtype)

    whole = DeviceDrafter._capture
    monkeypatch.setattr(DeviceDrafter, "_capture", capture)
    drafted, answers, captures = [], [], []
    async with with_graphs(tmp_path, monkeypatch, draft_tokens=2, adaptive_drafts=False) as found:
        for version, tensors in enumerate(versions, start=1):
            await found[0].load(tensors, version=version)
            before, accepted_before = len(captured), accepted()
            answers.append(await found[0].sample(prompt_ids(20), replace(GREEDY, max_tokens=40)))
            captures.append(captured[before:])
            drafted.append(accepted() - accepted_before)
    assert answers[0].ids == answers[2].ids == answers[4].ids != answers[1].ids
    assert [bool(count) for count in drafted] == [True, True, False, True, True]
    lasting = captures[0] + captures[1]
    assert captures[0] and len(lasting) == len(set(lasting))
    assert not captures[2] and captures[3] and captures[4]


async def test_graphs_of_plain_layers_follow_refused_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory of their own: torch refuses that of the first, which are gone."""
    model = reference("qwen3")
    model.config.save_pretrained(tmp_path)
    errors = iter([9.0, 0.0])

    def difference(self: DevicePass) -> float:
        whole(self)
        return next(errors)

    whole = DevicePass._difference
    monkeypatch.setattr(DevicePass, "_difference", difference)
    with capture_logs() as logs:
        async with with_graphs(tmp_path, monkeypatch) as (pair, _):
            await pair.load(published(model), version=1)
            answer = await pair.sample(prompt_ids(20))
    checks = [(one["event"], one["fused"]) for one in logs if one["event"].startswith("decode_g")]
    assert checks == [("decode_graph_refused", True), ("decode_graphs_used", False)]
    assert is_greedy(model, prompt_ids(20), answer.ids)


async def test_graphs_without_memory_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that has no memory is tried once, and its steps run without a graph; smaller ones keep
    theirs."""
    model = reference("qwen3")
    model.config.save_pretrained(tmp_path)
    tried: list[int] = []

    def captured(self: DevicePass, size: int, *, plain: bool) -> Any:
        if plain:
            tried.append(size)
            if size > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return whole(self, size, plain=plain)

    whole = DevicePass._captured
    monkeypatch.setattr(DevicePass, "_captured", captured)
    prompts = [prompt_ids(tokens, seed=tokens) for tokens in (3, 40, 90, 17)]
    with capture_logs() as logs:
        async with with_graphs(tmp_path, monkeypatch) as (pair, _):
            await pair.load(published(model), version=1)
            together = await asyncio.gather(*map(pair.sample, prompts))
            alone = await pair.sample(prompts[0])
    assert sorted(tried) == [2, 4]
    assert [one["rows"] for one in logs if one["event"] == "graph_without_memory"] == [4]
    assert not [one for one in logs if one["event"] == "decode_without_graphs"]
    for ids, answer in zip([*prompts, prompts[0]], [*together, alone], strict=True):
        assert is_greedy(model, ids, answer.ids)
