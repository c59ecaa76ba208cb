"""The embedded engine on a CUDA device. Skipped where there is none.

    make test-gpu-engine

runs these and the contract of engines on the device; references compute on the CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from forge.core.errors import ResourceExhausted
from forge.core.routes import RouteSpan
from services.inference.engines.base import Probe, UnfitWeights
from services.inference.engines.embedded.device.drafter import DeviceDrafter
from services.inference.engines.embedded.device.forward_pass import DevicePass
from services.inference.engines.embedded.engine import EmbeddedBoth
from services.inference.engines.embedded.kv.device_attention import device_attention
from services.inference.engines.embedded.kv.shape import KvShape
from services.inference.engines.embedded.metrics import ACCEPTED
from tests.contract import engines
from tests.contract.engines import (
    GREEDY,
    SAMPLED,
    Pair,
    draftable,
    embedded_both,
    is_greedy,
    prompt_ids,
    published,
    reference,
    with_heads,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICE = torch.device("cuda:0")


@asynccontextmanager
async def on_device(folder: Path, family: str = "qwen3", **options: Any) -> AsyncIterator[Pair]:
    """The engine with the reference's weights."""
    model = reference(family)
    model.config.save_pretrained(folder)
    memory = {"kv_bytes": 64 << 20, "cache_bytes": 64 << 20}
    async with embedded_both(folder, **{"device": "cuda:0"} | memory | options) as pair:
        await pair.load(published(model), version=1)
        yield pair


@pytest.mark.parametrize(
    ("dtype", "heads", "groups", "size", "windowed"),
    [
        (torch.float32, 3, 3, 64, True),
        (torch.bfloat16, 8, 2, 128, False),
        (torch.bfloat16, 2, 8, 80, True),
        (torch.float16, 4, 1, 256, False),
    ],
)
def test_kernels_read_extents_as_torch_does(
    dtype: torch.dtype, heads: int, groups: int, size: int, windowed: bool
) -> None:
    """With windows, caps and sinks, too: else the engine would not use them."""
    shape = KvShape(
        layers=1,
        windowed=windowed,
        heads=heads,
        groups=groups,
        head_size=size,
        dtype=dtype,
        device=DEVICE,
    )
    with capture_logs() as logs:
        assert device_attention(shape) is not None, logs


@pytest.mark.parametrize("family", ["qwen3", "llama"])
async def test_graphs_sample_what_the_model_computes(family: str, tmp_path: Path) -> None:
    """In float32: greedy tokens of requests alone and together, and log-probs of sampled ones."""
    model = reference(family)
    prompts = [prompt_ids(tokens, seed=tokens) for tokens in (2, 5, 30, 120, 250, 400)]
    with capture_logs() as logs:
        async with on_device(tmp_path, family) as pair:
            alone = [await pair.sample(ids) for ids in prompts]
            together = await asyncio.gather(*map(pair.sample, prompts))
            sampled = await pair.sample(prompts[2], replace(SAMPLED, max_tokens=60))
    events = [one["event"] for one in logs]
    assert [one for one in events if one.startswith(("decode_", "fused_"))] == [
        "fused_prefill_used",
        "decode_graphs_used",
    ]
    for ids, answer in zip(prompts, alone, strict=True):
        assert is_greedy(model, ids, answer.ids)
    assert [one.ids for one in together] == [one.ids for one in alone]
    logits = model(torch.tensor([prompts[2] + sampled.ids])).logits[0, len(prompts[2]) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(sampled.ids)[:, None])[:, 0]
    assert (own - torch.tensor(sampled.logprobs)).abs().max() < 1e-3


async def test_device_draws_the_tokens_of_a_cpu(tmp_path: Path) -> None:
    """Same seeds, same tokens: with cuts, which leave the graph, and without."""
    asked = [
        replace(SAMPLED, seed=2**64 - 5, max_tokens=48),
        replace(SAMPLED, seed=3, temperature=0.7, max_tokens=48),
        replace(SAMPLED, seed=4, top_p=0.8, top_k=20, max_tokens=48),
    ]
    found = []
    for device in ("cpu", "cuda:0"):
        async with on_device(tmp_path, device=device) as pair:
            answers = [await pair.sample(prompt_ids(20), sampling) for sampling in asked]
            together = await asyncio.gather(*(pair.sample(prompt_ids(20), one) for one in asked))
        assert [one.ids for one in together] == [one.ids for one in answers]
        found.append(answers)
    for host, device_answer in zip(*found, strict=True):
        assert device_answer.ids == host.ids
        assert device_answer.logprobs == pytest.approx(host.logprobs, abs=1e-3)
        assert device_answer.allowed == pytest.approx(host.allowed, abs=1e-3)


