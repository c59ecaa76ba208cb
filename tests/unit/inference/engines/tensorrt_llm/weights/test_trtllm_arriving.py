"""Tests: weights that the ranks load while the last ones are still fetched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.core.errors import Unavailable
from forge.core.named_tensor import NamedTensor
from services.inference.engines.arriving import Form
from services.inference.engines.base import BrokenWeights, UnfitWeights
from services.inference.engines.tensorrt_llm.arguments import Role
from services.inference.engines.tensorrt_llm.engine import TensorRtLlm
from services.inference.engines.tensorrt_llm.metrics import STAGED_BYTES
from services.inference.engines.tensorrt_llm.weights import buckets
from services.inference.engines.tensorrt_llm.weights.arriving_weights import _Start
from tests.contract.engines import is_greedy, prompt_ids, published, reference
from tests.support.inference.tensorrt_llm import both, core_of, load, started
from tests.support.inference.tensorrt_llm_fake._torch import async_llm
from tests.support.inference.tensorrt_llm_fake._torch.pyexecutor.model_loader import ModelLoader
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour
from tests.support.runtime.waiting import settle, until

NEVER_S = 1e9
"""A load that takes longer than any fetch: it begins as soon as it may."""


class Fetch:
    """An `Arriving` whose tensors the test lets in."""

    def __init__(self, tensors: Mapping[str, NamedTensor]) -> None:
        self.all = dict(tensors)
        self.kept = False
        self.given = 0
        self._here: asyncio.Queue[NamedTensor | Exception] = asyncio.Queue()

    @property
    def forms(self) -> Mapping[str, Form]:
        """See `Arriving`."""
        return {
            name: Form(
                dtype=one.dtype,
                shape=one.shape,
                size_bytes=memoryview(one.data).nbytes,
                hub=one.hub,
            )
            for name, one in self.all.items()
        }

    def let_in(self, *, but: int = 0) -> None:
        """All further tensors but the last ones."""
        left = list(self.all.values())[self.given : len(self.all) - but]
        self.given += len(left)
        for tensor in left:
            self._here.put_nowait(tensor)

    def fail(self, text: str) -> None:
        """No source has the rest."""
        self._here.put_nowait(Unavailable(text))

    async def tensors(self) -> AsyncGenerator[NamedTensor]:
        """See `Arriving`."""
        for _ in self.all:
            found = await self._here.get()
            if isinstance(found, Exception):
                raise found
            yield found

    async def whole(self) -> Mapping[str, NamedTensor]:
        """See `Arriving`."""
        self.let_in()
        return self.all

    def keep(self) -> None:
        """See `Arriving`."""
        self.kept = True


@pytest.fixture
def reloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Buckets on the host at each load of a rank; buckets are small."""
    monkeypatch.setattr(buckets, "MIB", 1 << 16)
    (tmp_path / "updates").mkdir()
    found: list[int] = []
    reload = ModelLoader.reload

    def noting(*args: Any, **kwargs: Any) -> None:
        found.append(len([*(tmp_path / "updates").rglob("bucket-*")]))
        reload(*args, **kwargs)

    monkeypatch.setattr(ModelLoader, "reload", noting)
    return found


@contextmanager
def served_before(engine: TensorRtLlm, *, restarts: int) -> Iterator[None]:
    """What happens within leaves the version before in service, after so many restarts."""
    before = len(async_llm.started)
    yield
    assert len(async_llm.started) == before + restarts
    assert engine.status().version == 1
    assert not STAGED_BYTES._value.get()


def arriving(seed: int = 1) -> Fetch:
    """The weights of a seed on their way."""
    return Fetch(published(reference("qwen3", seed=seed)))


async def check_greedy(engine: TensorRtLlm, seed: int) -> None:
    """It samples as the model of a seed."""
    ids = prompt_ids(30)
    assert is_greedy(reference("qwen3", seed=seed), ids, (await both(engine).sample(ids)).ids)


async def test_ranks_load_buckets_before_the_last_tensor_is_here(
    behaviour: Behaviour, model_path: Path, tmp_path: Path, reloads: list[int]
) -> None:
    """At most two buckets are on the host, and all belong to one control action. From then on no
    newer version ends the fetch."""
    folder = str(tmp_path / "updates")
    async with started(model_path, Role.BOTH, update_dir=folder, tensor_parallel=2) as engine:
        await load(engine)
        engine._llm._load_s = NEVER_S
        reloads.clear()
        fetch = arriving()
        loading = asyncio.create_task(engine.load_arriving(fetch, version=2))
        fetch.let_in(but=1)
        await until(lambda: len(reloads) >= 4)
        assert fetch.kept
        assert not loading.done()
        assert engine.status().version == 1
        fetch.let_in()
        await loading
        assert max(reloads) <= buckets.AT_ONCE
        assert core_of(engine).control_actions == 2
        await check_greedy(engine, seed=1)
        assert not STAGED_BYTES._value.get()


async def test_load_waits_for_a_fetch_that_takes_longer(
    behaviour: Behaviour, model_path: Path, tmp_path: Path, reloads: list[int]
) -> None:
    """Requests run on while the network is slow: the first version begins with its last tensor."""
    folder = str(tmp_path / "updates")
    async with started(model_path, Role.BOTH, update_dir=folder) as engine:
        fetch = arriving(seed=0)
        loading = asyncio.create_task(engine.load_arriving(fetch, version=1))
        fetch.let_in(but=1)
        await settle()
        assert not reloads
        assert not fetch.kept
        fetch.let_in()
        await loading
        await check_greedy(engine, seed=0)


