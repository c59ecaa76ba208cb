"""Early hand-offs: keys and values that travel while the prompt is computed, between the real
servicers of two engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from forge.core.errors import FailedPrecondition, NotFound
from forge.v1 import inference_pb2 as pb
from services.inference.engines.base import RefusedHandOff
from services.inference.engines.embedded.roles import early_reads
from services.inference.engines.metrics import REFUSED_HAND_OFFS
from services.inference.worker.metrics import HAND_OFFS
from tests.contract import engines
from tests.contract.engines import prompt_ids, published, reference
from tests.support.inference.hand_off import Damage, Joined, Passes, held_passes, joined
from tests.support.inference.transformers_answers import greedy_of
from tests.support.runtime.waiting import until

IDS = prompt_ids(400)
PASS_TOKENS = 64
FIRST_SHAPE = (3, 2, 2, 64, 16)


@pytest_asyncio.fixture(scope="module", params=engines.SEPARATE)
async def started(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Joined]:
    """Both engines; a prompt of 400 tokens takes seven passes."""
    folder = tmp_path_factory.mktemp("early")
    engines.CONFIGS["qwen3"].save_pretrained(folder)
    start = engines.SEPARATE[request.param]
    async with start(folder, pass_tokens=PASS_TOKENS) as pair, joined(pair) as workers:
        yield workers


@pytest_asyncio.fixture
async def workers(started: Joined) -> Joined:
    """With version 1 and empty caches."""
    await started.pair.load(published(reference("qwen3")), version=1)
    started.sender.sent.clear()
    started.sender.damage = None
    return started


def refused(reason: str) -> float:
    found: float = REFUSED_HAND_OFFS.labels(reason)._value.get()
    return found


async def let(workers: Joined, passes: Passes, count: int) -> None:
    """Lets the first passes run, one after the other, each after the blocks of those before it."""
    for number in range(count):
        passes.let(1)
        await workers.sender.has_sent(number + 1)


def idle(workers: Joined) -> bool:
    """Neither side has anything of any request."""
    prefill: Any = workers.pair.prefill
    return (
        workers.pair.decode.status().running == 0
        and not len(prefill._early)
        and workers.decode.fetcher.room.used_bytes == 0
    )


async def test_blocks_travel_while_the_prompt_is_computed(workers: Joined) -> None:
    """Each pass sends its tokens before the next one runs; the answer is that of a whole hand-off,
    and the decode worker has the prompt cached as after one."""
    early = HAND_OFFS.labels("early")
    before = early._value.get()
    with held_passes() as passes:
        sampling = asyncio.create_task(workers.sample(IDS))
        await let(workers, passes, 6)
        assert not sampling.done()
        passes.free()
        answer = await sampling
    assert [block.from_token for block in workers.sender.sent] == list(range(0, 400, 64))
    assert tuple(workers.sender.sent[0].slice.shape) == FIRST_SHAPE
    assert [block.HasField("first") for block in workers.sender.sent] == [False] * 6 + [True]
    assert answer.ids == greedy_of(reference("qwen3"), IDS, 16)
    assert answer.fetched_tokens == 400
    assert early._value.get() == before + 1
    assert (await workers.pair.sample([*IDS, 7])).fetched_tokens == 1
    assert idle(workers)


async def test_equal_prompts_travel_once(workers: Joined) -> None:
    """The first turns of a group: the others wait, and fetch the part of a block."""
    ids = prompt_ids(403)
    answers = await asyncio.gather(*(workers.sample(ids) for _ in range(4)))
    assert sorted(answer.fetched_tokens for answer in answers) == [3, 3, 3, 403]
    assert all(answer.ids == greedy_of(reference("qwen3"), ids, 16) for answer in answers)


async def test_cancelled_prompt_is_dropped_at_both_ends(workers: Joined) -> None:
    """Whichever of the two calls ends: no memory, no pin and no waiting fetch is left; the fetch of
    a prefill that ends without a result is NOT_FOUND."""
    with held_passes() as passes:
        for cancels_decode in (True, False):
            request = workers.request(IDS)
            prefill = asyncio.create_task(workers.prefill(request))
            decode = asyncio.create_task(workers.decode_early(request))
            await let(workers, passes, 2)
            await until(lambda: workers.decode.fetcher.room.used_bytes > 0)
            if cancels_decode:
                decode.cancel()
                await until(lambda: workers.decode.fetcher.room.used_bytes == 0)
            prefill.cancel()
            await asyncio.wait([prefill, decode])
            if not cancels_decode:
                assert isinstance(decode.exception(), NotFound)
            workers.sender.sent.clear()
            # The actor drops the prompt before its next pass.
            passes.let(1)
            await until(lambda: idle(workers))
    assert (await workers.sample(IDS)).ids == greedy_of(reference("qwen3"), IDS, 16)


async def test_swap_waits_for_the_prompts_that_are_computed(workers: Joined) -> None:
    """All blocks of a prompt are by the weights of its first pass, and later prompts by the new
    ones; a decode worker that swaps meanwhile samples the rest with its new weights and caches
    nothing of the prompt."""
    new = reference("qwen3", seed=1)
    with held_passes() as passes:
        sampling = asyncio.create_task(workers.sample(IDS))
        await let(workers, passes, 2)
        await workers.pair.decode.load(published(new), version=2)
        swap = asyncio.create_task(workers.pair.prefill.load(published(new), version=2))
        passes.free()
        answer = await sampling
        await swap
    assert {block.weight_version for block in workers.sender.sent} == {1}
    assert answer.versions == [1] + [2] * 15
    assert answer.ids[0] == greedy_of(reference("qwen3"), IDS, 1)[0]
    again = await workers.sample(IDS)
    assert (again.fetched_tokens, again.ids) == (400, greedy_of(new, IDS, 16))


async def refuse(workers: Joined, damage: Damage, *, match: str) -> pb.PrefillRequest:
    """Damages the third of seven blocks; returns the request, which prefill then holds."""

    def third(response: pb.FetchKvResponse) -> None:
        if response.from_token == 128:
            damage(response)

    workers.sender.damage = third
    request = workers.request(IDS)
    with held_passes() as passes:
        prefill = asyncio.create_task(workers.prefill(request))
        decode = asyncio.create_task(workers.decode_early(request))
        await let(workers, passes, 3)
        with pytest.raises(RefusedHandOff, match=match):
            await decode
        passes.free()
        await prefill
    workers.sender.damage = None
    return request


def cut(response: pb.FetchKvResponse) -> None:
    response.slice.data = response.slice.data[:-1] + b"?"


async def test_damaged_block_is_refused_and_counted(workers: Joined) -> None:
    """In the middle of the stream: nothing of the prompt is used or kept by decode; prefill holds
    it still, for another attempt."""
    before = refused("damaged")
    request = await refuse(workers, cut, match="wrong checksum")
    assert refused("damaged") == before + 1
    assert (await workers.decode_early(request)).fetched_tokens == 400
    assert idle(workers)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda response: setattr(response, "from_token", 200), "place"),
        (lambda response: setattr(response, "weight_version", 9), "shape"),
        (lambda response: setattr(response.slice, "dtype", "int32"), "shape"),
    ],
    ids=["place", "version", "type"],
)
async def test_block_that_does_not_continue_is_refused(
    workers: Joined, change: Damage, reason: str
) -> None:
    """Of another place, of other weights, or of another type than the block before it."""
    before = refused(reason)
    request = await refuse(workers, change, match="a block of the hand-off")
    assert refused(reason) == before + 1
    workers.pair.prefill.release(request.request_id)
    assert idle(workers)


async def test_other_model_or_prefix_is_refused_before_any_data(workers: Joined) -> None:
    """The sender compares what the caller has; a whole prompt needs no prefix."""
    request = workers.request(IDS)
    await workers.prefill(request)

    async def fetch(**asked: Any) -> int:
        fetched = pb.FetchKvRequest(request_id=request.request_id, slices=True, **asked)
        return len([one async for one in workers.sender.FetchKv(fetched, None)])

    with pytest.raises(FailedPrecondition, match="another model"):
        await fetch(early=True, model_fingerprint=b"another")
    with pytest.raises(FailedPrecondition, match=r"weights 1; .* of weights 2"):
        await fetch(early=True, from_token=64, prefix_version=2)
    with pytest.raises(FailedPrecondition, match=r"weights 1; .* of weights 2"):
        await fetch(from_token=64, prefix_version=2)
    assert workers.sender.sent == []
    assert await fetch(early=True, from_token=64, prefix_version=1) == 1


async def test_prompt_is_never_a_mixture_of_two_versions(workers: Joined) -> None:
    """Decode has swapped and cached a prefix by the new weights, prefill still computes with the
    old ones: the whole prompt comes from there."""
    old, new = reference("qwen3"), reference("qwen3", seed=1)
    await workers.pair.load(published(new), version=2)
    await workers.sample(IDS[:200])
    await workers.pair.prefill.load(published(old), version=1)
    answer = await workers.sample(IDS)
    assert answer.fetched_tokens == 400
    assert workers.sender.sent[-1].weight_version == 1
    assert answer.ids[0] == greedy_of(old, IDS, 1)[0]


async def test_landing_memory_is_bounded(workers: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for one prompt, three arrive one after the other: the blocks of the others wait at
    their sender, and all are answered."""
    room, most = workers.decode.fetcher.room, 0
    monkeypatch.setattr(room, "capacity_bytes", 1)
    prompts = [prompt_ids(400 + n, seed=n) for n in range(3)]
    sampling = asyncio.gather(*(workers.sample(ids) for ids in prompts))
    while not sampling.done():
        most = max(most, room.used_bytes)
        await asyncio.sleep(0)
    answers = await sampling
    block = workers.sender.sent[0]
    token_bytes = len(block.slice.data) // block.tokens
    assert 400 * token_bytes <= most <= 402 * token_bytes
    for ids, answer in zip(prompts, answers, strict=True):
        assert answer.ids == greedy_of(reference("qwen3"), ids, 16)
    assert idle(workers)


async def test_fetch_waits_for_its_prefill(
    workers: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may come first. While nothing is computed it gets empty responses, so that a long wait is
    no silence; without a prefill it is NOT_FOUND."""
    request = workers.request(IDS)
    decode = asyncio.create_task(workers.decode_early(request))
    prefill: Any = workers.pair.prefill
    await until(lambda: len(prefill._early) == 1)
    monkeypatch.setattr(early_reads, "_SILENCE_S", 0.01)
    with held_passes() as passes:
        first = asyncio.create_task(workers.prefill(request))
        fetched = prefill.early_kv(request.request_id, from_token=0)
        assert [await anext(fetched) for _ in range(3)] == [None] * 3
        await fetched.aclose()
        passes.free()
        assert (await first).ids + (await decode).ids == greedy_of(reference("qwen3"), IDS, 16)
    monkeypatch.setattr(early_reads, "_ARRIVAL_S", 0.01)
    with pytest.raises(NotFound, match="no prefill of request"):
        await workers.decode_early(workers.request(IDS))
    assert idle(workers)
