"""Real router, prefill and decode processes with a real etcd: sampling, weights, deaths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from forge.v1 import inference_pb2
from forge.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from services.inference.worker.weights.frozen_weights import VERSION
from tests.contract import engines
from tests.contract.engines import is_greedy, prompt_ids, published, reference, with_heads
from tests.support.inference.cluster import CALL_S, InferenceCluster, Sample, inference_cluster
from tests.support.inference.transformers_answers import greedy_of
from tests.support.runtime.etcd import EtcdServer
from tests.support.runtime.waiting import until

LONG = 450


@pytest_asyncio.fixture(scope="module")
async def running(
    shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[InferenceCluster]:
    """A router and a publisher; processes that one test leaves serve the next."""
    folder = tmp_path_factory.mktemp("inference")
    model = engines.CONFIGS["qwen3"]
    async with inference_cluster(folder, shared_etcd, "inference", model=model) as cluster:
        cluster.start("router")
        yield cluster


@pytest_asyncio.fixture
async def inference(running: InferenceCluster) -> InferenceCluster:
    """With the first reference weights and draft heads published; workers are the test's to ask
    for."""
    await running.publisher.publish(with_heads(published(reference("qwen3"))))
    return running


async def serving(inference: InferenceCluster, *, decodes: int = 1) -> None:
    """One prefill and `decodes` decode workers, all with the newest weights."""
    version = str(inference.publisher.version)
    for role, count in (("prefill", 1), ("decode", decodes)):
        for name in await inference.workers(role, count):
            await inference.registered(role, name, weight_version=version)


async def test_request_is_sampled_through_router_prefill_and_decode(
    inference: InferenceCluster,
) -> None:
    """Greedy answers equal transformers'; a group computes its prompt once; bad input is named."""
    model = reference("qwen3")
    await serving(inference)
    common = prompt_ids(64, seed=1)
    prompts = [common + prompt_ids(3 + n, seed=10 + n) for n in range(6)]
    samples = await asyncio.gather(*(inference.sample(ids) for ids in prompts))
    for ids, sample in zip(prompts, samples, strict=True):
        assert sample.ids == greedy_of(model, ids, 16)
        assert sample.finish_reason == FINISH_REASON_LENGTH
        assert sample.versions == [inference.publisher.version] * 16
        assert sample.responses == 1
    assert sorted(sample.cached_tokens for sample in samples)[1:] == [64] * 5

    streamed = await inference.sample(prompts[0], stream=True, max_tokens=300)
    assert is_greedy(model, prompts[0], streamed.ids)
    assert streamed.responses > 1
    assert streamed.last is not None
    assert streamed.last.timings.decode_s > 0

    stop = samples[0].ids[4]
    stopped = await inference.sample(prompts[0], stop_token_ids=[stop])
    assert stopped.ids == samples[0].ids[: samples[0].ids.index(stop) + 1]
    assert stopped.finish_reason == FINISH_REASON_STOP
    assert len((await inference.sample(prompts[0], max_tokens=1)).ids) == 1

    too_long = prompt_ids(engines.CONTEXT_TOKENS)
    for ids, options, words in (
        ([], {}, ["prompt_ids", "empty"]),
        (too_long, {}, ["512", "511"]),
        ([engines.VOCABULARY], {}, [str(engines.VOCABULARY)]),
        ([1], {"max_tokens": 0}, ["max_tokens", "0"]),
        ([1], {"top_p": 1.5}, ["top_p", "1.5"]),
        ([1], {"temperature": -1.0}, ["temperature", "-1"]),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await inference.sample(ids, **options)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert all(word in (refused.value.details() or "") for word in words)

    status = await inference.status()
    assert status.context_tokens == engines.CONTEXT_TOKENS
    assert status.weight_version == inference.publisher.version
    assert status.sampled_tokens >= sum(len(s.ids) for s in [*samples, streamed, stopped]) + 1
    assert {worker.role for worker in status.workers} == {"prefill", "decode"}


async def test_next_turn_reuses_its_cached_history(inference: InferenceCluster) -> None:
    """On the prefill instance that has it."""
    await serving(inference)
    ids = prompt_ids(80)
    first = await inference.sample(ids)
    second = await inference.sample(ids + first.ids + prompt_ids(4, seed=3))
    assert second.cached_tokens == 80
    assert second.ids == greedy_of(reference("qwen3"), ids + first.ids + prompt_ids(4, seed=3), 16)


@pytest.mark.faults
async def test_prefix_outlives_the_worker_that_computed_it(
    inference: InferenceCluster, tmp_path: Path
) -> None:
    """kill -9 of prefill: another one finds the whole blocks of prompt and answer in the store."""
    await serving(inference)
    await inference.workers("prefill", 0)
    version = str(inference.publisher.version)
    store = ("--kv.store-dir", str(tmp_path / "kv"), "--kv.store-block-tokens", "16")
    ids = prompt_ids(70, seed=5)
    found: list[int] = []
    for _ in range(2):
        prefill = inference.start("prefill", *store)
        await inference.registered("prefill", prefill, weight_version=version)
        sample = await inference.sample(ids)
        assert sample.ids == greedy_of(reference("qwen3"), ids, 16)
        found.append(sample.cached_tokens)
        await until(lambda: len(list((tmp_path / "kv").rglob("[0-9a-f]*/*/*"))) == 4)
        inference.kill(prefill)
    assert found == [0, 64]


@pytest.mark.faults
async def test_killed_decode_worker_is_replaced_in_mid_answer(
    inference: InferenceCluster,
) -> None:
    """kill -9 of the sampling instance, which drafts: another continues with the same tokens, and
    the caller sees no error."""
    await serving(inference, decodes=2)
    for name in await inference.workers("decode", 2):
        assert "draft_heads_served" in inference.log_of(name)
    ids = prompt_ids(40)
    killed, sample = "", Sample()
    with inference.held_answers(LONG // 2) as held:
        async for response in await inference.call(ids, stream=True, max_tokens=LONG):
            sample.add(response)
            if not killed and len(sample.ids) > 20:
                (killed,) = await inference.sampling()
                inference.kill(killed)
                held.free()
    assert len(sample.ids) == LONG
    assert is_greedy(reference("qwen3"), ids, sample.ids)


@pytest.mark.faults
async def test_unstreamed_requests_outlive_every_worker(inference: InferenceCluster) -> None:
    """All workers die with running requests; new ones finish them."""
    await serving(inference)
    prompts = [prompt_ids(30 + n, seed=n) for n in range(4)]
    with inference.held_answers(LONG // 2):
        calls = [asyncio.create_task(inference.sample(ids, max_tokens=LONG)) for ids in prompts]
        await inference.sampling(*calls)
        await inference.workers("decode", 0)
        await inference.workers("prefill", 0)
    await serving(inference)
    samples = await asyncio.gather(*calls)
    for ids, sample in zip(prompts, samples, strict=True):
        assert len(sample.ids) == LONG
        assert is_greedy(reference("qwen3"), ids, sample.ids)


async def test_new_weights_take_effect_in_mid_answer(inference: InferenceCluster) -> None:
    """Later tokens and discovery have the new version."""
    old, new = reference("qwen3"), reference("qwen3", seed=1)
    ids, sample = prompt_ids(40), Sample()
    await serving(inference)
    old_version = inference.publisher.version
    with inference.held_answers(LONG // 2) as held:
        async for response in await inference.call(ids, stream=True, max_tokens=LONG):
            if sample.responses == 0:
                await inference.publisher.publish(published(new))
                await serving(inference)
                held.free()
            sample.add(response)
    assert sample.versions == sorted(sample.versions)
    assert set(sample.versions) == {old_version, old_version + 1}
    before = sample.versions.count(old_version)
    assert is_greedy(old, ids, sample.ids[:before])
    # Whatever is in the caches by now, nothing of it is of the old weights.
    after = await inference.sample(ids)
    assert after.ids == greedy_of(new, ids, 16)


async def test_worker_fetches_its_weights_from_a_peer(inference: InferenceCluster) -> None:
    """Late workers get them from workers with the version, bit for bit, not from the trainer."""
    await serving(inference)
    fetches = inference.publisher.fetches
    before, _ = await inference.workers("decode", 2)
    assert inference.publisher.fetches == fetches
    inference.kill(before)
    ids = prompt_ids(20)
    assert (await inference.sample(ids)).ids == greedy_of(reference("qwen3"), ids, 16)


async def test_starting_workers_fetch_from_one_another(inference: InferenceCluster) -> None:
    """Four workers start at once beside none with weights. Each finds those that started before it,
    so the trainer sends the weights less often than to each."""
    for role in ("prefill", "decode"):
        await inference.workers(role, 0)
    fetches = inference.publisher.fetches
    # Nothing leaves the trainer until all have appeared.
    async with inference.publisher.held():
        names = [inference.start("decode") for _ in range(4)]
        await inference.starting(4)
    for name in names:
        await inference.registered("decode", name, weight_version=str(inference.publisher.version))
    assert 1 <= inference.publisher.fetches - fetches < 4
    await inference.starting(0)


@pytest.mark.faults
async def test_damaged_weights_are_never_served(inference: InferenceCluster) -> None:
    """With wrong digests the old version stays in service, until good weights arrive."""
    await serving(inference)
    new = reference("qwen3", seed=1)
    good_version = inference.publisher.version
    await inference.publisher.publish(published(new), damaged=True)
    await inference.publisher.fetched(6)
    ids = prompt_ids(20)
    assert set((await inference.sample(ids)).versions) == {good_version}
    await inference.publisher.publish(published(new))
    await serving(inference)
    assert (await inference.sample(ids)).ids == greedy_of(new, ids, 16)


@pytest.mark.faults
async def test_rollback_under_load_labels_every_token(inference: InferenceCluster) -> None:
    """A worker is killed in it. An answer has the tokens of the version that it names, until that
    falls; the held version stays over a publication, also on a worker that starts then."""
    old, new = reference("qwen3"), reference("qwen3", seed=1)
    await serving(inference, decodes=2)
    held, newer = inference.publisher.version, await inference.publisher.publish(published(new))
    await serving(inference, decodes=2)
    models, answers, left = {held: old, newer: new}, list[tuple[list[int], Sample]](), False

    async def ask(seed: int) -> None:
        ids = prompt_ids(20, seed=seed)
        while not left:
            answers.append((ids, await inference.sample(ids, max_tokens=120)))

    async def begun_with(version: int) -> None:
        seen = len(answers)
        await until(lambda: any(one.versions[0] == version for _, one in answers[seen:]))

    load = [asyncio.create_task(ask(1)), asyncio.create_task(ask(2))]
    await begun_with(newer)
    await inference.publisher.hold(held)
    inference.kill((await inference.sampling(*load))[0])
    await begun_with(held)
    await inference.publisher.publish(published(new))
    for name in await inference.workers("decode", 2):
        await inference.registered("decode", name, weight_version=str(held))
    left = True
    await asyncio.gather(*load)
    assert {version for _, one in answers for version in one.versions} == {held, newer}
    for ids, one in answers:
        assert one.versions == sorted(one.versions, reverse=True) and len(one.versions) == 120
        assert is_greedy(
            models[one.versions[0]], ids, one.ids[: one.versions.count(one.versions[0])]
        )
    await inference.publisher.hold(0)


async def test_cancelled_request_frees_its_slot(inference: InferenceCluster) -> None:
    """A caller that goes away is worked for no longer."""
    await serving(inference)
    before = (await inference.status()).sampled_tokens
    with inference.held_answers(LONG // 2):
        call = await inference.call(prompt_ids(10), stream=True, max_tokens=LONG)
        async for _ in call:
            break
        call.cancel()
        await inference.idle()
    assert 0 < (await inference.status()).sampled_tokens - before < LONG


async def test_drained_worker_finishes_its_requests(inference: InferenceCluster) -> None:
    """SIGTERM: the running request ends there, and the exit code is 0."""
    await serving(inference)
    ids = prompt_ids(10)
    with inference.held_answers(LONG // 2):
        running = asyncio.create_task(inference.sample(ids, max_tokens=LONG))
        await inference.sampling(running)
        (draining,) = await inference.workers("decode", 1)
        inference.terminate(draining)
        await until(lambda: '"draining"' in inference.log_of(draining))
    assert is_greedy(reference("qwen3"), ids, (await running).ids)
    assert await asyncio.to_thread(inference.exit_code, draining) == 0


async def test_worker_drained_by_an_operator_gets_no_request(inference: InferenceCluster) -> None:
    """Until it is resumed; it stays registered, and the other worker serves meanwhile."""
    await serving(inference, decodes=2)
    drained, other = await inference.workers("decode", 2)
    for draining, allowed in ((True, {other}), (False, {drained, other})):
        await inference.drain(drained, draining)
        samples = (inference.sample(prompt_ids(30, seed=n), max_tokens=60) for n in range(8))
        calls = [asyncio.create_task(one) for one in samples]
        assert {*await inference.sampling(*calls)} <= allowed
        await asyncio.gather(*calls)


async def test_kept_stream_serves_calls_until_the_router_drains(
    inference: InferenceCluster,
) -> None:
    """Each call is answered as Sample answers it, errors included; SIGTERM ends the stream without
    open calls, and the process with 0."""
    await serving(inference)
    router = inference.start("router")
    stub = inference.stub(await inference.registered("router", router))
    prompts = [prompt_ids(5 + n, seed=20 + n) for n in range(3)]
    requests = [inference.request(ids) for ids in prompts] + [inference.request([-1])]
    stream = stub.SampleStream()
    begins = [
        inference_pb2.SampleBegin(call=1 + number, request=request, timeout_s=CALL_S)
        for number, request in enumerate(requests)
    ]
    await stream.write(inference_pb2.SampleStreamRequest(begin=begins))
    samples, ends = [Sample() for _ in requests], dict[int, int]()
    while len(ends) < len(requests):
        message = await stream.read()
        assert isinstance(message, inference_pb2.SampleStreamResponse)
        for event in message.events:
            if event.HasField("end"):
                ends[event.call] = event.end.status_code
            else:
                samples[event.call - 1].add(event.response)
    assert ends == {1: 0, 2: 0, 3: 0, 4: grpc.StatusCode.INVALID_ARGUMENT.value[0]}
    for ids, sample in zip(prompts, samples[:3], strict=True):
        assert sample.ids == greedy_of(reference("qwen3"), ids, 16)
    inference.terminate(router)
    assert await stream.read() is grpc.aio.EOF
    assert await asyncio.to_thread(inference.exit_code, router) == 0


async def test_request_without_workers_is_unavailable(inference: InferenceCluster) -> None:
    """After the wait limit."""
    await inference.workers("prefill", 0)
    router = inference.start("router", "--router.worker-wait-s", "0.5")
    instance = await inference.registered("router", router)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        call = inference.stub(instance).Sample(inference.request([1]), timeout=CALL_S)
        async for _ in call:
            pass
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_serving_group_samples_its_own_frozen_weights(
    inference: InferenceCluster, tmp_path: Path
) -> None:
    """Router and workers of a group serve the weights of their model directory, whatever the policy
    publishes; neither group gets a request of the other. A directory without weights is refused."""
    await serving(inference)
    policys = [(role, (await inference.workers(role, 1))[0]) for role in ("prefill", "decode")]
    old, new = reference("qwen3"), reference("qwen3", seed=1)
    old.save_pretrained(tmp_path / "old")
    frozen = ("--model-path", str(tmp_path / "old"), "--serving-group", "old")
    router = inference.start("router", *frozen)
    group = [router]
    for role in ("prefill", "decode"):
        group.append(inference.start(role, *frozen, "--weights", "frozen"))
        await inference.registered(f"{role}@old", group[-1], weight_version="1", weights="frozen")
    stub = inference.stub(await inference.registered("router@old", router))
    version = await inference.publisher.publish(published(new))
    for role, name in policys:
        await inference.registered(role, name, weight_version=str(version))
    ids = prompt_ids(24, seed=5)
    policy, sample = await inference.sample(ids), Sample()
    async for response in stub.Sample(inference.request(ids), timeout=CALL_S):
        sample.add(response)
    assert (policy.ids, policy.versions) == (greedy_of(new, ids, 16), [version] * 16)
    assert (sample.ids, sample.versions) == (greedy_of(old, ids, 16), [VERSION] * 16)
    assert policy.ids != sample.ids
    assert len((await inference.status()).workers) == 2
    for name in group:
        inference.kill(name)

    config = tmp_path / "config"
    engines.CONFIGS["qwen3"].save_pretrained(config)
    empty = ("--serving-group", "empty", "--weights", "frozen", "--model-path", str(config))
    assert inference.exit_code(inference.start("decode", *empty)) == 2
    assert inference.exit_code(inference.start("decode", "--weights", "frozen")) == 2
