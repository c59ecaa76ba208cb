"""Placement on unlike engines: what each can do, take over and continue, and what it costs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from forge.core.errors import Unavailable, UnsupportedByEngines
from forge.runtime.coordination import Instance
from forge.v1 import inference_pb2 as pb
from forge.v1.common_pb2 import SampledTokens, SamplingParams
from services.inference.engines.base import Grammar, Prompt, Reweighting, Sampling
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.embedded.roles.wiring import CAPABILITIES as EMBEDDED
from services.inference.router.fleet.canary import Canary
from services.inference.router.fleet.costs import Costs, Times
from services.inference.router.fleet.fleet import SUSPECT_S
from services.inference.router.fleet.needs import CannotContinue, Needs
from services.inference.router.fleet.workers import Engine, engine_of
from services.inference.router.messages import (
    Admit,
    Decoded,
    Failed,
    PlaceDecode,
    Placement,
    PlacePrefill,
    Prefilled,
)
from services.inference.router.request.answer import RoutedAnswer
from tests.support.inference.router import PROMPT, Harness, announced, harness

STREAM = replace(
    EMBEDDED,
    engine="stream",
    draws="stream",
    shares=False,
    resumes=frozenset(),
    hand_offs=frozenset(),
)
"""Can all that the embedded engine can, and nothing of an answer that began elsewhere."""
LEAST = Capabilities(
    engine="least", roles=frozenset({"both"}), update="in_flight", draws="positional"
)
PLAIN = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=9, stop_ids=frozenset({0}), seed=1)
GRAMMAR = replace(PLAIN, grammar=Grammar(kind="regex", text="a"))
PENALTIES = replace(PLAIN, reweighting=Reweighting(presence=1.0))
PATIENCE_S = 30.0


def worker(
    name: str, able: Capabilities | None, *, role: str = "both", model: str = "", **options: Any
) -> Instance:
    if able is not None:
        options["capabilities"] = able.encode()
    if model:
        options["agreed"] = json.dumps({"/model config.json": model})
    kind = "prefill" if role == "prefill" else "decode"
    return announced(name, kind, role=role, cache_tokens="8000", **options)


def engine(able: Capabilities | None, **options: Any) -> Engine:
    return engine_of(worker("any", able, **options))


async def fleet(*workers: Instance, **options: Any) -> Harness:
    return await harness(*workers, patience_s=PATIENCE_S, **options)


async def place(router: Harness, needs: Needs, *, prompt: bytes = PROMPT) -> str:
    placed: Placement = await router.actor.receive(PlacePrefill(ids=prompt, needs=needs))
    return placed.worker.instance_id


def test_capabilities_survive_the_directory() -> None:
    """All of them; a field of a later release is ignored, a value of one is an error."""
    for able in (EMBEDDED, STREAM, LEAST):
        assert Capabilities.decode(able.encode()) == able
    later = json.loads(LEAST.encode())
    assert Capabilities.decode(json.dumps(later | {"telepathy": True})) == LEAST
    with pytest.raises(ValueError, match="update"):
        Capabilities.decode(json.dumps(later | {"update": "never"}))


@pytest.mark.parametrize(
    "asked",
    [
        GRAMMAR,
        PENALTIES,
        replace(PLAIN, min_tokens=2),
        replace(PLAIN, top_p=0.9),
        replace(PLAIN, top_logprobs=3),
    ],
)
async def test_request_goes_to_an_engine_that_can_serve_it(asked: Sampling) -> None:
    """At any load; others take the idle worker."""
    router = await fleet(worker("a-least", LEAST), worker("b-embedded", EMBEDDED))
    for _ in range(8):
        assert await place(router, Needs(sampling=asked)) == "b-embedded"
    assert await place(router, Needs(sampling=PLAIN)) == "a-least"


async def test_request_that_no_engine_can_serve_is_refused_at_once() -> None:
    """Before it waits for a place, with the ability and all engines that are present."""
    other = replace(LEAST, engine="other", grammars=frozenset({"lark"}))
    router = await fleet(worker("a", LEAST), worker("b", LEAST), worker("c", other))
    words = (
        r"no worker can serve this request: the engine least cannot serve "
        r"sampling.grammar.regex: its kinds are none; the engine other cannot serve "
        r"sampling.grammar.regex: its kinds are lark$"
    )
    for message in (
        Admit(needs=Needs(sampling=GRAMMAR)),
        PlacePrefill(ids=PROMPT, needs=Needs(sampling=GRAMMAR)),
    ):
        with pytest.raises(UnsupportedByEngines, match=words):
            await router.actor.receive(message)
    await router.actor.receive(Admit(needs=Needs(sampling=PLAIN)))


async def test_engine_that_has_just_left_may_return() -> None:
    """Its worker restarts: the request waits as for any worker. Later it is refused."""
    least, able = worker("a", LEAST), worker("b", EMBEDDED)
    router = await fleet(least, able)
    await router.change(least)
    needs = Needs(sampling=GRAMMAR)
    await router.actor.receive(Admit(needs=needs))
    with pytest.raises(Unavailable, match="no worker can serve"):
        await place(router, needs)
    router.clock.now_s += PATIENCE_S
    with pytest.raises(UnsupportedByEngines):
        await place(router, needs)


async def test_suspected_engine_is_awaited() -> None:
    """A worker that failed a call is still there."""
    router = await fleet(worker("a", LEAST), worker("b", EMBEDDED))
    needs = Needs(sampling=GRAMMAR, sampled_tokens=3, begun_on=engine(EMBEDDED))
    placed = await router.actor.receive(PlacePrefill(ids=PROMPT, needs=needs))
    await router.actor.receive(Failed(placement=placed, dead=True))
    with pytest.raises(Unavailable, match="no prefill instance is available") as waits:
        await place(router, needs)
    assert not isinstance(waits.value, CannotContinue)
    router.clock.now_s += SUSPECT_S
    assert await place(router, needs) == "b"


async def test_worker_of_an_earlier_release_gets_any_request() -> None:
    """It announces nothing, and refuses by itself; so does one whose entry cannot be read."""
    unreadable = worker("u", None, capabilities='{"engine": 3}')
    for old in (worker("o", None), unreadable):
        router = await fleet(old)
        assert await place(router, Needs(sampling=GRAMMAR)) == old.instance_id
        moved = Needs(sampling=PENALTIES, seeded=True, sampled_tokens=4, begun_on=engine(EMBEDDED))
        assert await place(router, moved) == old.instance_id


async def test_keys_and_values_go_to_engines_that_take_them() -> None:
    """A prompt is read by a worker that has a taker; decode is placed on one. Without a taker the
    caller waits, and the error names the engines."""
    other = replace(EMBEDDED, engine="other", hand_offs=frozenset({"other"}))
    reads = worker("p", EMBEDDED, role="prefill")
    foreign = [worker("q", other, role="prefill"), worker("d0", STREAM, role="decode")]
    taker = worker("d1", EMBEDDED, role="decode")
    router = await fleet(reads, *foreign, taker)
    for _ in range(6):
        placed = await router.actor.receive(PlacePrefill(ids=PROMPT))
        assert placed.worker.instance_id == "p"
        decode = PlaceDecode(ids=PROMPT, read_by=placed.worker)
        assert (await router.actor.receive(decode)).worker.instance_id == "d1"
    await router.change(reads, *foreign)
    with pytest.raises(Unavailable, match=r"takes the keys and values of .* of embedded, other"):
        await router.actor.receive(PlacePrefill(ids=PROMPT))
    with pytest.raises(Unavailable, match="instances of embedded"):
        await router.actor.receive(PlaceDecode(ids=PROMPT, read_by=placed.worker))


async def test_new_answer_begins_no_newer_than_those_that_take_it() -> None:
    """A newer worker of another engine, which cannot take it, does not count."""
    old, new = (worker(f"p{v}", EMBEDDED, role="prefill", version=v) for v in (1, 2))
    taker = worker("d", EMBEDDED, role="decode", version=1)
    router = await fleet(old, new, taker, worker("s", STREAM, version=2, capacity="1"))
    needs = Needs(sampling=replace(PLAIN, top_p=0.5))
    for _ in range(4):
        assert await place(router, needs) in ("p1", "s")


async def test_costs_of_engines_are_learned_apart() -> None:
    """A slow engine changes nothing for another, and a new worker counts as those of its engine."""
    router = await fleet(worker("a", STREAM), worker("b", EMBEDDED), worker("c", EMBEDDED))
    slow, fast = router.workers[0], router.workers[1]
    for one, seconds in ((slow, 100.0), (fast, 0.1)):
        for _ in range(6):
            read = Placement(chosen=one, session="")
            await router.actor.receive(
                Prefilled(placement=read, ids=PROMPT, cached_tokens=0, prefill_s=seconds)
            )
            done = Decoded(
                placement=Placement(chosen=one), ids=PROMPT, decode_s=seconds, tokens=10,
                fetched_tokens=10, fetch_s=seconds,
            )  # fmt: skip
            await router.actor.receive(done)
            one.running += 2
    costs, unmeasured = router.actor._fleet.costs, Times()
    assert costs.prefill_s("stream", unmeasured) > 100 * costs.prefill_s("embedded", unmeasured)
    assert costs.each_s("stream", unmeasured) > 100 * costs.each_s("embedded", unmeasured)
    assert costs.transfer_s("stream") > 100 * costs.transfer_s("embedded")
    # `c` has no measurement of its own and counts as `b`.
    slow.running = fast.running = 0
    fast.pending_tokens = 4000
    assert await place(router, Needs(sampling=PLAIN)) == "c"


def test_engine_without_measurements_counts_as_the_mean_of_others() -> None:
    """A guess would draw or repel all requests; the first measurement of its own ends that."""
    costs = Costs()
    for name, seconds in (("one", 10.0), ("two", 30.0)):
        for _ in range(5):
            costs.observe_prefill(name, Times(), seconds=seconds * 5000, tokens=5000)
            costs.observe_decode(name, Times(), seconds=seconds, tokens=1, running=1)
    one, two = (costs.prefill_s(name, Times()) for name in ("one", "two"))
    assert costs.prefill_s("new", Times()) == pytest.approx((one + two) / 2)
    assert costs.each_s("new", Times()) == pytest.approx(costs.each_s("one", Times()) * 2)
    costs.observe_prefill("new", Times(), seconds=5000.0, tokens=5000)
    assert costs.prefill_s("new", Times()) < one


async def test_kv_store_is_that_of_its_engine() -> None:
    """What an engine without a store has read is in no store."""
    stored = worker("b", EMBEDDED, stored_tokens="100000")
    router = await fleet(worker("a", STREAM), stored)
    reader = next(one for one in router.workers if one.instance_id == "a")
    done = Prefilled(
        placement=Placement(chosen=reader), ids=PROMPT * 4, cached_tokens=0, prefill_s=0.1
    )
    await router.actor.receive(done)
    costs = router.actor._fleet.costs
    assert costs.of("embedded").store.tokens(PROMPT * 4, version=1) == 0
    assert costs.of("stream").store.tokens(PROMPT * 4, version=1) == 0


@pytest.mark.parametrize(
    ("asked", "options", "before", "after", "change"),
    [
        (PLAIN, {}, EMBEDDED, STREAM, ""),
        (PLAIN, {"seeded": True}, EMBEDDED, EMBEDDED, ""),
        (PLAIN, {"seeded": True}, EMBEDDED, replace(EMBEDDED, engine="fork"), "draws"),
        (PLAIN, {"seeded": True}, STREAM, STREAM, "draws"),
        (PLAIN, {"seeded": True}, STREAM, EMBEDDED, "draws"),
        (replace(PLAIN, top_p=0.5), {}, EMBEDDED, STREAM, "shares"),
        (replace(PLAIN, top_p=0.5), {}, STREAM, EMBEDDED, ""),
    ],
)
async def test_moved_answer_prefers_an_engine_that_changes_nothing(
    asked: Sampling, options: Any, before: Capabilities, after: Capabilities, change: str
) -> None:
    """Draws of a caller's seed continue on the same engine alone, and only if they are positional;
    shares on one that computes them. Without such a worker the answer starts over."""
    needs = Needs(sampling=asked, sampled_tokens=4, begun_on=engine(before), **options)
    router = await fleet(worker("after", after))
    assert needs.change_by(engine(after)) == change
    assert await place(router, needs) == "after"
    if change and before.draws == "positional":
        router = await fleet(worker("after", after), worker("z-same", before))
        for _ in range(8):
            assert await place(router, needs) == "z-same"


async def test_moved_answer_prefers_workers_with_its_model() -> None:
    """During a change of the model's config.json; keys and values go to that model alone."""
    needs = Needs(sampling=PLAIN, sampled_tokens=4, begun_on=engine(EMBEDDED, model="one"))
    one, two = (worker(f"w-{name}", EMBEDDED, model=name) for name in ("one", "two"))
    router = await fleet(one, two)
    for _ in range(8):
        assert await place(router, needs) == "w-one"
    router = await fleet(two)
    assert await place(router, needs) == "w-two"
    assert not engine(EMBEDDED, model="two").takes_from(engine(EMBEDDED, model="one"))


