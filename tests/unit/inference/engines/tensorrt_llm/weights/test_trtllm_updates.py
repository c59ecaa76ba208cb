"""Tests: weight updates on the strict stand-in: in flight, drained, and failed."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from forge.core.errors import Unavailable
from services.inference.engine_settings import TensorRtLlmSettings
from services.inference.engines.tensorrt_llm.arguments import Role
from services.inference.engines.tensorrt_llm.engine import TensorRtLlm
from services.inference.engines.tensorrt_llm.metrics import STAGED_BYTES
from services.inference.engines.tensorrt_llm.weights import buckets
from tests.contract.engines import (
    GREEDY,
    Answer,
    Pair,
    is_greedy,
    make_prompt,
    prompt_ids,
    published,
    reference,
)
from tests.support.inference.held_answers import held_answers
from tests.support.inference.tensorrt_llm import OLD, both, core_of, load, started
from tests.support.inference.tensorrt_llm_fake._torch import async_llm
from tests.support.inference.tensorrt_llm_fake._torch.pyexecutor.model_loader import ModelLoader
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
                held.free()

        with held_answers(60) as held:
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
        with held_answers(30) as held:
            sampling_task = asyncio.create_task(
                Pair(prefill=prefill, decode=decode).sample(ids, sampling)
            )
            await until(lambda: decode.status().running == 1)
            await load(decode, seed=1, version=2)
            held.free()
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


async def test_update_stages_two_buckets_at_most(
    behaviour: Behaviour, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory holds no second copy of the model: a bucket that all ranks have loaded is removed
    before the one after the next is written. All buckets belong to one control action."""
    monkeypatch.setattr(buckets, "MIB", 1 << 16)
    folder = tmp_path / "updates"
    folder.mkdir()
    staged: list[list[int]] = []
    reload = ModelLoader.reload

    def noting(*args: Any, **kwargs: Any) -> None:
        staged.append([file.stat().st_size for file in folder.rglob("bucket-*")])
        reload(*args, **kwargs)

    monkeypatch.setattr(ModelLoader, "reload", noting)
    new = published(reference("qwen3", seed=1))
    async with started(model_path, Role.BOTH, update_dir=str(folder), tensor_parallel=2) as engine:
        await engine.load(new, version=1)
        assert core_of(engine).control_actions == 1
        assert not [*folder.iterdir()]
        assert not STAGED_BYTES._value.get()
        # 2 ranks, and one bucket for each of at least 5.
        assert len(staged) >= 10
        assert max(map(len, staged)) <= buckets.AT_ONCE
        assert max(map(sum, staged)) < sum(len(one.data) for one in new.values()) / 2
        ids = prompt_ids(30)
        assert is_greedy(reference("qwen3", seed=1), ids, (await both(engine).sample(ids)).ids)


