"""The router's fleet and actor: placement, suspicion, the line, the figures."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY

from forge.core.errors import ResourceExhausted, Unavailable
from forge.core.placement.chain_hashes import PromptChains
from forge.runtime.coordination import Instance
from services.inference.router.admission_queue import MIN_ADMITTED
from services.inference.router.fleet.fleet import SUSPECT_S, Fleet
from services.inference.router.fleet.versions import TooOld
from services.inference.router.messages import (
    Admit,
    Decoded,
    Failed,
    HoldChanged,
    Leave,
    PlaceDecode,
    PlacePrefill,
    Prefilled,
    Report,
    TokensSampled,
)
from tests.support.inference.router import DECODE, OTHER, PROMPT, announced, harness, ids


async def test_requests_go_to_the_worker_with_their_prefix() -> None:
    """Two prompts settle on two workers, and their follow-ups go there again."""
    router = await harness(announced("p0", "prefill"), announced("p1", "prefill"), DECODE)
    first = await router.actor.receive(PlacePrefill(ids=PROMPT))
    second = await router.actor.receive(PlacePrefill(ids=OTHER))
    assert first.worker.instance_id != second.worker.instance_id
    for placement, prompt in ((first, PROMPT), (second, OTHER)):
        await router.actor.receive(
            Prefilled(placement=placement, ids=prompt, cached_tokens=0, prefill_s=0.01)
        )
    assert await router.prefill(PROMPT + ids(7)) == first.worker.instance_id
    assert await router.prefill(OTHER + ids(7)) == second.worker.instance_id


async def test_unreadable_worker_hides_no_change_of_the_others() -> None:
    """It gets no request; a worker that has left meanwhile is gone, and a new one serves."""
    odd = announced("odd", "prefill", cache_tokens="many")
    router = await harness(announced("p0", "prefill"), DECODE)
    await router.change(odd, announced("p1", "prefill"), DECODE)
    assert {one.instance_id for one in router.workers} == {"p1", "d"}
    assert await router.prefill(PROMPT) == "p1"


async def test_load_outweighs_a_cached_prefix() -> None:
    """One hot prefix does not draw every request to one decode worker."""
    router = await harness(announced("d0", "decode"), announced("d1", "decode"))
    placed = [await router.actor.receive(PlaceDecode(ids=PROMPT)) for _ in range(16)]
    first = placed[0]
    await router.actor.receive(Decoded(placement=first, ids=PROMPT, decode_s=1.0))
    placed += [await router.actor.receive(PlaceDecode(ids=PROMPT)) for _ in range(8)]
    counts = [sum(p.worker.instance_id == name for p in placed) for name in ("d0", "d1")]
    assert min(counts) >= 8


@pytest.mark.parametrize(("stored_tokens", "chosen"), [("0", "p0"), ("100000", "p1")])
async def test_stored_prefix_is_near_to_every_worker(stored_tokens: str, chosen: str) -> None:
    """The worker that computed it is busy for less time than computing it again would take, and
    for more than reading it takes."""
    workers = [
        announced(name, "prefill", cache_tokens="8000", stored_tokens=stored_tokens)
        for name in ("p0", "p1")
    ]
    router = await harness(*workers, DECODE)
    prompt = ids(*range(3200))
    assert await router.prefill(prompt) == "p0"
    busy = await router.actor.receive(PlacePrefill(ids=prompt + ids(*range(5000, 5800))))
    assert busy.worker.instance_id == "p0"
    placed = await router.actor.receive(PlacePrefill(ids=prompt + ids(1)))
    assert placed.worker.instance_id == chosen


async def test_stored_prefix_of_the_new_weights_outlives_the_swap_of_others() -> None:
    """Workers swap one by one. The first to swap writes a prompt, and reads of the next one to swap
    are near to it; those of a worker with the earlier weights are not."""

    def swapped(*versions: int) -> list[Instance]:
        found = [announced("d", "decode", version=max(versions))]
        for n, version in enumerate(versions):
            found.append(announced(f"p{n}", "prefill", version=version, stored_tokens="100000"))
        return found

    router = await harness(*swapped(1, 1, 1))
    prompt = PromptChains(ids(*range(3200)))
    store = router.actor._fleet.costs.of("unknown").store
    await router.change(*swapped(2, 1, 1))
    placed = await router.actor.receive(PlacePrefill(ids=prompt.ids, floor=2))
    await router.actor.receive(
        Prefilled(placement=placed, ids=prompt.ids, cached_tokens=0, prefill_s=0.1)
    )
    await router.change(*swapped(2, 2, 1))
    assert [store.tokens(prompt.ids, version=version) for version in (1, 2)] == [0, 3200]
    by_name = {one.instance_id: one for one in router.workers}
    costs = [
        router.actor._fleet._candidate(
            by_name[name], prompt, beside=0.0, now_s=router.clock(), has_read=False
        ).stored_tokens
        for name in ("p0", "p1", "p2")
    ]
    assert costs == [3200, 3200, 0]


async def test_failed_worker_is_avoided_for_a_while() -> None:
    """The other one is chosen; without another none is, until time has passed."""
    router = await harness(announced("d0", "decode"), announced("d1", "decode"))
    placement = await router.actor.receive(PlaceDecode(ids=PROMPT))
    await router.actor.receive(Failed(placement=placement, dead=True))
    other = await router.actor.receive(PlaceDecode(ids=PROMPT))
    assert other.worker.instance_id != placement.worker.instance_id
    await router.actor.receive(Failed(placement=other, dead=True))
    with pytest.raises(Unavailable, match="decode"):
        await router.actor.receive(PlaceDecode(ids=PROMPT))
    router.clock.now_s += SUSPECT_S
    await router.actor.receive(PlaceDecode(ids=PROMPT))


async def test_prompt_is_not_prefilled_without_a_decode_worker() -> None:
    """Without a decode worker a prompt is not placed for prefill either."""
    router = await harness(announced("p0", "prefill"))
    with pytest.raises(Unavailable, match="decode"):
        await router.actor.receive(PlacePrefill(ids=PROMPT))


async def test_restarted_worker_is_used_at_once() -> None:
    """The same instance under a new address is a new worker, with an empty cache."""
    router = await harness(announced("d0", "decode"))
    placement = await router.actor.receive(PlaceDecode(ids=PROMPT))
    await router.actor.receive(Failed(placement=placement, dead=True))
    await router.change(announced("d0", "decode", address="d0:2"))
    again = await router.actor.receive(PlaceDecode(ids=PROMPT))
    assert again.worker.address == "d0:2"
    assert again.worker is not placement.worker


async def test_worker_that_refuses_is_not_avoided() -> None:
    """After a Forge error it is chosen again at once."""
    router = await harness(announced("p0", "prefill"), DECODE)
    placement = await router.actor.receive(PlacePrefill(ids=PROMPT))
    await router.actor.receive(Failed(placement=placement, dead=False))
    assert (await router.actor.receive(PlacePrefill(ids=PROMPT))).worker.instance_id == "p0"


async def test_router_queue_is_bounded() -> None:
    """Beyond capacity requests wait, beyond the limit they are refused; an ended request admits
    one."""
    router = await harness(announced("d0", "decode", capacity="1"), queue_limit=2)
    admitted = [await router.actor.receive(Admit()) for _ in range(MIN_ADMITTED)]
    waiting = [await router.actor.receive(Admit()) for _ in range(2)]
    assert all(one.granted.done() for one in admitted)
    assert not any(one.granted.done() for one in waiting)
    with pytest.raises(ResourceExhausted) as refused:
        await router.actor.receive(Admit())
    assert refused.value.retry_after_s is not None
    await router.actor.receive(Leave(admission=admitted[0]))
    assert waiting[0].granted.done()
    assert not waiting[1].granted.done()


async def test_cancelled_request_takes_no_place_in_the_queue() -> None:
    """It neither blocks the queue nor holds a slot."""
    router = await harness(announced("d0", "decode", capacity="1"))
    admitted = [await router.actor.receive(Admit()) for _ in range(MIN_ADMITTED)]
    gave_up = await router.actor.receive(Admit())
    waiting = await router.actor.receive(Admit())
    gave_up.granted.cancel()
    await router.actor.receive(Leave(admission=gave_up))
    await router.actor.receive(Leave(admission=admitted[0]))
    assert waiting.granted.done()


async def test_waiting_requests_fail_when_the_router_stops() -> None:
    """After a crash or a stop no request waits forever, nor counts as cancelled."""
    router = await harness(announced("d0", "decode", capacity="1"), queue_limit=3)
    for _ in range(MIN_ADMITTED):
        await router.actor.receive(Admit())
    waiting, gave_up = [await router.actor.receive(Admit()) for _ in range(2)]
    gave_up.granted.cancel()
    await router.actor.stopped()
    with pytest.raises(Unavailable):
        await waiting.granted


async def test_queued_request_fails_when_no_worker_samples() -> None:
    """After the patience of the router, from its arrival or from the loss of the last worker on, as
    an admitted one does. While one samples it waits."""
    router = await harness(announced("d0", "decode", capacity="1"), patience_s=0.01)
    for _ in range(MIN_ADMITTED):
        await router.actor.receive(Admit())
    first = await router.actor.receive(Admit())
    router.clock.now_s += 100
    await router.change()
    second = await router.actor.receive(Admit())
    router.clock.now_s += 0.01
    for one in (first, second):
        with pytest.raises(Unavailable, match="no decode instance"):
            await one.granted
    for one in (first, second):
        await router.actor.receive(Leave(admission=one))


async def test_joining_decode_worker_admits_waiting_requests() -> None:
    """It serves the requests in the queue."""
    small = announced("d0", "decode", capacity="1")
    router = await harness(small, queue_limit=100)
    admissions = [await router.actor.receive(Admit()) for _ in range(40)]
    assert sum(one.granted.done() for one in admissions) == MIN_ADMITTED
    await router.change(small, announced("d1", "decode", capacity="100"))
    assert all(one.granted.done() for one in admissions)


async def test_router_report_counts_versions_load_and_tokens() -> None:
    """Computed and cached tokens, and tokens per second over the window."""
    router = await harness(
        announced("p0", "prefill", version=3), announced("d0", "decode", version=2)
    )
    placement = await router.actor.receive(PlacePrefill(ids=PROMPT))
    await router.actor.receive(
        Prefilled(placement=placement, ids=PROMPT, cached_tokens=32, prefill_s=0.01)
    )
    await router.actor.receive(PlaceDecode(ids=PROMPT))
    await router.actor.receive(TokensSampled(tokens=50))
    router.clock.now_s += 5
    await router.actor.receive(TokensSampled(tokens=50))
    report = await router.actor.receive(Report())
    assert report.weight_version == 2
    assert report.sampled_tokens == 100
    assert report.sampled_tokens_per_s == 10
    prefill, decode = report.workers
    assert (prefill.computed_tokens, prefill.cached_tokens) == (8, 32)
    assert (decode.running, decode.queued) == (1, 0)
    router.clock.now_s += 60
    assert (await router.actor.receive(Report())).sampled_tokens_per_s == 0


def test_new_weights_clear_the_routers_view_of_a_cache() -> None:
    """The worker cleared its cache at the swap."""
    fleet = Fleet()
    fleet.update([announced("p0", "prefill", version=1)], now_s=0)
    worker = fleet.workers["p0"]
    prompt = PromptChains(PROMPT)
    worker.cached.expect(prompt, until_s=60)
    assert worker.cached.tokens(prompt, now_s=0) == 40
    fleet.update([announced("p0", "prefill", version=2)], now_s=0)
    assert fleet.workers["p0"] is worker
    assert worker.cached.tokens(prompt, now_s=0) == 0


def test_leaving_worker_is_reported_once() -> None:
    """An unchanged fleet reports nothing."""
    fleet = Fleet()
    fleet.update([announced("p0", "prefill"), announced("d0", "decode")], now_s=0)
    gone = fleet.update([announced("d0", "decode")], now_s=0)
    assert [worker.instance_id for worker in gone] == ["p0"]
    assert fleet.update([announced("d0", "decode")], now_s=0) == []
    with pytest.raises(Unavailable, match="prefill"):
        fleet.place_prefill(PromptChains(PROMPT), now_s=0)


async def test_answer_does_not_move_to_older_weights() -> None:
    """Of two workers it takes the newer one, at any load. Without one it waits, until the version
    has been in service for the limit; then an older worker continues it, and is counted."""
    old, new = announced("d0", "decode", version=1), announced("d1", "decode", version=2)
    router = await harness(old, new)
    for _ in range(30):
        placed = await router.actor.receive(PlaceDecode(ids=PROMPT, floor=2))
        assert placed.worker.instance_id == "d1"
    await router.change(old)
    with pytest.raises(TooOld, match="weights 2"):
        await router.actor.receive(PlaceDecode(ids=PROMPT, floor=2))
    router.clock.now_s += 10
    before = REGISTRY.get_sample_value("forge_inference_older_weights_total") or 0.0
    placed = await router.actor.receive(PlaceDecode(ids=PROMPT, floor=2))
    assert placed.worker.instance_id == "d0"
    assert REGISTRY.get_sample_value("forge_inference_older_weights_total") == before + 1
    # No worker has announced version 3 yet, but its token shows it.
    with pytest.raises(TooOld):
        await router.actor.receive(PlaceDecode(ids=PROMPT, floor=3))


async def test_answer_waits_for_no_version_above_a_hold() -> None:
    """After a rollback no worker will have it; after the promotion the rule holds again."""
    router = await harness(announced("d0", "decode", version=1))
    await router.actor.receive(HoldChanged(newest=1))
    placed = await router.actor.receive(PlaceDecode(ids=PROMPT, floor=2))
    assert placed.worker.instance_id == "d0"
    await router.actor.receive(HoldChanged(newest=None))
    with pytest.raises(TooOld):
        await router.actor.receive(PlaceDecode(ids=PROMPT, floor=2))


async def test_new_answer_begins_no_newer_than_decode() -> None:
    """Else its second token would wait for a decode worker, or be older than the first."""
    prefills = [announced("p0", "prefill", version=1), announced("p1", "prefill", version=2)]
    router = await harness(*prefills, announced("d0", "decode", version=1))
    for _ in range(8):
        assert await router.prefill(PROMPT) == "p0"
    await router.change(*prefills, announced("d0", "decode", version=2))
    placed = [await router.actor.receive(PlacePrefill(ids=OTHER)) for _ in range(8)]
    assert "p1" in {one.worker.instance_id for one in placed}
    await router.change(prefills[1], announced("d0", "decode", version=1))
    assert await router.prefill(PROMPT) == "p1"
