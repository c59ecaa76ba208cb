"""Tests: the engine's roles on the strict stand-in: hand-offs, aborts, failures."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.core.errors import NotFound, Unavailable, UnsupportedByEngines
from services.inference.engines.base import (
    Finish,
    KvSpan,
    RefusedHandOff,
    Tokens,
)
from services.inference.engines.tensorrt_llm import answer as answer_module
from services.inference.engines.tensorrt_llm.arguments import Role
from services.inference.engines.tensorrt_llm.engine import TensorRtLlm
from services.inference.engines.tensorrt_llm.hand_off import FINGERPRINT
from services.inference.engines.tensorrt_llm.metrics import CONTINUED
from services.inference.engines.tensorrt_llm.requests import Sampled, WrongAnswer
from services.inference.router.fleet.workers import Engine as Announced
from tests.contract.engines import (
    GREEDY,
    SAMPLED,
    Answer,
    Pair,
    is_greedy,
    make_prompt,
    prompt_ids,
    reference,
)
from tests.support.inference.tensorrt_llm import both, core_of, load, started
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour
from tests.support.inference.tensorrt_llm_fake.executor.result import GenerationResult
from tests.support.runtime.waiting import until

LONG = replace(GREEDY, max_tokens=300)


async def test_hand_off_continues_the_prompt(behaviour: Behaviour, model_path: Path) -> None:
    """Prefill computes, decode samples: the answer is the model's, and nothing stays held."""
    async with (
        started(model_path, Role.PREFILL) as prefill,
        started(model_path, Role.DECODE) as decode,
    ):
        await load(prefill, decode)
        ids = prompt_ids(40)
        answer = await Pair(prefill=prefill, decode=decode).sample(ids)
        assert is_greedy(reference("qwen3"), ids, answer.ids)
        assert answer.finish is Finish.LENGTH
        assert core_of(prefill).held == 0
        await prefill.idle()
        await decode.idle()


async def test_decode_uses_the_id_that_prefill_returned(
    behaviour: Behaviour, model_path: Path
) -> None:
    """After a retry in the library it is another than the caller's."""
    behaviour.reassigns_ids = True
    async with (
        started(model_path, Role.PREFILL) as prefill,
        started(model_path, Role.DECODE) as decode,
    ):
        await load(prefill, decode)
        ids = prompt_ids(40)
        answer = await Pair(prefill=prefill, decode=decode).sample(ids)
        assert is_greedy(reference("qwen3"), ids, answer.ids)


async def test_abort_waits_for_the_end_of_the_transfer(
    behaviour: Behaviour, model_path: Path
) -> None:
    """A caller that leaves during the transfer ends its request at the first token: an earlier
    abort would leak the blocks."""
    behaviour.transfer_steps = 2000
    async with (
        started(model_path, Role.PREFILL) as prefill,
        started(model_path, Role.DECODE) as decode,
    ):
        await load(prefill, decode)
        leaving = asyncio.create_task(
            Pair(prefill=prefill, decode=decode).sample(prompt_ids(40), LONG)
        )
        await until(lambda: decode.status().running == 1)
        leaving.cancel()
        await asyncio.wait({leaving})
        await decode.idle()
        assert behaviour.leaks == 0
        assert not core_of(decode).requests