@pytest.mark.parametrize(
    "fault", ["reload", "begin_forge_update", "load_forge_bucket", "finish_forge_update"]
)
async def test_failed_rank_restarts_from_the_last_version(
    behaviour: Behaviour, model_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """One of two ranks fails in the middle of an update: the engine starts again, serves the
    version before, and takes the next one. The request in flight continues."""
    monkeypatch.setattr(buckets, "MIB", 1 << 16)
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
                behaviour.raising[fault] = 1
            with pytest.raises(Unavailable, match=r"rank 1"):
                await load(engine, seed=1, version=2)

        answer = await both(engine).sample(ids, replace(GREEDY, max_tokens=60), on_piece=fail)
        assert len(async_llm.started) == engines_before + 1
        assert set(answer.versions) == {1}
        assert is_greedy(reference("qwen3"), ids, answer.ids)
        await load(engine, seed=1, version=3)
        assert is_greedy(reference("qwen3", seed=1), ids, (await both(engine).sample(ids)).ids)
        assert not STAGED_BYTES._value.get()


async def test_failed_pause_restarts_from_the_last_version(
    behaviour: Behaviour, model_path: Path
) -> None:
    """Paused, the library would refuse all requests. Those in flight move to other workers."""
    async with started(model_path, Role.BOTH, tensor_parallel=2) as engine:
        await load(engine)
        ids = prompt_ids(40)
        engines_before = len(async_llm.started)
        with held_answers(20) as held:
            moving = asyncio.create_task(both(engine).sample(ids, replace(GREEDY, max_tokens=60)))
            await until(lambda: engine.status().running == 1)
            behaviour.raising["wait_for_engine_idle"] = 1
            with pytest.raises(Unavailable, match="the pause failed: RuntimeError: rank 1"):
                await load(engine, seed=1, version=2)
            held.free()
        with suppress(Unavailable):
            await moving
        assert len(async_llm.started) == engines_before + 1
        assert is_greedy(reference("qwen3"), ids, (await both(engine).sample(ids)).ids)
        await load(engine, seed=1, version=3)
        assert is_greedy(reference("qwen3", seed=1), ids, (await both(engine).sample(ids)).ids)


def impatient(engine: TensorRtLlm) -> TensorRtLlmSettings:
    """Its settings with a short `update_timeout_s`."""
    return replace(engine._llm._settings, update_timeout_s=0.5)


async def test_library_that_does_not_end_ends_the_worker(
    behaviour: Behaviour, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that hangs in an update also delays the library's shutdown: the process ends, and its
    supervisor starts another one."""
    async with started(model_path, Role.BOTH) as engine:
        await load(engine)
        monkeypatch.setattr(engine._llm, "_settings", impatient(engine))
        released = Event()
        shutdown = engine._llm.engine.shutdown

        def hanging() -> None:
            released.wait(60)
            shutdown()

        monkeypatch.setattr(engine._llm.engine, "shutdown", hanging)
        behaviour.raising["load_forge_bucket"] = 0
        try:
            with pytest.raises(Unavailable, match="rank 0"):
                await load(engine, seed=1, version=2)
            assert "cannot start again" in str(await engine._llm.died)
        finally:
            released.set()


async def test_restart_that_hangs_ends_the_worker(
    behaviour: Behaviour, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's constructor may wait forever for a rank. Requests would wait with it."""
    async with started(model_path, Role.BOTH) as engine:
        await load(engine)
        llm = engine._llm
        monkeypatch.setattr(llm, "_settings", impatient(engine))
        monkeypatch.setattr(llm, "_start_s", 0.0)
        released = Event()
        hanging = SimpleNamespace(
            async_llm=lambda **_: released.wait(60), features=llm.library.features
        )
        monkeypatch.setattr(llm, "library", hanging)
        behaviour.raising["load_forge_bucket"] = 0
        try:
            with pytest.raises(Unavailable, match="rank 0"):
                await load(engine, seed=1, version=2)
            assert "cannot start again: TimeoutError" in str(await llm.died)
        finally:
            released.set()


async def test_prompt_that_hangs_in_the_library_ends_with_a_restart(
    behaviour: Behaviour, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill engine waits for its prompts before an update. One that never ends would keep the
    old weights forever."""
    async with started(model_path, Role.PREFILL) as engine:
        await load(engine)
        llm = engine._llm
        usual, quiesce = llm._settings, llm._quiesce

        async def in_vain() -> None:
            # The restart afterwards has its time.
            llm._settings = usual
            await quiesce()

        engines_before = len(async_llm.started)
        monkeypatch.setattr(core_of(engine), "_advance", lambda _: False)
        hanging = asyncio.create_task(engine.prefill(make_prompt(prompt_ids(40), GREEDY), hold_s=9))
        await until(lambda: engine.status().running == 1)
        monkeypatch.setattr(llm, "_quiesce", in_vain)
        llm._settings = impatient(engine)
        with pytest.raises(Unavailable, match="1 requests did not end"):
            await load(engine, seed=1, version=2)
        with pytest.raises(Unavailable, match="shut down"):
            await hanging
        assert len(async_llm.started) == engines_before + 1
        await load(engine, seed=1, version=3)
        prefilled = await engine.prefill(make_prompt(prompt_ids(40), GREEDY), hold_s=9)
        assert prefilled.first.versions == (3,)


async def test_bucket_that_a_rank_cannot_read_changes_nothing(
    behaviour: Behaviour, model_path: Path
) -> None:
    """All ranks read a bucket before any loads one: no restart. The fault is the host's: the worker
    tries the version again."""
    async with started(model_path, Role.BOTH, tensor_parallel=2) as engine:
        await load(engine)
        before = len(async_llm.started)
        behaviour.raising["check_forge_bucket"] = 1
        with pytest.raises(Unavailable, match="rank 1"):
            await load(engine, seed=1, version=2)
        assert len(async_llm.started) == before
        ids = prompt_ids(30)
        assert is_greedy(reference("qwen3"), ids, (await both(engine).sample(ids)).ids)


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