async def test_bf16_stays_close_to_float32(tmp_path: Path) -> None:
    """Log-probs of the engine in bfloat16 against the model's own in float32."""
    model = reference("qwen3")
    ids = prompt_ids(200)
    async with on_device(tmp_path, dtype="bfloat16") as pair:
        answer = await pair.sample(ids, replace(SAMPLED, max_tokens=100))
    logits = model(torch.tensor([ids + answer.ids])).logits[0, len(ids) - 1 : -1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
    assert (own - torch.tensor(answer.logprobs)).abs().mean() < 0.05


async def test_model_that_cannot_be_captured_is_computed_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines in the log, and the same tokens."""

    def forward(self: DevicePass, inputs_6N: torch.Tensor, *, plain: bool) -> Any:
        inputs_6N.tolist()  # a wait for the device, which no graph can have
        return whole(self, inputs_6N, plain=plain)

    whole = DevicePass._forward
    monkeypatch.setattr(DevicePass, "_forward", forward)
    ids = prompt_ids(40)
    with capture_logs() as logs:
        async with on_device(tmp_path) as pair:
            first, second = await asyncio.gather(pair.sample(ids), pair.sample(ids[:30]))
    assert [one["fused"] for one in logs if one["event"] == "decode_graph_refused"] == [True, False]
    assert is_greedy(reference("qwen3"), ids, first.ids)
    assert is_greedy(reference("qwen3"), ids[:30], second.ids)


async def test_graph_with_other_numbers_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that keeps what it read when it was captured."""

    def capture(self: DevicePass, size: int, *, plain: bool) -> Any:
        found = whole(self, size, plain=plain)
        read.append(found.inputs_6N)
        return replace(found, inputs_6N=torch.zeros_like(found.inputs_6N))

    whole = DevicePass._capture
    read: list[torch.Tensor] = []  # kept: else the next tensor could have their memory
    monkeypatch.setattr(DevicePass, "_capture", capture)
    ids = prompt_ids(40)
    with capture_logs() as logs:
        async with on_device(tmp_path) as pair:
            answer = await pair.sample(ids)
    reasons = [one["reason"] for one in logs if one["event"] == "decode_graph_refused"]
    assert len(reasons) == 2 and all("differ" in one for one in reasons), reasons
    assert is_greedy(reference("qwen3"), ids, answer.ids)


async def test_drafts_change_no_token(tmp_path: Path) -> None:
    """Greedy and sampled answers with drafts, which are partly accepted."""
    model = draftable()
    model.config.save_pretrained(tmp_path)
    tensors = with_heads(published(model))
    found = []
    accepted = ACCEPTED.labels("1")._value.get
    before = accepted()
    for heads in (0, 3):
        options = {"device": "cuda:0", "draft_tokens": heads, "adaptive_drafts": False}
        async with embedded_both(tmp_path, **options) as pair:
            await pair.load(tensors, version=1)
            asked = [replace(GREEDY, max_tokens=60), replace(SAMPLED, seed=7, max_tokens=60)]
            found.append([(await pair.sample(prompt_ids(33), one)).ids for one in asked])
    assert found[0] == found[1]
    assert accepted() - before > 10


async def test_new_heads_overwrite_those_that_graphs_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged heads take no memory of the device. Graphs of drafts last until the number of heads
    changes, and draft with the new weights."""

    def capture(self: DeviceDrafter, size: int, depth: int, dtype: torch.dtype) -> Any:
        captured.append((size, depth))
        return whole(self, size, depth, dtype)

    whole = DeviceDrafter._capture
    captured: list[tuple[int, int]] = []
    monkeypatch.setattr(DeviceDrafter, "_capture", capture)
    model = draftable()
    model.config.save_pretrained(tmp_path)
    accepted = ACCEPTED.labels("1")._value.get
    seeds_and_heads = [(0, 3), (1, 3), (0, 3), (0, 1)]
    drafted, answers = [], []
    options = {"device": "cuda:0", "draft_tokens": 3, "adaptive_drafts": False}
    async with embedded_both(tmp_path, **options) as pair:
        engine = pair.decode
        assert isinstance(engine, EmbeddedBoth)
        for version, (seed, heads) in enumerate(seeds_and_heads, start=1):
            tensors = with_heads(published(draftable(seed=seed)), count=heads)
            torch.cuda.synchronize()
            memory = torch.cuda.memory_allocated()
            engine._policy.stage(tensors, version=version)
            assert torch.cuda.memory_allocated() == memory
            await pair.load(tensors, version=version)
            accepted_before = accepted()
            if heads == 1:
                # Each depth once, for three versions.
                assert 0 < len(captured) == len(set(captured))
                captured.clear()
            answers.append((await pair.sample(prompt_ids(20), replace(GREEDY, max_tokens=60))).ids)
            drafted.append(accepted() - accepted_before)
    assert answers[0] == answers[2] == answers[3] != answers[1]
    assert min(drafted) > 5
    assert captured


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_graphs_record_experts(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 as passes without graphs do, but for near ties of a router. Experts in float32
    wait for the device, so no graph has them: the log says so, and the tokens stay."""
    ids, asked = prompt_ids(30), replace(GREEDY, max_tokens=80, routes_from=0)
    answers = []
    for are_used in (True, False):
        with monkeypatch.context() as patched, capture_logs() as logs:
            if not are_used:
                patched.setattr(DevicePass, "after_swap", lambda self: None)
                patched.setattr(DevicePass, "_graph", lambda self, size, *, plain: None)
            async with on_device(tmp_path, "qwen3_moe", dtype=dtype) as pair:
                answers.append(await pair.sample(ids, asked))
        events = [one["event"] for one in logs if one["event"].startswith("decode_graph")]
        if are_used:
            # Near ties may make fused layers differ too much; the layers' own kernels never do.
            used = events[-1] == "decode_graphs_used"
            assert used or (dtype == "float32" and events == ["decode_graph_refused"] * 2), logs
    graphs, eager = ([row for one in answer.routes for row in rows_of(one)] for answer in answers)
    assert len(graphs) == len(eager) == len(ids) + asked.max_tokens - 1
    pairs = zip(*(answer.ids for answer in answers), strict=True)
    common = len(ids) + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) - 1
    assert common > len(ids) + (3 if dtype == "bfloat16" else 70)
    odd = sum(one != other for one, other in zip(graphs[:common], eager[:common], strict=True))
    assert odd <= common * (0.2 if dtype == "bfloat16" else 0.02)


