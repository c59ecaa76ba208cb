"""Updates of vLLM's weights beside running answers, and updates that fail.

Runs in the environment of `make engine-vllm` alone: `make test-engines`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from errno import ENOMEM
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import pytest
import pytest_asyncio

from forge.core.errors import ResourceExhausted, Unavailable
from services.inference.engines.base import Probe, UnfitWeights
from services.inference.engines.tensor_bytes import from_named, to_named
from tests.contract import engines
from tests.contract.engines import GREEDY, Answer, Pair, is_greedy, prompt_ids, published, reference
from tests.contract.starts import serving
from tests.support.inference.transformers_answers import logprobs_of
from tests.support.runtime.waiting import until

pytestmark = pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`")
_COPY_S = 240.0
"""Longest wait of a copy for an answer; it ends at once when the event loop is free."""


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with serving(engines.ENGINES["vllm"], tmp_path) as started:
        yield started


def engine_of(pair: Pair) -> Any:
    """The engine behind the role both."""
    both: Any = pair.prefill
    return both.engine


async def test_recompute_ends_running_answers_before_their_first_token_of_new_weights(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokens so far; an answer that begins after the swap is whole."""
    monkeypatch.setattr(engine_of(pair), "_recompute", True)
    old, new = reference("qwen3"), reference("qwen3", seed=1)
    ids = prompt_ids(20)
    seen: list[Answer] = []

    async def swap_once(answer: Answer) -> None:
        if not seen:
            seen.append(answer)
            await pair.load(published(new), version=2)

    with pytest.raises(ResourceExhausted, match="is read again by weights 2"):
        await pair.sample(ids, replace(GREEDY, max_tokens=200), on_piece=swap_once)
    (cut,) = seen
    assert 0 < len(cut.ids) < 200
    assert set(cut.versions) == {1}
    assert is_greedy(old, ids, cut.ids)
    again = [*ids, *cut.ids]
    rest = await pair.sample(again)
    assert set(rest.versions) == {2}
    assert is_greedy(new, again, rest.ids)


