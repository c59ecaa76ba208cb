"""Placement on workers of the role both: locality, conditional disaggregation, reported caches."""

from __future__ import annotations

from unittest import mock

import pytest

from forge.core.errors import Unavailable
from forge.core.placement import chain_hashes
from forge.core.placement.chain_hashes import PromptChains
from services.inference.engines.base import CacheChange
from services.inference.router.messages import (
    CacheReported,
    Decoded,
    PlaceDecode,
    PlacePrefill,
    Prefilled,
    Report,
)
from tests.support.inference.router import announced, both, harness, ids


async def test_workers_of_the_role_both_need_no_prefill() -> None:
    """A prompt is read where it is sampled, however long it is, and its next turn goes there."""
    router = await harness(both("b0"), both("b1"))
    prompt = ids(*range(3000))
    read = await router.actor.receive(PlacePrefill(ids=prompt, session="s:0:0"))
    done = Prefilled(placement=read, ids=prompt, cached_tokens=0, prefill_s=0.3)
    await router.actor.receive(done)
    decode = PlaceDecode(ids=prompt, session="s:0:0", read_by=read.worker)
    sampled = await router.actor.receive(decode)
    assert sampled.worker is read.worker
    answer = prompt + ids(*range(5000, 5050))
    await router.actor.receive(Decoded(placement=sampled, ids=answer, decode_s=1.0, tokens=50))
    turn = await router.actor.receive(PlacePrefill(ids=answer + ids(1), session="s:0:0"))
    assert turn.worker is read.worker
    # 3,050 tokens in blocks of 4 are known.
    assert turn.tokens == 3


