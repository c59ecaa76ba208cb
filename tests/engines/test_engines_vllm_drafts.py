"""Drafts of vLLM by the draft heads among the published weights.

Runs in the environment of `make engine-vllm` alone: `make test-engines`.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from structlog.testing import capture_logs
from transformers import LlamaConfig

from forge.core.errors import ConfigError, UnsupportedByEngines
from services.inference.engine_settings import VllmSettings
from services.inference.engines.aggregated import Aggregated
from services.inference.engines.base import ModelLimits
from tests.contract import engines
from tests.contract.engines import (
    CONTEXT_TOKENS,
    GREEDY,
    SAMPLED,
    Pair,
    draftable,
    is_greedy,
    prompt_ids,
    published,
    with_heads,
)

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")
HEADS = 3
VOCABULARY = 8
SAMPLES = int(os.environ.get("FORGE_DRAFT_SAMPLES", "3000"))
CONFIG = LlamaConfig(**{**engines.CONFIGS["llama"].to_dict(), "vocab_size": VOCABULARY})
"""So few tokens that three of them have a distribution that can be counted."""


OPTIONS: dict[str, Any] = {
    "kv_bytes": 64 << 20,
    "max_running": 64,
    "context_tokens": CONTEXT_TOKENS,
    "settings": VllmSettings(draft_tokens=HEADS),
}


@pytest_asyncio.fixture(scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Started once, without a compiler: nothing that vLLM runs on a CPU may need one."""
    vllm: Any = import_module("tests.contract.vllm_engine")
    folder = tmp_path_factory.mktemp("drafts")

    async def start(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CXX", "/bin/false")
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "compiled"))
            return await vllm.VllmEngine.start(*arguments)

    async with vllm.started(folder, CONFIG, start, **OPTIONS) as (engine,):
        both = Aggregated(engine)
        yield Pair(prefill=both, decode=both)


async def load(pair: Pair, tensors: Any) -> None:
    engine: Any = pair.prefill
    await pair.load(tensors, version=engine.engine.version + 1)


async def counts(pair: Pair) -> tuple[int, int]:
    """Tokens that were drafted and accepted."""
    engine: Any = pair.prefill
    ((drafted, accepted),) = await engine.engine._processes.call("forge_drafts")
    return drafted, accepted


