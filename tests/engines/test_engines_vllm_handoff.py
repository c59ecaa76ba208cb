"""The roles prefill and decode on vLLM: two engines, and keys and values that move between them.

Runs in the environment of `make engine-vllm` alone: `make test-engines`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from forge.core.errors import NotFound, ResourceExhausted
from services.inference.engines.base import Grammar, KvSpan, RefusedHandOff, Reweighting
from services.inference.engines.metrics import REFUSED_HAND_OFFS
from tests.contract import engines
from tests.contract.engines import (
    END,
    GREEDY,
    SAMPLED,
    Answer,
    Pair,
    is_greedy,
    make_prompt,
    prompt_ids,
    published,
    reference,
)
from tests.support.runtime.waiting import until

pytestmark = [
    pytest.mark.skipif(not engines.ON_VLLM, reason="runs by `make test-engines`"),
    pytest.mark.asyncio(loop_scope="module"),
]
BLOCK = 32
LENGTHS = (1, BLOCK, BLOCK + 1, 3 * BLOCK, 150)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines_of_both_roles(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Started once: a start takes longer than a test."""
    vllm: Any = import_module("tests.contract.vllm_engine")
    roles: Any = import_module("services.inference.engines.vllm.provider")
    folder, config = tmp_path_factory.mktemp("handoff"), engines.CONFIGS["qwen3"]
    starts = roles.start_prefill, roles.start_decode
    async with vllm.started(folder, config, *starts) as (prefill, decode):
        yield Pair(prefill=prefill, decode=decode)


@pytest_asyncio.fixture(loop_scope="module")
async def pair(engines_of_both_roles: Pair) -> AsyncIterator[Pair]:
    """With weights of version 1; at the end nothing is held, and all memory is free."""
    found = engines_of_both_roles
    await found.load(published(reference("qwen3")), version=1)
    yield found
    for request_id in list(vars(found.prefill)["_held"]):
        found.prefill.release(request_id)
    await found.prefill.idle()
    await found.decode.idle()
    assert not [one for one in Path("/proc/self/fd").iterdir() if "forge-kv" in _target(one)]


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