@pytest.mark.parametrize("role", ["both", "prefill"])
async def test_block_of_a_session_is_hashed_once(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each placement, and not again for the next turn: histories are long."""
    router = await harness(announced("r", role), both("b0"))
    for worker in router.workers:
        change = CacheReported(worker=worker, change=CacheChange(anew=True))
        await router.actor.receive(change)
    chain_hash = mock.Mock(wraps=chain_hashes.chain_hash)
    monkeypatch.setattr(chain_hashes, "chain_hash", chain_hash)
    history = ids(*range(4000))
    for turn in range(3):
        read = await router.actor.receive(PlacePrefill(ids=history, session="s:0:0"))
        await router.actor.receive(
            Prefilled(placement=read, ids=history, cached_tokens=0, prefill_s=0.3)
        )
        sampled = await router.actor.receive(
            PlaceDecode(ids=history, session="s:0:0", read_by=read.worker)
        )
        history += ids(*range(40))
        await router.actor.receive(Decoded(placement=sampled, ids=history, decode_s=1.0, tokens=40))
        assert chain_hash.call_count == 1000 + 10 * (turn + 1)


@pytest.mark.parametrize(("new_tokens", "chosen"), [(99, "b0"), (150, "p0")])
async def test_long_new_part_is_read_by_a_prefill_worker(new_tokens: int, chosen: str) -> None:
    """A short or mostly cached prompt is read where it is sampled; the limit is on its new part."""
    router = await harness(announced("p0", "prefill"), both("b0"), local_prefill_tokens=100)
    prompt = ids(*range(3000))
    first = await router.actor.receive(PlacePrefill(ids=prompt, session="s:0:0"))
    assert first.worker.instance_id == "p0"
    done = Prefilled(placement=first, ids=prompt, cached_tokens=0, prefill_s=0.3)
    await router.actor.receive(done)
    sampled = await router.actor.receive(
        PlaceDecode(ids=prompt, session="s:0:0", read_by=first.worker)
    )
    assert sampled.worker.instance_id == "b0"
    await router.actor.receive(Decoded(placement=sampled, ids=prompt, decode_s=1.0, tokens=50))
    turn = prompt + ids(*range(5000, 5000 + new_tokens))
    placed = await router.actor.receive(PlacePrefill(ids=turn, session="s:0:0"))
    assert placed.worker.instance_id == chosen


async def test_prompt_is_sampled_by_the_weights_that_read_it() -> None:
    """During a canary workers have two versions: keys and values of one are of no use to the other.
    Without such a worker the cheapest one samples."""
    prefills = [announced("p0", "prefill", version=1), announced("p1", "prefill", version=2)]
    base, canary = announced("d0", "decode", version=1), announced("d1", "decode", version=2)
    router = await harness(*prefills, base, canary)
    readers = {worker.instance_id: worker for worker in router.workers}
    prompt = ids(*range(40))
    for reader, sampler in [("p0", "d0"), ("p1", "d1")] * 4:
        decode = PlaceDecode(ids=prompt, floor=readers[reader].version, read_by=readers[reader])
        assert (await router.actor.receive(decode)).worker.instance_id == sampler
    await router.change(*prefills, canary)
    placed = await router.actor.receive(PlaceDecode(ids=prompt, floor=1, read_by=readers["p0"]))
    assert placed.worker.instance_id == "d1"


async def test_drained_worker_gets_no_new_request() -> None:
    """Also where it has read the prompt; without another worker requests wait. Resumed, it serves
    again."""
    reader, other = both("b0", draining=True), both("b1")
    router = await harness(reader, other)
    workers = {worker.instance_id: worker for worker in router.workers}
    prompt = ids(*range(40))
    for _ in range(4):
        placed = await router.actor.receive(PlacePrefill(ids=prompt, session="s:0:0"))
        assert placed.worker.instance_id == "b1"
    decode = PlaceDecode(ids=prompt, read_by=workers["b0"])
    assert (await router.actor.receive(decode)).worker.instance_id == "b1"
    await router.change(reader)
    with pytest.raises(Unavailable, match="no decode instance"):
        await router.actor.receive(PlacePrefill(ids=prompt))
    await router.change(both("b0"))
    placed = await router.actor.receive(PlacePrefill(ids=prompt))
    assert placed.worker.instance_id == "b0"


async def test_reported_cache_decides_not_the_guess() -> None:
    """A worker that has evicted a prefix is not chosen for it. The status counts the blocks."""
    router = await harness(both("b0"), both("b1"))
    prompt = ids(*range(3000))
    workers = {worker.instance_id: worker for worker in router.workers}
    for name, stored in (("b0", ()), ("b1", PromptChains(prompt).of(4))):
        change = CacheChange(stored=stored, anew=True)
        await router.actor.receive(CacheReported(worker=workers[name], change=change))
    status = await router.actor.receive(Report())
    assert {one.instance_id: one.reported_blocks for one in status.workers} == {"b0": 0, "b1": 750}
    placed = await router.actor.receive(PlacePrefill(ids=prompt, session="s:0:0"))
    assert placed.worker.instance_id == "b1"


async def test_sessions_of_a_group_share_their_prompt_on_each_worker() -> None:
    """They spread over idle workers, and each worker computes the prompt once."""
    router = await harness(both("b0"), both("b1"))
    prompt = ids(*range(1000))
    placed = [
        await router.actor.receive(PlacePrefill(ids=prompt, session=f"g:{n}:0")) for n in range(64)
    ]
    assert sorted(one.tokens for one in placed)[-3:] == [1, 1000, 1000]
    assert {one.worker.instance_id for one in placed} == {"b0", "b1"}


async def test_unmeasured_worker_does_not_draw_a_session() -> None:
    """Its times count as those of the others, whatever the guess for a first worker is."""
    router = await harness(both("b0"))
    prompt = ids(*range(3000))
    for turn in range(8):
        read = await router.actor.receive(PlacePrefill(ids=prompt, session="s:0:0"))
        await router.actor.receive(
            Prefilled(placement=read, ids=prompt, cached_tokens=2000 * (turn > 0), prefill_s=3.0)
        )
        sampled = await router.actor.receive(
            PlaceDecode(ids=prompt, session="s:0:0", read_by=read.worker)
        )
        await router.actor.receive(Decoded(placement=sampled, ids=prompt, decode_s=10.0, tokens=50))
        await router.change(both("b0"), both("b1"))
        assert read.worker.instance_id == "b0"


@pytest.mark.parametrize(("beside", "chosen"), [(8, "b0"), (16, "b1")])
async def test_member_of_a_group_follows_its_prompt_to_a_busier_worker(
    beside: int, chosen: str
) -> None:
    """Up to a limit: b1, with four requests, would have to compute the prompt of 400 tokens."""
    router = await harness(both("b0"), both("b1"))
    workers = {worker.instance_id: worker for worker in router.workers}
    prompt = ids(*range(400))
    for name, running, stored in (("b0", beside, PromptChains(prompt).of(4)), ("b1", 4, ())):
        change = CacheChange(stored=stored, anew=True)
        await router.actor.receive(CacheReported(worker=workers[name], change=change))
        workers[name].running = running
    placed = await router.actor.receive(PlacePrefill(ids=prompt + ids(1)))
    assert placed.worker.instance_id == chosen


async def test_placement_looks_once_at_the_load_of_each_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cost of a placement grows with the number of workers, not with its square."""
    router = await harness(*(both(f"b{n}") for n in range(20)))
    homes = router.actor._fleet.homes
    await router.actor.receive(PlacePrefill(ids=ids(1), session="s:0:0"))
    live = mock.Mock(wraps=homes.live)
    monkeypatch.setattr(type(homes), "live", lambda _, worker: live(worker))
    await router.actor.receive(PlacePrefill(ids=ids(1), session="s:0:0"))
    assert live.call_count == 2 * 20