async def test_answers_are_sampled_while_new_weights_are_copied(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the event loop nor vLLM waits for the copy, which takes long for a large model."""
    module: Any = import_module("services.inference.engines.vllm.staging")
    whole, copies, sampled = module.shared, Event(), Event()

    @contextmanager
    def waiting(staged: Any) -> Iterator[dict[str, Any]]:
        with whole(staged) as update:
            copies.set()
            assert sampled.wait(timeout=_COPY_S)
            yield update

    monkeypatch.setattr(module, "shared", waiting)
    new, ids = reference("qwen3", seed=1), prompt_ids(20)
    update = asyncio.create_task(pair.load(published(new), version=2))
    await until(copies.is_set)
    answer = await pair.sample(ids)
    assert set(answer.versions) == {1}
    assert is_greedy(reference("qwen3"), ids, answer.ids)
    sampled.set()
    await update
    assert is_greedy(new, ids, (await pair.sample(ids)).ids)


async def test_update_without_memory_for_its_copy_changes_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker tries it again later; the version in service is not loaded again."""
    vllm = engine_of(pair)
    salt, full = vllm._salt, OSError(ENOMEM, "Cannot allocate memory")
    copies = failing_copies(monkeypatch, full, after=0)
    with pytest.raises(ResourceExhausted, match="weights 2 could not be copied"):
        await pair.load(published(reference("qwen3", seed=1)), version=2)
    assert (len(copies), vllm._salt) == (1, salt)
    monkeypatch.undo()
    ids = prompt_ids(20)
    assert is_greedy(reference("qwen3"), ids, (await pair.sample(ids)).ids)
    await pair.load(published(reference("qwen3", seed=1)), version=2)
    assert set((await pair.sample(ids)).versions) == {2}


def failing_copies(monkeypatch: pytest.MonkeyPatch, error: OSError, *, after: int) -> list[int]:
    """Have copies of weights fail after so many; return their versions."""
    module: Any = import_module("services.inference.engines.vllm.staging")
    whole, versions = module.shared, list[int]()

    @contextmanager
    def failing(staged: Any) -> Iterator[dict[str, Any]]:
        versions.append(staged.version)
        if len(versions) > after:
            raise error
        with whole(staged) as update:
            yield update

    monkeypatch.setattr(module, "shared", failing)
    return versions


async def test_refused_weights_that_cannot_be_replaced_end_the_worker(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for the version before them: no request could be answered."""
    vllm = engine_of(pair)
    copies = failing_copies(monkeypatch, OSError(ENOMEM, "Cannot allocate memory"), after=1)
    wrong = Probe(ids=tuple(prompt_ids(8)), logprobs=(0.0,) * 7)
    with pytest.raises(UnfitWeights):
        await pair.prefill.load(published(reference("qwen3", seed=1)), version=2, probe=wrong)
    assert copies == [2, 1]
    await until(lambda: not vllm._watch._owner.alive)
    await import_module("tests.contract.vllm_engine").stop()


async def test_trial_with_an_unexpected_error_drops_the_tokens_of_its_version(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a refusal does: they wait in the worker, which then ends."""
    engine: Any = import_module("services.inference.engines.vllm.engine")
    seen: list[Answer] = []

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine, "check_probe", broken)

    async def swap_once(answer: Answer) -> None:
        if not seen:
            seen.append(answer)
            with pytest.raises(ZeroDivisionError):
                await pair.load(published(reference("qwen3", seed=1)), version=2)

    with pytest.raises(Unavailable, match="weights 2 were refused"):
        await pair.sample(prompt_ids(20), replace(GREEDY, max_tokens=400), on_piece=swap_once)
    assert set(seen[0].versions) == {1}
    await import_module("tests.contract.vllm_engine").stop()


async def test_probe_that_is_never_computed_ends_the_worker(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM hangs: requests would wait for the trial of these weights for ever."""
    vllm = engine_of(pair)

    async def hanging(*_: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    monkeypatch.setattr(vllm._llm, "generate", hanging)
    serve = vllm._serve

    async def serve_at_length(staged: Any) -> None:
        await serve(staged)
        vllm._timeout_s = 0.01

    monkeypatch.setattr(vllm, "_serve", serve_at_length)
    with pytest.raises(Unavailable, match="has not computed the probe of weights 2 in time"):
        await pair.load(published(reference("qwen3", seed=1)), version=2)
    await until(lambda: not vllm._watch._owner.alive)
    await import_module("tests.contract.vllm_engine").stop()


async def test_float32_probe_has_the_values_published_in_16_bits(pair: Pair) -> None:
    """vLLM in float32 computes with these values, and rounds nothing: a fault far below the errors
    of 16 bits is found."""
    model = reference("qwen3", seed=1)
    ids = prompt_ids(16)
    unrounded = tuple(logprobs_of(model, ids[:1], ids[1:]).tolist())
    for one in model.parameters():
        one.data = one.data.bfloat16().float()
    tensors = {
        name: to_named(name, from_named(tensor).bfloat16())
        for name, tensor in published(model).items()
    }
    exact = tuple(logprobs_of(model, ids[:1], ids[1:]).tolist())
    probe = Probe(ids=tuple(ids), logprobs=unrounded, published=exact)
    wrong = replace(probe, published=tuple(one - 1e-3 for one in exact))
    with pytest.raises(UnfitWeights, match=r"differ from the trainer's by 0\.00(1|0999) "):
        await pair.prefill.load(tensors, version=2, probe=wrong)
    await pair.prefill.load(tensors, version=2, probe=probe)
    assert engine_of(pair).version == 2


async def test_vllm_that_stops_in_an_update_ends_the_worker(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After vllm.silence_s without CPU time, long before request_timeout_s. A process that computes
    uses CPU time."""
    watching: Any = import_module("services.inference.engines.vllm.process_watch")
    vllm = engine_of(pair)
    used_s = vllm._processes.used_s()
    assert (await pair.sample(prompt_ids(20))).ids
    assert vllm._processes.used_s() > used_s
    await vllm._watch.close()
    limits = watching.Limits(silence_s=2.0, working_s=600.0, cpu_counts=True)
    vllm._watch = watching.ProcessWatch(vllm._processes, vllm._watch._owner, limits)
    (process,) = vllm._processes._processes
    update = vllm._llm.update_weights

    async def stopped(request: Any) -> None:
        psutil.Process(process.pid).suspend()
        await update(request)

    monkeypatch.setattr(vllm._llm, "update_weights", stopped)
    loading = asyncio.create_task(pair.load(published(reference("qwen3", seed=1)), version=2))
    await until(lambda: not vllm._watch._owner.alive)
    await until(lambda: vllm._processes.ended)
    assert "SIGKILL" in vllm._processes.why_ended()
    # The worker would have ended.
    loading.cancel()
    await asyncio.wait([loading])
    await import_module("tests.contract.vllm_engine").stop()


async def test_update_that_fails_in_vllms_process_ends_the_worker(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by a damaged tensor. The error has what vLLM's process says, and nothing is loaded any
    more: some layers may be of one version and some of another."""
    module: Any = import_module("services.inference.engines.vllm.staging")
    whole = module.shared

    @contextmanager
    def damaged(staged: Any) -> Iterator[dict[str, Any]]:
        with whole(staged) as update:
            *others, (*what, checksum) = update["tensors"]
            yield update | {"tensors": [*others, (*what, checksum ^ 1)]}

    monkeypatch.setattr(module, "shared", damaged)
    vllm = engine_of(pair)
    with pytest.raises(Unavailable, match=r"failed to load weights 2: .*XXH3-64"):
        await pair.load(published(reference("qwen3", seed=1)), version=2)
    await until(lambda: not vllm._watch._owner.alive)
    # No other test may have this engine.
    await import_module("tests.contract.vllm_engine").stop()