@pytest.mark.parametrize("asked", [GRAMMAR, PENALTIES])
async def test_answer_with_state_continues_where_it_can_be_resumed(asked: Sampling) -> None:
    """Never on an engine that begins it only at its first token, as long as one that resumes is
    present; then the error says whether one may return."""
    able, begins = worker("b", EMBEDDED), worker("a", STREAM)
    router = await fleet(able, begins)
    needs = Needs(sampling=asked, sampled_tokens=4, begun_on=engine(STREAM))
    for _ in range(8):
        assert await place(router, needs) == "b"
    await router.change(begins)
    for may_return in (True, False):
        with pytest.raises(CannotContinue, match="first") as stuck:
            await place(router, needs)
        assert stuck.value.may_return is may_return
        router.clock.now_s += PATIENCE_S
    assert await place(router, Needs(sampling=asked)) == "a"


async def test_worker_that_returns_with_another_engine_is_a_new_one() -> None:
    """At the same address and under the same name."""
    router = await fleet(worker("a", EMBEDDED))
    await router.change(worker("a", LEAST))
    (found,) = router.workers
    assert found.engine.name == "least"


async def test_engine_that_has_refused_a_request_gets_it_no_more() -> None:
    """Another one does; when all have refused, their words are the error."""
    router = await fleet(worker("a", STREAM), worker("b", STREAM), worker("c", EMBEDDED))
    refused = {one.engine: "not with min_tokens" for one in router.workers[:1]}
    for _ in range(6):
        assert await place(router, Needs(sampling=GRAMMAR, refused_by=refused)) == "c"
    router = await fleet(worker("a", STREAM))
    with pytest.raises(UnsupportedByEngines, match=r"this request: not with min_tokens$"):
        await place(router, Needs(sampling=GRAMMAR, refused_by=refused))


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
async def test_canary_gets_its_share_of_the_sessions(share: float) -> None:
    """At any load, and all turns of a session go to one engine, whichever router places them."""
    canary = Canary(engine="stream", share=share)
    workers = worker("a", EMBEDDED), worker("b", STREAM), worker("c", STREAM)
    routers = [await fleet(*workers, canary=canary) for _ in range(2)]
    names: list[str] = []
    for number in range(400):
        message = PlacePrefill(ids=PROMPT, session=f"task:{number}:0", key=f"task:{number}:0")
        placed = [await router.actor.receive(message) for router in routers]
        engines = {one.worker.engine.name for one in placed}
        assert len(engines) == 1
        names += engines
    assert names.count("stream") / 400 == pytest.approx(share, abs=0.05)