@pytest.mark.parametrize("wrong", ["lost", "version", "kind"])
async def test_unusable_hand_off_is_read_again(
    behaviour: Behaviour, model_path: Path, wrong: str
) -> None:
    """Keys and values that are lost, of other weights or of another engine: decode reads the prompt
    itself, and continues prefill's token."""
    async with (
        started(model_path, Role.PREFILL) as prefill,
        started(model_path, Role.DECODE) as decode,
    ):
        await load(prefill, decode)
        ids = prompt_ids(40)

        async def spoil() -> None:
            if wrong == "lost":
                await prefill.close()
            elif wrong == "version":
                await load(decode, version=2)

        sampled = Pair(prefill=prefill, decode=decode)
        if wrong == "kind":
            answer = Answer()
            prompt = make_prompt(ids, GREEDY)
            first = (await prefill.prefill(prompt, hold_s=60)).first
            answer.add(first)

            async def fetch(from_token: int) -> KvSpan:
                span = await prefill.fetch_kv(prompt.request_id, from_token=from_token)
                return replace(span, fingerprint=b"embedded")

            async for piece in decode.decode(prompt, first, fetch, stream=False):
                answer.add(piece.tokens)
        else:
            answer = await sampled.sample(ids, on_fetch=spoil)
        assert is_greedy(reference("qwen3"), ids, answer.ids)
        assert len(answer.ids) == 16


async def test_damaged_hand_off_is_refused(behaviour: Behaviour, model_path: Path) -> None:
    """The router prefills again."""
    async with started(model_path, Role.DECODE) as decode:
        await load(decode)
        prompt = make_prompt(prompt_ids(20), GREEDY)

        async def fetch(from_token: int) -> KvSpan:
            return KvSpan(
                from_token=0,
                tokens=20,
                version=1,
                dtype="uint8",
                shape=(3,),
                data=b"\x93\x01\x02",
                fingerprint=FINGERPRINT,
            )

        tokens = Tokens(ids=(4,), logprobs=(-1.0,), versions=(1,))
        with pytest.raises(RefusedHandOff, match="cannot be read"):
            async for _ in decode.decode(prompt, tokens, fetch, stream=False):
                pass


async def test_hand_off_of_another_prompt_is_refused(
    behaviour: Behaviour, model_path: Path
) -> None:
    """The library would continue it. The prompt is prefilled again."""
    async with (
        started(model_path, Role.PREFILL) as prefill,
        started(model_path, Role.DECODE) as decode,
    ):
        await load(prefill, decode)
        other, prompt = (make_prompt(prompt_ids(tokens), GREEDY) for tokens in (40, 41))
        first = (await prefill.prefill(other, hold_s=60)).first

        async def fetch(from_token: int) -> KvSpan:
            return await prefill.fetch_kv(other.request_id, from_token=from_token)

        with pytest.raises(RefusedHandOff, match="a prompt of 40 tokens, this one has 41"):
            async for _ in decode.decode(prompt, first, fetch, stream=False):
                pass
        assert not core_of(decode).requests


async def test_prefill_outlives_its_caller(behaviour: Behaviour, model_path: Path) -> None:
    """A prefill in the library cannot be aborted; the prompt of a caller that has left is not
    held."""
    async with started(model_path, Role.PREFILL) as prefill:
        await load(prefill)
        prompt = make_prompt(prompt_ids(40), GREEDY)
        reading = asyncio.create_task(prefill.prefill(prompt, hold_s=600))
        await until(lambda: prefill.status().running == 1)
        reading.cancel()
        await asyncio.wait({reading})
        await prefill.idle()
        with pytest.raises(NotFound):
            await prefill.fetch_kv(prompt.request_id, from_token=0)


async def test_engine_that_fails_again_and_again_ends_the_worker(
    behaviour: Behaviour, model_path: Path
) -> None:
    """Three failed requests in a row: the process ends, and its supervisor starts another."""
    async with started(model_path, Role.BOTH) as engine:
        await load(engine)
        core_of(engine).close()
        for _ in range(3):
            with pytest.raises(Unavailable, match="shut down"):
                await both(engine).sample(prompt_ids(9))
        assert "3 requests in a row" in str(await engine._llm.died)


async def test_held_answer_ends_with_its_time(behaviour: Behaviour, model_path: Path) -> None:
    """Role both: a prompt that nobody decodes is aborted."""
    async with started(model_path, Role.BOTH) as engine:
        await load(engine)
        await engine.prefill(make_prompt(prompt_ids(20), LONG), hold_s=0.01)
        await engine.idle()
        assert engine.status().running == 0


