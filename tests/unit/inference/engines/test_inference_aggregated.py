"""The role both of an engine with one stream a request: held between two calls, ended when left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

import pytest

from forge.core.errors import InvalidArgument, NotFound, Unavailable
from forge.core.named_tensor import NamedTensor
from forge.core.token_columns import int32_array, int32_bytes
from services.inference.engines.aggregated import Aggregated
from services.inference.engines.base import (
    Finish,
    Grammar,
    KvSpan,
    ModelLimits,
    Piece,
    Probe,
    Prompt,
    RefusedHandOff,
    Reweighting,
    Sampling,
    Tokens,
)
from services.inference.engines.capabilities import Capabilities

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, stop_ids=frozenset(), seed=1)


class Counting:
    """Counts up from the last token of the prompt, `step` tokens a piece."""

    capabilities = Capabilities(
        engine="counting", roles=frozenset({"both"}), update="in_flight", draws="positional"
    )
    limits = ModelLimits(context_tokens=100, vocabulary=1000)
    capacity = 2
    version = 3
    cache_tokens = 0

    def __init__(self, *, step: int = 1) -> None:
        self.prompts: list[Prompt] = []
        self.ended: list[str] = []
        self.closed = False
        self._step = step

    async def load(
        self, tensors: Mapping[str, NamedTensor], *, version: int, probe: Probe | None = None
    ) -> None: ...

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
        self.prompts.append(prompt)
        last, most = int32_array(prompt.ids)[-1], prompt.sampling.max_tokens
        try:
            for start in range(0, most, self._step):
                await asyncio.sleep(0)
                end = min(start + self._step, most)
                ids = tuple(range(last + start + 1, last + end + 1))
                columns = Tokens(ids=ids, logprobs=(0.0,) * len(ids), versions=(3,) * len(ids))
                finish = Finish.LENGTH if end == most else None
                yield Piece(tokens=columns, finish=finish, cached_tokens=0 if start else 5)
        finally:
            self.ended.append(prompt.request_id)

    async def close(self) -> None:
        self.closed = True


def prompt(name: str = "a", sampling: Sampling = SAMPLING) -> Prompt:
    return Prompt(request_id=name, ids=int32_bytes([7]), sampling=sampling)


async def no_kv(from_token: int) -> KvSpan:
    raise AssertionError("an aggregated engine fetches nothing")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [1, 3, 9])
async def test_two_calls_give_the_whole_stream(step: int, stream: bool) -> None:
    """The first token from prefill, the others from decode, in pieces of any size; one pass of the
    engine."""
    engine = Counting(step=step)
    both = Aggregated(engine)
    prefilled = await both.prefill(prompt(), hold_s=60)
    assert (prefilled.first.ids, prefilled.cached_tokens) == ((8,), 5)
    assert both.status().running == 1
    pieces = [piece async for piece in both.decode(prompt(), prefilled.first, no_kv, stream=stream)]
    assert [token for piece in pieces for token in piece.tokens.ids] == [9, 10, 11]
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + [Finish.LENGTH]
    assert stream or len(pieces) == 1
    assert (len(engine.prompts), engine.ended) == (1, ["a"])
    await both.idle()


async def test_decode_without_a_held_stream_reads_the_prompt_again() -> None:
    """Behind the first token, with what is left of the request; an engine that cannot resume it
    refuses, so that the router moves it."""
    engine = Counting()
    engine.capabilities = replace(
        engine.capabilities,
        min_tokens=True,
        penalties=True,
        grammars=frozenset({"regex"}),
        resumes=frozenset({"grammar", "penalties"}),
    )
    both = Aggregated(engine)
    asked = replace(
        SAMPLING,
        min_tokens=2,
        grammar=Grammar(kind="regex", text="a", matched_tokens=1),
        reweighting=Reweighting(presence=1.0),
    )
    first = Tokens(ids=(8,), logprobs=(0.0,), versions=(2,))
    pieces = [piece async for piece in both.decode(prompt("b", asked), first, no_kv, stream=True)]
    assert [token for piece in pieces for token in piece.tokens.ids] == [9, 10, 11]
    (read,) = engine.prompts
    assert list(int32_array(read.ids)) == [7, 8]
    assert (read.sampling.max_tokens, read.sampling.min_tokens) == (3, 1)
    assert read.sampling.grammar is not None and read.sampling.grammar.matched_tokens == 2
    assert read.sampling.reweighting is not None
    assert read.sampling.reweighting.answered_tokens == 1
    grammar = replace(engine.capabilities, resumes=frozenset({"grammar"}))
    penalties = replace(engine.capabilities, resumes=frozenset({"penalties"}))
    for able, word in ((grammar, "answered_tokens = 1"), (penalties, "matched_tokens = 2")):
        both.capabilities = able
        with pytest.raises(RefusedHandOff, match=f"no longer held here: .*{word}"):
            await anext(both.decode(prompt("b", asked), first, no_kv, stream=True))
    assert len(engine.prompts) == 1


async def test_abandoned_request_is_aborted() -> None:
    """After its time, when it is released, and when its caller leaves decode."""
    engine = Counting()
    both = Aggregated(engine)
    await both.prefill(prompt("expired"), hold_s=0.0)
    await both.idle()
    await both.prefill(prompt("released"), hold_s=60)
    both.release("released")
    both.release("released")
    await both.idle()
    prefilled = await both.prefill(prompt("left"), hold_s=60)
    pieces = both.decode(prompt("left"), prefilled.first, no_kv, stream=True)
    await anext(pieces)
    await pieces.aclose()
    await both.idle()
    assert engine.ended == ["expired", "released", "left"]
    with pytest.raises(NotFound, match="counting"):
        await both.fetch_kv("left", from_token=0)


async def test_close_aborts_what_is_held() -> None:
    """Then it stops the engine."""
    engine = Counting()
    both = Aggregated(engine)
    await both.prefill(prompt(), hold_s=60)
    await both.close()
    assert engine.ended == ["a"] and engine.closed


async def test_error_of_the_engine_reaches_the_caller() -> None:
    """From the first token as from a later one, and the request counts no longer."""

    class Failing(Counting):
        async def generate(self, prompt: Prompt) -> AsyncGenerator[Piece, None]:
            if prompt.request_id == "later":
                yield Piece(tokens=Tokens(ids=(1,), logprobs=(0.0,), versions=(3,)))
            raise Unavailable("the engine is lost")

    both = Aggregated(Failing())
    with pytest.raises(Unavailable):
        await both.prefill(prompt("first"), hold_s=60)
    prefilled = await both.prefill(prompt("later"), hold_s=60)
    with pytest.raises(Unavailable):
        async for _ in both.decode(prompt("later"), prefilled.first, no_kv, stream=True):
            pass
    await both.idle()
    assert both.status().running == 0


async def test_id_of_another_request_is_refused() -> None:
    """Two held requests of one id would leave one of them without an end."""
    engine = Counting()
    both = Aggregated(engine)
    prompt = Prompt(request_id="a", ids=int32_bytes([1]), sampling=SAMPLING)
    reading = asyncio.create_task(both.prefill(prompt, hold_s=60))
    await asyncio.sleep(0)
    with pytest.raises(InvalidArgument, match="request_id = 'a'"):
        await both.prefill(prompt, hold_s=60)
    await reading
    with pytest.raises(InvalidArgument, match="request_id = 'a'"):
        await both.prefill(prompt, hold_s=60)
    await both.close()
    assert engine.ended == ["a"]
    assert both.status().running == 0