async def test_canary_never_costs_an_answer() -> None:
    """Without another worker that can serve a request, the share does not matter."""
    for share, able in ((0.0, STREAM), (1.0, EMBEDDED)):
        router = await fleet(worker("a", able), canary=Canary(engine="stream", share=share))
        assert await place(router, Needs(sampling=GRAMMAR)) == "a"
    router = await fleet(
        worker("a", LEAST), worker("b", STREAM), canary=Canary(engine="stream", share=0.0)
    )
    assert await place(router, Needs(sampling=GRAMMAR)) == "b"


def test_answer_names_its_engines_in_order() -> None:
    """An engine that continues its own tokens counts once; a resampled answer forgets."""
    request = pb.SampleRequest(prompt_ids=PROMPT, sampling=SamplingParams(max_tokens=9))
    answer = RoutedAnswer(
        request, Prompt(request_id="r", ids=PROMPT, sampling=PLAIN), context_tokens=1000
    )
    token = SampledTokens(ids=bytes(4), logprobs=bytes(4), weight_versions=bytes(4))
    for able in (STREAM, STREAM, EMBEDDED, STREAM, None):
        answer.take(token, engine(able))
    assert answer.engine == "stream+embedded+stream+unknown"
    answer.reset()
    assert (answer.engine, answer.tokens, answer.needs) == ("", 0, Needs(sampling=PLAIN))