async def test_equal_requests_differ_by_their_seeds_alone(
    behaviour: Behaviour, model_path: Path
) -> None:
    """Also beside each other and with drafts, where unseeded requests share random numbers."""
    async with started(model_path, Role.BOTH, mtp_layers=1) as engine:
        await load(engine)
        ids = prompt_ids(20)
        seeds = [replace(SAMPLED, seed=seed) for seed in (1, 2, 3)]
        together = await asyncio.gather(*(both(engine).sample(ids, one_of) for one_of in seeds))
        alone = [await both(engine).sample(ids, one_of) for one_of in seeds]
        assert [a.ids for a in together] == [a.ids for a in alone]
        assert len({tuple(a.ids) for a in together}) == 3


async def test_lost_cache_event_resyncs(behaviour: Behaviour, model_path: Path) -> None:
    """The gap is counted, and later blocks are reported again."""
    async with started(model_path, Role.BOTH) as engine:
        await load(engine)
        ids = prompt_ids(40)
        await both(engine).sample(ids)
        await until(lambda: engine._cache.cached_tokens(make_prompt(ids, GREEDY).ids) == 40)
        behaviour.lost_events = 1
        await both(engine).sample(prompt_ids(40, seed=1))
        await until(lambda: engine._cache.gaps == 1)
        other = prompt_ids(40, seed=2)
        await both(engine).sample(other)
        await until(lambda: engine._cache.cached_tokens(make_prompt(other, GREEDY).ids) == 40)
        assert engine._cache.cached_tokens(make_prompt(ids, GREEDY).ids) == 0


async def test_role_both_gets_no_hand_off_that_it_cannot_take(
    behaviour: Behaviour, model_path: Path
) -> None:
    """Without a transceiver it declares none, so that no router pairs it with a prefill engine."""
    async with (
        started(model_path, Role.PREFILL) as prefill,
        started(model_path, Role.BOTH) as engine,
    ):
        assert core_of(engine).args.cache_transceiver_config is None
        assert not announced(engine, "both").takes_from(announced(prefill, "prefill"))


async def test_role_both_samples_prompts_of_prefill(behaviour: Behaviour, model_path: Path) -> None:
    """With take_hand_offs a router may pair them: each prompt is computed once, and nothing stays
    held. Its own prompts need no hand-off."""
    async with (
        started(model_path, Role.PREFILL) as prefill,
        started(model_path, Role.BOTH, take_hand_offs=True) as engine,
    ):
        assert announced(engine, "both").takes_from(announced(prefill, "prefill"))
        await load(prefill, engine)
        lost = CONTINUED.labels("lost")._value.get()
        ids = prompt_ids(40)
        for sampler in (Pair(prefill=prefill, decode=engine), both(engine)):
            answer = await sampler.sample(ids)
            assert is_greedy(reference("qwen3"), ids, answer.ids)
            assert len(answer.ids) == 16
        assert CONTINUED.labels("lost")._value.get() == lost
        assert core_of(prefill).held == 0


async def test_decode_reads_a_prompt_of_the_role_both_again(
    behaviour: Behaviour, model_path: Path
) -> None:
    """It runs on where it was read, until its release: there is no hand-off of it."""
    async with (
        started(model_path, Role.BOTH, take_hand_offs=True) as engine,
        started(model_path, Role.DECODE) as decode,
    ):
        await load(engine, decode)
        ids = prompt_ids(40)
        answer = await Pair(prefill=engine, decode=decode).sample(ids)
        assert is_greedy(reference("qwen3"), ids, answer.ids)
        assert len(answer.ids) == 16
        await engine.idle()
        assert not core_of(engine).requests


def announced(engine: TensorRtLlm, role: str) -> Announced:
    """The engine as a router knows it."""
    return Announced(role=role, able=engine.capabilities)