async def test_fetch_that_fails_in_the_middle_restores_the_version_before(
    behaviour: Behaviour, model_path: Path, tmp_path: Path, reloads: list[int]
) -> None:
    """The ranks have a mix: the engine starts again, and takes the version at the next attempt."""
    folder = str(tmp_path / "updates")
    async with started(model_path, Role.BOTH, update_dir=folder, tensor_parallel=2) as engine:
        await load(engine)
        engine._llm._load_s = NEVER_S
        with served_before(engine, restarts=1):
            fetch = arriving()
            loading = asyncio.create_task(engine.load_arriving(fetch, version=2))
            fetch.let_in(but=1)
            await until(lambda: fetch.kept)
            fetch.fail("no source has it")
            with pytest.raises(Unavailable, match="no source has it"):
                await loading
        await check_greedy(engine, seed=0)
        again = arriving()
        again.let_in()
        await engine.load_arriving(again, version=2)
        await check_greedy(engine, seed=1)


@pytest.mark.parametrize(("number", "restarts"), [(0, 0), (-1, 1)])
async def test_broken_tensor_leaves_the_version_before(
    behaviour: Behaviour,
    model_path: Path,
    tmp_path: Path,
    reloads: list[int],
    number: int,
    restarts: int,
) -> None:
    """Before the load begins it costs nothing, after it a restart."""
    folder = str(tmp_path / "updates")
    async with started(model_path, Role.BOTH, update_dir=folder) as engine:
        await load(engine)
        engine._llm._load_s = NEVER_S
        fetch = arriving()
        name = list(fetch.all)[number]
        broken = fetch.all[name]
        fetch.all[name] = replace(broken, data=bytes(broken.data)[:-4] + b"\xff" * 4)
        with served_before(engine, restarts=restarts):
            loading = asyncio.create_task(engine.load_arriving(fetch, version=2))
            fetch.let_in(but=1)
            await until(lambda: fetch.kept or loading.done())
            fetch.let_in()
            with pytest.raises(BrokenWeights, match=f"{name} has NaN"):
                await loading
        await check_greedy(engine, seed=0)


async def test_weights_of_another_model_are_refused_without_their_data(
    behaviour: Behaviour, model_path: Path, reloads: list[int]
) -> None:
    """The manifest suffices."""
    async with started(model_path, Role.BOTH) as engine:
        await load(engine)
        fetch = arriving()
        del fetch.all["model.norm.weight"]
        refused = pytest.raises(UnfitWeights, match=r"1 tensors are missing \(model.norm.weight\)")
        with served_before(engine, restarts=0), refused:
            await engine.load_arriving(fetch, version=2)


async def test_names_of_another_kind_wait_for_all_data(
    behaviour: Behaviour, model_path: Path, reloads: list[int]
) -> None:
    """Whether a head is a second name of the embedding is in its data."""
    async with started(model_path, Role.BOTH) as engine:
        fetch = arriving()
        head = replace(fetch.all["model.embed_tokens.weight"], name="lm_head.weight")
        fetch.all[head.name] = head
        await engine.load_arriving(fetch, version=1)
        await check_greedy(engine, seed=1)


async def test_draft_heads_that_the_checkpoint_lacks_delay_no_load(
    behaviour: Behaviour, model_path: Path, tmp_path: Path, reloads: list[int]
) -> None:
    """They are left out as they arrive: their values are not examined, either."""
    folder = str(tmp_path / "updates")
    async with started(model_path, Role.BOTH, update_dir=folder) as engine:
        await load(engine)
        engine._llm._load_s = NEVER_S
        fetch = arriving()
        draft = replace(fetch.all["model.norm.weight"], name="mtp.0.norm", data=b"\xff" * 4)
        fetch.all = {draft.name: draft, **fetch.all}
        loading = asyncio.create_task(engine.load_arriving(fetch, version=2))
        fetch.let_in(but=1)
        await until(lambda: fetch.kept)
        assert not loading.done()
        fetch.let_in()
        await loading
        await check_greedy(engine, seed=1)


@pytest.mark.parametrize("fault", ["cancelled", "rank", "silence"])
async def test_load_that_ends_early_waits_for_no_tensor(
    behaviour: Behaviour, model_path: Path, tmp_path: Path, reloads: list[int], fault: str
) -> None:
    """The worker ends, a rank fails, or the fetch takes longer than an update may: requests wait
    for the load, and the rest may never come."""
    settings: dict[str, Any] = {"update_dir": str(tmp_path / "updates")}
    if fault == "silence":
        settings["update_timeout_s"] = 5.0
    async with started(model_path, Role.BOTH, **settings) as engine:
        await load(engine)
        engine._llm._load_s = NEVER_S
        with served_before(engine, restarts=1):
            fetch = arriving()
            if fault == "rank":
                behaviour.failing_reload = 0
            loading = asyncio.create_task(engine.load_arriving(fetch, version=2))
            reloads.clear()
            fetch.let_in(but=1)
            await until(lambda: reloads)
            if fault == "cancelled":
                loading.cancel()
            await asyncio.wait({loading})
            with pytest.raises((asyncio.CancelledError, Unavailable)):
                loading.result()
        await check_greedy(engine, seed=0)


def test_load_begins_when_the_rest_takes_no_longer_than_it() -> None:
    """By the rate so far, after half of the bytes and the first bucket; never with a gap of
    unknown length, as for the first version."""
    sizes = [10] * 10

    def starts(load_s: float, *, least_bytes: int = 0) -> int:
        start = _Start(sizes, load_s=load_s, least_bytes=least_bytes)
        passed = [start.passed(size, now_s=float(n)) for n, size in enumerate(sizes)]
        return passed.index(True) + 1

    # A tensor a second.
    assert starts(0.0) == 10
    assert starts(2.0) == 8
    assert starts(60.0) == 5
    assert starts(60.0, least_bytes=65) == 7