async def test_drafts_change_no_answer_but_its_steps(pair: Pair) -> None:
    """Greedy answers are the model's, log-probs those of its forward, a seed gives the same tokens
    alone and in a batch, and many drafts are accepted and rejected."""
    assert pair.capabilities.drafts
    model = draftable(CONFIG)
    await load(pair, with_heads(published(model), count=HEADS))
    before = await counts(pair)
    prompts = [[token % VOCABULARY for token in prompt_ids(9 + 30 * n, seed=n)] for n in range(6)]
    for ids in prompts[:2]:
        greedy = await pair.sample(ids, replace(GREEDY, max_tokens=40))
        assert len(greedy.ids) == 40
        assert is_greedy(model, ids, greedy.ids)
    asked = [replace(SAMPLED, max_tokens=60, seed=n) for n in range(6)]
    together = await asyncio.gather(*map(pair.sample, prompts, asked))
    for ids, sampling, answer in zip(prompts, asked, together, strict=True):
        logits = model(torch.tensor([ids + answer.ids])).logits[0, len(ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(answer.logprobs), expected, atol=1e-4)
        assert (await pair.sample(ids, sampling)).ids == answer.ids
    drafted, accepted = (now - then for now, then in zip(await counts(pair), before, strict=True))
    assert 0.1 * drafted < accepted < 0.9 * drafted
    # The context ends in the middle of a step.
    ids = prompts[0] * (CONTEXT_TOKENS // len(prompts[0]))
    answer = await pair.sample(ids, replace(SAMPLED, max_tokens=CONTEXT_TOKENS))
    assert len(ids) + len(answer.ids) == CONTEXT_TOKENS


async def test_heads_come_and_go_with_the_weights(pair: Pair) -> None:
    """In mid-answer: heads that do not fit and weights without heads draft nothing, with one line
    in the log each; one head drafts one token; each token has the version that sampled it."""
    model = draftable(CONFIG)
    whole = published(model)
    ids = [1, 5, 2, 7]
    with capture_logs() as logged:
        for tensors, drafts in (
            (with_heads(whole, count=1), True),
            (with_heads(whole, channels=32), False),
            (whole, False),
            (with_heads(whole, count=5), True),
        ):
            await load(pair, with_heads(published(draftable(CONFIG, seed=1)), count=HEADS))
            swapped: list[int] = []

            async def swap(_: Any, tensors: Any = tensors, swapped: Any = swapped) -> bool:
                if not swapped:
                    swapped += [(await counts(pair))[0]]
                    await load(pair, tensors)
                    swapped += [(await counts(pair))[0]]
                return True

            answer = await pair.sample(ids, replace(SAMPLED, max_tokens=500), on_piece=swap)
            assert answer.versions[-1] == answer.versions[0] + 1
            new = answer.versions.count(answer.versions[-1])
            drafted = (await counts(pair))[0] - swapped[1]
            assert bool(drafted) == drafts
            # One step samples a token, and at most one more for each head.
            assert drafted <= new * HEADS
    reasons = [one["reason"] for one in logged if one["event"] == "draft_heads_not_served"]
    assert len(reasons) == 2
    assert "MTP heads do not fit" in reasons[0]
    assert "no draft heads" in reasons[1]


def exact_distribution(model: Any, ids: list[int]) -> torch.Tensor:
    """Of the second to fourth token behind `ids`: [vocabulary ** 3]."""
    words = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * 4)
    rows = torch.cat([torch.tensor(ids).expand(len(words), -1), words], 1)
    logprobs = model(rows).logits.double().log_softmax(-1)[:, len(ids) - 1 : -1]
    joint: torch.Tensor = logprobs.gather(2, words[..., None])[..., 0].sum(-1).exp()
    return joint.view(VOCABULARY, -1).sum(0)


async def test_sampled_distribution_is_the_models_own(pair: Pair) -> None:
    """Chi-square of three successive tokens against the exact probabilities, with three drafts in
    each step, for answers of consecutive seeds."""
    model, ids = draftable(CONFIG), [1, 5, 2, 7]
    await load(pair, with_heads(published(model), count=HEADS))
    expected = exact_distribution(model, ids)
    found: Counter[int] = Counter()
    for first in range(0, SAMPLES, 100):
        asked = [replace(SAMPLED, max_tokens=5, seed=first + n) for n in range(100)]
        for answer in await asyncio.gather(*(pair.sample(ids, one) for one in asked)):
            a, b, c = answer.ids[1:4]
            found[(a * VOCABULARY + b) * VOCABULARY + c] += 1
    likely = expected * SAMPLES >= 5
    observed = torch.tensor([float(found[word]) for word in range(VOCABULARY**3)])
    seen = torch.cat([observed[likely], observed[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]) * SAMPLES
    degrees = torch.tensor(len(seen) - 1.0, dtype=torch.float64)
    chance = float(torch.special.gammaincc(degrees / 2, ((seen - wanted) ** 2 / wanted).sum() / 2))
    print(f"chi-square over {SAMPLES} samples, {len(seen)} cells: p = {chance:.3f}")
    assert chance > 1e-3


async def test_what_vllm_lacks_beside_drafts_is_refused(pair: Pair, tmp_path: Path) -> None:
    """By request, and other roles by the start."""
    await load(pair, published(draftable(CONFIG)))
    assert not pair.capabilities.shares
    with pytest.raises(UnsupportedByEngines, match="min_p and logit_bias"):
        await pair.sample([1, 2], replace(SAMPLED, min_p=0.1))
    for temperature in (0.001, 3.0):
        with pytest.raises(UnsupportedByEngines, match=r"with drafts has 0 and 0\.01 to 2"):
            await pair.sample([1, 2], replace(SAMPLED, temperature=temperature))
    vllm: Any = import_module("tests.contract.vllm_engine")
    arguments: Any = import_module("services.inference.engines.vllm.arguments")
    CONFIG.save_pretrained(tmp_path)
    limits = ModelLimits(context_tokens=CONTEXT_TOKENS, vocabulary=VOCABULARY)
    for role, extra, message in (
        ("decode", {}, r"vllm\.draft_tokens.* in the role both alone"),
        ("both", {"speculative_config": {"method": "ngram"}}, "set by other settings"),
    ):
        with pytest.raises(ConfigError, match=message):
            options = vllm.own_options(tmp_path, **OPTIONS, extra=extra)
            arguments.engine_arguments(options, limits, role=role, events=None)
    # Other drafts have a schedule as those by heads do, so that none is of the token -1.
    ngram: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 2}
    changed = OPTIONS | {"settings": VllmSettings(), "extra": {"speculative_config": ngram}}
    options = vllm.own_options(tmp_path, **changed)
    chosen = arguments.engine_arguments(options, limits, role="both", events=None)
    schedule = chosen["speculative_config"]["num_speculative_tokens_per_batch_size"]
    assert schedule == [(1, options.max_running, 2)]