def rows_of(span: RouteSpan) -> list[tuple[tuple[int, ...], ...]]:
    """The experts of each token, layer by layer, sorted."""
    column = span.routes
    size = column.row_bytes
    rows = [column.ids[at : at + size] for at in range(0, len(column.ids), size)]
    k = column.top_k
    return [tuple(tuple(sorted(row[at : at + k])) for at in range(0, size, k)) for row in rows]


async def test_staged_weights_take_no_memory_of_the_device(tmp_path: Path) -> None:
    """New weights wait on the host, and overwrite the served ones."""
    new = reference("qwen3", seed=1)
    ids = prompt_ids(20)
    async with on_device(tmp_path) as pair:
        engine = pair.decode
        assert isinstance(engine, EmbeddedBoth)
        await pair.sample(ids)
        before = torch.cuda.memory_allocated()
        staged = engine._policy.stage(published(new), version=2)
        assert torch.cuda.memory_allocated() == before
        del staged
        await pair.load(published(new), version=2)
        answer = await pair.sample(ids)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + (1 << 20)
    assert is_greedy(new, ids, answer.ids)
    assert set(answer.versions) == {2}


async def test_refused_weights_leave_the_served_ones(tmp_path: Path) -> None:
    """NaN is found on the host; a wrong probe after the copy, which is then undone."""
    new = reference("qwen3", seed=1)
    ids = prompt_ids(20)
    async with on_device(tmp_path) as pair:
        first = await pair.sample(ids)
        engine = pair.decode
        assert isinstance(engine, EmbeddedBoth)
        probe = Probe(ids=tuple(ids[:8]), logprobs=(-1e3,) * 7)
        with pytest.raises(UnfitWeights):
            await engine.load(published(new), version=2, probe=probe)
        second = await pair.sample(ids)
    assert second.ids == first.ids
    assert set(second.versions) == {1}


async def test_full_memory_moves_extents_and_evicts(tmp_path: Path) -> None:
    """Answers beyond the capacity of running sequences: each is right, or refused to be retried."""
    model = reference("qwen3")
    token_bytes = 3 * 2 * 2 * engines.HEAD_SIZE * 4
    prompts = [prompt_ids(20 + 31 * n, seed=n) for n in range(8)]
    async with on_device(tmp_path, kv_bytes=1400 * token_bytes, cache_bytes=0) as pair:
        asked = (pair.sample(ids, replace(GREEDY, max_tokens=100)) for ids in prompts)
        answers = await asyncio.gather(*asked, return_exceptions=True)
    served = 0
    for ids, answer in zip(prompts, answers, strict=True):
        if isinstance(answer, BaseException):
            assert isinstance(answer, ResourceExhausted)
            continue
        served += 1
        assert is_greedy(model, ids, answer.ids)
    assert served >= 3