@pytest.mark.parametrize("role", [Role.BOTH, Role.DECODE])
async def test_request_with_a_wrong_answer_ends_in_the_library(
    behaviour: Behaviour, model_path: Path, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update would not see it, and it would sample to its last token. One whose keys and values
    arrive ends at its first token."""
    async with (
        started(model_path, Role.PREFILL) as prefill,
        started(model_path, role) as engine,
    ):
        await load(prefill, engine)
        apart = Pair(prefill=prefill, decode=engine)
        pair = both(engine) if role is Role.BOTH else apart

        def wrong(*_: object, start: int, **__: object) -> Sampled:
            raise WrongAnswer(f"no log-prob of token {start}")

        monkeypatch.setattr(answer_module, "read_tokens", wrong)
        with pytest.raises(WrongAnswer, match="no log-prob"):
            await pair.sample(prompt_ids(40), LONG)
        assert not core_of(engine).requests
        assert engine.status().running == 0


async def test_decode_that_repeats_another_token_ends_in_the_library(
    behaviour: Behaviour, model_path: Path
) -> None:
    """Its first result tells that the transfer has ended: it leaks nothing."""
    async with (
        started(model_path, Role.PREFILL) as prefill,
        started(model_path, Role.DECODE) as decode,
    ):
        await load(prefill, decode)
        prompt = make_prompt(prompt_ids(40), LONG)
        first = (await prefill.prefill(prompt, hold_s=60)).first
        other = replace(first, ids=(first.ids[0] + 1,))

        async def fetch(from_token: int) -> KvSpan:
            return await prefill.fetch_kv(prompt.request_id, from_token=from_token)

        with pytest.raises(WrongAnswer, match="does not begin with prefill's token"):
            async for _ in decode.decode(prompt, other, fetch, stream=False):
                pass
        assert not core_of(decode).requests


async def test_request_that_the_library_refuses_costs_no_worker(
    behaviour: Behaviour, model_path: Path
) -> None:
    """The caller learns why, and no router tries it again on the next worker."""
    async with started(model_path, Role.BOTH) as engine:
        await load(engine)
        engine._llm.engine.args.max_input_len = 20
        for _ in range(5):
            with pytest.raises(UnsupportedByEngines, match="exceed max_input_len"):
                await both(engine).sample(prompt_ids(30))
        assert len((await both(engine).sample(prompt_ids(9))).ids) == 16
        assert not engine._llm.died.done()


async def test_request_that_the_library_ends_without_a_reason_moves(
    behaviour: Behaviour, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not sent again forever."""

    async def end(_: GenerationResult) -> None:
        raise StopAsyncIteration

    async with started(model_path, Role.BOTH) as engine:
        await load(engine)
        monkeypatch.setattr(GenerationResult, "__anext__", end)
        with pytest.raises(Unavailable, match="4 times without a reason"):
            await both(engine).sample(prompt_ids(20))


async def test_requests_that_fail_by_themselves_cost_no_worker(
    behaviour: Behaviour, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three in a row the engine computes a request of its own, and serves on."""
    async with started(model_path, Role.BOTH) as engine:
        await load(engine)
        core = core_of(engine)
        sample, own = core._sample, []

        def failing(request: Any) -> None:
            if len(request.ids) == 30:
                raise RuntimeError("CUDA out of memory")
            own.append(len(request.ids))
            sample(request)

        monkeypatch.setattr(core, "_sample", failing)
        for _ in range(3):
            with pytest.raises(Unavailable, match="out of memory"):
                await both(engine).sample(prompt_ids(30))
        await until(lambda: engine._llm._failures == 0)
        assert own == [1]
        with pytest.raises(Unavailable, match="out of memory"):
            await both(engine).sample(prompt_ids(30))
        assert len((await both(engine).sample(prompt_ids(9))).ids) == 16
        assert not engine._llm.died.done()
