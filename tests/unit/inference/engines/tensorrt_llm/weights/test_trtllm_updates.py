"""Tests: weight updates on the strict stand-in: in flight, drained, and failed."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge.core.errors import Unavailable
from services.inference.engines.base import (
    BrokenWeights,
    Probe,
    UnfitWeights,
)
from services.inference.engines.tensorrt_llm.arguments import Role
from tests.contract.engines import (
    GREEDY,
    Answer,
    Pair,
    is_greedy,
    prompt_ids,
    published,
    reference,
)
from tests.support.inference.tensorrt_llm import OLD, both, core_of, load, started
from tests.support.inference.tensorrt_llm_fake._torch import async_llm
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour
from tests.support.runtime.waiting import until


async def test_update_continues_requests_in_flight(behaviour: Behaviour, model_path: Path) -> None:
    """They are read again with the new weights, and each token has the version that sampled it. One
    control action for each version, and one of the library's pause."""
    async with started(model_path, Role.BOTH) as engine:
        await load(engine)
        old, new = reference("qwen3"), reference("qwen3", seed=1)
        ids = prompt_ids(40)

        async def swap(answer: Answer) -> None:
            if engine.status().version == 1 and len(answer.ids) > 20:
                await load(engine, seed=1, version=2)

        answer = await both(engine).sample(ids, replace(GREEDY, max_tokens=120), on_piece=swap)
        before = answer.versions.count(1)
        assert answer.versions == before * [1] + (120 - before) * [2]
        assert 20 < before < 120
        assert is_greedy(old, ids, answer.ids[:before])
        assert is_greedy(new, [*ids, *answer.ids[:before]], answer.ids[before:])
        assert core_of(engine).control_actions == 3


async def test_update_waits_for_transfers_before_its_pause(
    behaviour: Behaviour, model_path: Path
) -> None:
    """The pause aborts all requests, also those whose keys and values still arrive."""
    behaviour.transfer_steps = 500
    async with (
        started(model_path, Role.PREFILL) as prefill,
        started(model_path, Role.DECODE) as decode,
    ):
        await load(prefill, decode)
        ids = prompt_ids(40)
        sampling = replace(GREEDY, max_tokens=60)
        sampling_task = asyncio.create_task(
            Pair(prefill=prefill, decode=decode).sample(ids, sampling)
        )
        await until(lambda: decode.status().running == 1)
        await load(decode, seed=1, version=2)
        answer = await sampling_task
        assert set(answer.versions) == {1, 2}
        assert behaviour.leaks == 0


async def test_update_of_prefill_keeps_held_prompts(behaviour: Behaviour, model_path: Path) -> None:
    """Their keys and values are fetched afterwards: no pause ends them, no drain waits for them."""
    async with (
        started(model_path, Role.PREFILL) as prefill,
        started(model_path, Role.DECODE) as decode,
    ):
        await load(prefill, decode)
        ids = prompt_ids(40)

        async def swap() -> None:
            await load(prefill, seed=1, version=2)

        answer = await Pair(prefill=prefill, decode=decode).sample(ids, on_fetch=swap)
        assert is_greedy(reference("qwen3"), ids, answer.ids)
        assert core_of(prefill).held == 0


async def test_old_version_drains_before_an_update(behaviour: Behaviour, model_path: Path) -> None:
    """A running answer ends with the weights that it began with; a later one waits."""
    behaviour.is_old = True
    async with started(model_path, Role.BOTH, version=OLD) as engine:
        await load(engine)
        ids = prompt_ids(40)
        running = asyncio.create_task(both(engine).sample(ids, replace(GREEDY, max_tokens=80)))
        await until(lambda: engine.status().running == 1)
        update = asyncio.create_task(load(engine, seed=1, version=2))
        await until(lambda: not engine._llm.gate._open.is_set())
        later = await both(engine).sample(ids)
        assert set((await running).versions) == {1}
        assert set(later.versions) == {2}
        await update


@pytest.mark.parametrize("fault", ["reload", "raise"])
async def test_failed_rank_restarts_from_the_last_version(
    behaviour: Behaviour, model_path: Path, fault: str
) -> None:
    """One of two ranks fails in the middle of an update: the engine starts again, serves the
    version before, and takes the next one. The request in flight continues."""
    async with started(model_path, Role.BOTH, tensor_parallel=2) as engine:
        await load(engine)
        ids = prompt_ids(40)
        engines_before = len(async_llm.started)

        async def fail(answer: Answer) -> None:
            if len(answer.ids) < 10 or len(async_llm.started) > engines_before:
                return
            if fault == "reload":
                behaviour.failing_reload = 1
            else:
                behaviour.raising["apply_forge_update"] = 1
            with pytest.raises(Unavailable, match=r"rank 1"):
                await load(engine, seed=1, version=2)

        answer = await both(engine).sample(ids, replace(GREEDY, max_tokens=60), on_piece=fail)
        assert len(async_llm.started) == engines_before + 1
        assert set(answer.versions) == {1}
        assert is_greedy(reference("qwen3"), ids, answer.ids)
        await load(engine, seed=1, version=3)
        assert is_greedy(reference("qwen3", seed=1), ids, (await both(engine).sample(ids)).ids)


async def test_damaged_bucket_changes_nothing(behaviour: Behaviour, model_path: Path) -> None:
    """All ranks compare the buckets before any loads one: no restart."""
    async with started(model_path, Role.BOTH, tensor_parallel=2) as engine:
        await load(engine)
        before = len(async_llm.started)
        behaviour.raising["check_forge_update"] = 1
        with pytest.raises(BrokenWeights, match="rank 1"):
            await load(engine, seed=1, version=2)
        assert len(async_llm.started) == before
        ids = prompt_ids(30)
        assert is_greedy(reference("qwen3"), ids, (await both(engine).sample(ids)).ids)


async def test_weights_that_compute_something_else_are_not_served(
    behaviour: Behaviour, model_path: Path
) -> None:
    """The probe is checked before requests get in; the engine then serves the version before."""
    async with started(model_path, Role.BOTH) as engine:
        good, other = reference("qwen3"), reference("qwen3", seed=1)
        ids = prompt_ids(12, seed=3)
        await engine.load(published(good), version=1, probe=probe_of(good, ids))
        with pytest.raises(UnfitWeights, match="log-probs of the probe differ"):
            await engine.load(published(other), version=2, probe=probe_of(good, ids))
        assert engine.status().version == 1
        answer = await both(engine).sample(ids)
        assert set(answer.versions) == {1}
        assert is_greedy(good, ids, answer.ids)


def probe_of(model: Any, ids: list[int]) -> Probe:
    import torch

    logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return Probe(ids=tuple(ids), logprobs=tuple(expected.tolist()))


async def test_full_update_directory_changes_nothing(
    behaviour: Behaviour, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names directory and bytes; the next attempt may succeed."""
    async with started(model_path, Role.BOTH) as engine:
        await load(engine)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        with pytest.raises(Exception, match="update_dir"):
            await load(engine, seed=1, version=2)
        assert engine.status().version == 1