class Loads:
    """How many tokens each request of decode had without computing them."""

    def __init__(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens: list[int] = []
        engine: Any = pair.decode
        generate = engine.engine.generate

        async def counting(prompt: Any, leg: Any) -> AsyncIterator[Any]:
            pieces = generate(prompt, leg)
            first = await anext(pieces)
            self.tokens.append(first.cached_tokens)
            yield first
            async for piece in pieces:
                yield piece

        monkeypatch.setattr(engine.engine, "generate", counting)


@pytest.fixture
def loads(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(pair, monkeypatch)


def refused(reason: str) -> float:
    found: float = REFUSED_HAND_OFFS.labels(reason)._value.get()
    return found


async def alone(pair: Pair, ids: list[int], sampling: Any) -> list[int]:
    """The answer of one engine that reads and samples."""
    engine: Any = pair.prefill
    found: list[int] = []
    async for piece in engine.engine.generate(make_prompt(ids, sampling)):
        found += piece.tokens.ids
    return found


async def damaged(pair: Pair, ids: list[int], damage: Callable[[KvSpan], KvSpan]) -> Answer:
    """An answer whose hand-off changes on its way."""
    fetch = pair.prefill.fetch_kv

    async def fetch_damaged(request_id: str, *, from_token: int) -> KvSpan:
        return damage(await fetch(request_id, from_token=from_token))

    between = Pair(prefill=pair.prefill, decode=pair.decode)
    vars(between.prefill)["fetch_kv"] = fetch_damaged
    try:
        return await between.sample(ids)
    finally:
        del vars(between.prefill)["fetch_kv"]


async def test_answers_are_those_of_one_engine(pair: Pair, loads: Loads) -> None:
    """Greedy ones those of the model, drawn ones those of the same seed on one engine: decode
    computes the last part of a block of the prompt and nothing else of it."""
    model = reference("qwen3")
    for tokens in LENGTHS:
        ids = prompt_ids(tokens, seed=tokens)
        assert is_greedy(model, ids, (await pair.sample(ids)).ids)
    assert loads.tokens == [(tokens - 1) // BLOCK * BLOCK for tokens in LENGTHS]
    for seed in range(3):
        drawn = replace(SAMPLED, seed=seed)
        ids = prompt_ids(100, seed=100 + seed)
        assert (await pair.sample(ids, drawn)).ids == await alone(pair, ids, drawn)


async def test_grammar_and_penalties_go_through_a_hand_off(pair: Pair) -> None:
    """With the token of prefill as their first, as on one engine, and with shares."""
    regex = Grammar(kind="regex", text="[a-z]{3,9}")
    held = replace(SAMPLED, grammar=regex, stop_ids=frozenset({END}))
    penalized = replace(SAMPLED, reweighting=Reweighting(presence=1.0, frequency=0.5))
    for sampling in (held, penalized, replace(SAMPLED, top_k=5, temperature=0.7)):
        ids = prompt_ids(70, seed=7)
        answer = await pair.sample(ids, sampling)
        assert answer.ids == await alone(pair, ids, sampling)
        assert len(answer.allowed) == len(answer.ids)


async def test_keys_of_other_weights_are_not_used(pair: Pair, loads: Loads) -> None:
    """Decode has newer weights than prefill: it reads the prompt by its own, and other requests
    find nothing else in its prefix cache."""
    new = reference("qwen3", seed=1)
    await pair.decode.load(published(new), version=2)
    before = refused("version")
    for _ in range(2):
        ids = prompt_ids(100, seed=3)
        answer = await pair.sample(ids)
        assert answer.versions == [1] + [2] * 15
        assert is_greedy(new, ids + answer.ids[:1], answer.ids[1:])
    assert refused("version") == before + 2
    # The second time from its own cache.
    assert loads.tokens == [0, 96]
    await pair.prefill.load(published(new), version=2)


async def test_prompt_of_two_weight_versions_is_never_cached(
    pair: Pair, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that waits in prefill's vLLM during an update begins with cached blocks of the older
    weights, and has its first token from the new ones. Decode computes it anew, and later requests
    find there what the new weights compute."""
    new = reference("qwen3", seed=1)
    ids = prompt_ids(150, seed=20)
    await pair.sample(ids[:128])
    before = refused("version")
    read = await _read_across_update(pair, ids, published(new), monkeypatch)
    await pair.decode.load(published(new), version=2)
    loads.tokens = []
    answer = await read
    assert set(answer.versions) == {2}
    assert is_greedy(new, [*ids, *answer.ids[:1]], answer.ids[1:])
    assert (loads.tokens, refused("version")) == ([0], before + 1)
    again = [*ids, 5]
    engine: Any = pair.decode
    pieces = [piece async for piece in engine.engine.generate(make_prompt(again, SAMPLED), None)]
    assert pieces[0].cached_tokens == 128
    sampled = [token for piece in pieces for token in piece.tokens.ids]
    logits = new(torch.tensor([again + sampled])).logits[0, len(ids) : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(sampled)[:, None])[:, 0]
    found = torch.tensor([one for piece in pieces for one in piece.tokens.logprobs])
    assert torch.allclose(found, expected, atol=1e-4)


async def _read_across_update(
    pair: Pair, ids: list[int], tensors: Any, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Update prefill to version 2 while this prompt waits in its vLLM; return a coroutine that
    samples the prompt's answer."""
    engine: Any = pair.prefill
    llm = engine.engine._llm
    pause, prompt = llm.pause_generation, make_prompt(ids, GREEDY)
    read: list[asyncio.Task[Any]] = []

    async def paused(**options: Any) -> None:
        await pause(**options)
        if not read:
            read.append(asyncio.create_task(engine.prefill(prompt, hold_s=60)))
            await until(lambda: llm.output_processor.request_states)

    monkeypatch.setattr(llm, "pause_generation", paused)
    await pair.prefill.load(tensors, version=2)

    async def answer() -> Answer:
        prefilled = await read[0]
        assert prefilled.cached_tokens == 128
        found = Answer()
        found.add(prefilled.first)

        async def fetch(from_token: int) -> Any:
            return await engine.fetch_kv(prompt.request_id, from_token=from_token)

        async for piece in pair.decode.decode(prompt, prefilled.first, fetch, stream=False):
            found.add(piece.tokens)
        return found

    return answer()


async def test_damaged_hand_off_is_refused_before_use(pair: Pair, loads: Loads) -> None:
    """The router then has the prompt read again."""
    ids = prompt_ids(100, seed=4)

    def flip(span: KvSpan) -> KvSpan:
        data = bytearray(span.data)
        data[-1] ^= 1
        return replace(span, data=bytes(data))

    for reason, damage in {
        "damaged": flip,
        "place": lambda span: replace(span, from_token=32),
    }.items():
        before = refused(reason)
        with pytest.raises(RefusedHandOff):
            await damaged(pair, ids, damage)
        assert refused(reason) == before + 1
    cut = [
        lambda span: replace(span, data=bytes(span.data)[:-4]),
        lambda span: replace(span, data=b"no"),
    ]
    for damage in cut:
        with pytest.raises(RefusedHandOff):
            await damaged(pair, ids, damage)
    assert not loads.tokens
    assert is_greedy(reference("qwen3"), ids, (await pair.sample(ids)).ids)


async def test_hand_off_of_another_kind_is_read_again(pair: Pair, loads: Loads) -> None:
    """As that of the embedded engine, or of another model."""
    ids = prompt_ids(100, seed=5)
    before = refused("model")
    answer = await damaged(pair, ids, lambda span: replace(span, fingerprint=b"another"))
    assert is_greedy(reference("qwen3"), ids, answer.ids)
    assert (loads.tokens, refused("model")) == ([0], before + 1)


async def test_lost_keys_are_computed_by_decode(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM finds no memory where it is to load from, or prefill could not copy: the answer is the
    same, also with a seed, and the engine serves on."""
    engine: Any = pair.decode
    load = engine._hand_offs.load

    async def lost(span: KvSpan, prompt: Any) -> Any:
        found = await load(span, prompt)
        if found is not None:
            found.params["forge_load"] = "/proc/self/fd/none", 0
        return found

    monkeypatch.setattr(engine._hand_offs, "load", lost)
    for seed in range(3):
        ids = prompt_ids(100, seed=60 + seed)
        drawn = replace(SAMPLED, seed=seed)
        answers = await asyncio.gather(pair.sample(ids), pair.sample(prompt_ids(9), drawn))
        assert is_greedy(reference("qwen3"), ids, answers[0].ids)
        assert len((await pair.sample(ids[:70], drawn)).ids) == 16


async def test_held_prompts_have_bounded_memory(pair: Pair) -> None:
    """A prompt waits until others are fetched, released or expired; one above all of it is
    refused."""
    prefill: Any = pair.prefill
    budget = prefill._hand_offs._room
    room = budget.capacity_bytes
    one = make_prompt(prompt_ids(100, seed=8), GREEDY)
    other = make_prompt(prompt_ids(100, seed=9), GREEDY)
    try:
        budget.capacity_bytes = 300_000
        await prefill.prefill(one, hold_s=60)
        waiting = asyncio.create_task(prefill.prefill(other, hold_s=0.2))
        await until(lambda: budget._line)
        assert not waiting.done()
        prefill.release(one.request_id)
        await waiting
        await until(lambda: not prefill._held)
        with pytest.raises(NotFound):
            await prefill.fetch_kv(other.request_id, from_token=0)
        budget.capacity_bytes = 1000
        with pytest.raises(ResourceExhausted):
            await prefill.prefill(one, hold_s=60)
    finally:
        budget.capacity_bytes = room
    await prefill.idle()
    assert budget.used_bytes == 0


async def test_abandoned_requests_leave_nothing(pair: Pair) -> None:
    """Neither a prefill whose caller leaves, nor a decode that is closed after its first piece."""
    leaving = asyncio.create_task(pair.sample(prompt_ids(300, seed=11)))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.wait({leaving})

    async def stop(_: Answer) -> bool:
        return False

    long = replace(GREEDY, max_tokens=300)
    await pair.sample(prompt_ids(100, seed=12), long, on_piece=stop)
    await pair.prefill.idle()
    await pair.decode.idle()


async def test_nixl_is_configured_as_the_installed_version_has_it() -> None:
    """Read from its source, as NIXL does not run here: names of arguments, the connector, the
    parameters that a prefill request carries, and those that it returns for decode."""
    hand_off: Any = import_module("services.inference.engines.vllm.hand_off")
    transfer: Any = import_module("vllm.config")
    factory: Any = import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    for role in ("prefill", "decode"):
        found = transfer.KVTransferConfig(**hand_off.transfer_config("nixl", role=role))
        assert (found.is_kv_producer, found.is_kv_consumer) == (role == "prefill", role == "decode")
    assert hand_off.NIXL_CONNECTOR in factory.KVConnectorFactory._registry
    nixl = Path(factory.__file__).parent / "v1" / "nixl"
    text = (nixl / "pull_scheduler.py").read_text()
    for key in hand_off.NIXL_PREFILL:
        assert f'params.get("{key}")' in text
    assert "do_remote_prefill=is_p_node" in text

    kind = hand_off.NixlHandOffs(model="model", vllm_version="1")
    prompt = make_prompt(prompt_ids(4), GREEDY)
    saving = await kind.save(prompt)
    returned = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_port": 5600}
    data = saving.data(returned)
    span = KvSpan(
        from_token=0, tokens=4, version=1, dtype="uint8", shape=(len(data),), data=data,
        fingerprint=kind.fingerprint,
    )  # fmt: skip
    assert (await kind.load(span, prompt)).params == returned
    assert await kind.load(replace(span, data=saving.data(None)), prompt) is None
    with pytest.raises(RefusedHandOff):
        await kind.load(replace(span, data=b"???"), prompt)
