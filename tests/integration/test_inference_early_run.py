"""Early hand-offs through a router's actor to workers that answer by script, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from forge.runtime.rpc.status import ERROR_KEY
from forge.v1 import inference_pb2 as pb
from services.inference.engines.capabilities import EARLY_HAND_OFF, Capabilities
from services.inference.router.metrics import EARLY_DECODES
from tests.integration import test_inference_run as scripted
from tests.integration.test_inference_run import Worker, routed, way
from tests.support.runtime.waiting import until

__all__ = ["way"]  # The fixture: every test runs both ways.

ABLE = Capabilities(
    engine="early",
    roles=frozenset({"prefill", "decode"}),
    hand_offs=frozenset({"kv_blocks", EARLY_HAND_OFF}),
    update="in_flight",
    draws="positional",
)


class EarlyWorker(Worker):
    """Its prefill ends once a test says so, and its early decodes wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.early = 0
        """Early decodes that run."""
        self.asked_early = 0
        self.read = asyncio.Event()
        self.fails = ""
        """What fails, the first time: the early decode or the prefill."""

    async def Prefill(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
        if self.fails != "decode":
            # Else it is over before the failure is seen.
            await self.read.wait()
        if self.fails == "prefill":
            self.fails = ""
            self.takes_s = [0.0]
        return await super().Prefill(request, context)

    async def Decode(
        self, request: pb.DecodeRequest, context: Any
    ) -> AsyncIterator[pb.DecodeResponse]:
        if request.early:
            assert not request.HasField("first")
            self.asked_early += 1
            self.early += 1
            try:
                if self.fails == "decode":
                    self.fails = ""
                    of_ours = ((ERROR_KEY, "Unavailable"),)
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "damaged", of_ours)
                await until(lambda: request.request_id in self.held)
            finally:
                self.early -= 1
        async for response in super().Decode(request, context):
            yield response


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are a long prompt."""
    rules = replace(scripted.CONFIG.router, early_hand_off_tokens=3)
    monkeypatch.setattr(scripted, "CONFIG", replace(scripted.CONFIG, router=rules))


def outcomes(name: str) -> float:
    found: float = EARLY_DECODES.labels(name)._value.get()
    return found


async def _tokens(run: Any) -> int:
    return sum([len(said.tokens.ids) // 4 async for said in run.responses()])


async def test_decode_begins_with_the_prefill() -> None:
    """Its worker is asked before the prompt is computed; the answer is whole and in order, and
    both workers are free afterwards."""
    worker = EarlyWorker()
    used = outcomes("used")
    async with routed(worker, capabilities=ABLE.encode(), weight_version="1") as one:
        sampling = asyncio.create_task(_tokens(one.run(most=100)))
        await until(lambda: worker.early == 1)
        assert worker.prefills == 0
        worker.read.set()
        assert await sampling == 100
        assert (worker.prefills, worker.asked_early) == (1, 1)
        assert await one.running() == [0, 0]
    assert outcomes("used") == used + 1


@pytest.mark.parametrize("reason", ["engine", "length", "one token"])
async def test_decode_begins_after_the_prefill(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Of workers of an earlier release, of a short prompt, and of an answer of one token."""
    worker = EarlyWorker()
    worker.read.set()
    able = replace(ABLE, hand_offs=frozenset({"kv_blocks"})) if reason == "engine" else ABLE
    if reason == "length":
        rules = replace(scripted.CONFIG.router, early_hand_off_tokens=4)
        monkeypatch.setattr(scripted, "CONFIG", replace(scripted.CONFIG, router=rules))
    most = 1 if reason == "one token" else 100
    async with routed(worker, capabilities=able.encode(), weight_version="1") as one:
        assert await _tokens(one.run(most=most)) == most
    assert worker.asked_early == 0


@pytest.mark.parametrize("fails", ["decode", "prefill"])
async def test_failed_early_decode_costs_no_token(fails: str) -> None:
    """Without its decode the prompt is computed once, and held for the next decode; without its
    prefill the early decode ends, and another attempt makes another."""
    worker = EarlyWorker()
    worker.fails = fails
    worker.read.set()
    failed, dropped = outcomes("failed"), outcomes("dropped")
    async with routed(worker, capabilities=ABLE.encode(), weight_version="1") as one:
        assert await _tokens(one.run(most=100)) == 100
        assert (worker.prefills, worker.early) == (1, 0)
        assert worker.held == set()
        assert await one.running() == [0, 0]
    assert outcomes("failed") == failed + (fails == "decode")
    assert outcomes("dropped") == dropped + (fails == "prefill")


async def test_caller_that_leaves_ends_both_calls() -> None:
    """While the prompt is computed."""
    worker = EarlyWorker()
    async with routed(worker, capabilities=ABLE.encode(), weight_version="1") as one:
        sampling = asyncio.create_task(_tokens(one.run(most=100)))
        await until(lambda: worker.early == 1)
        sampling.cancel()
        await asyncio.wait([sampling])
        await until(lambda: worker.early == 0)
        assert await one.running() == [0, 0]


async def test_early_decode_with_older_weights_is_dropped() -> None:
    """Prefill has swapped before the prompt began: a decode worker with older weights than the
    first token samples nothing."""
    worker = EarlyWorker()
    worker.read.set()
    dropped = outcomes("dropped")
    async with routed(worker, capabilities=ABLE.encode(), weight_version="0") as one:
        assert await _tokens(one.run(most=100)) == 100
        assert await one.running() == [0, 0]
    assert (worker.asked_early, outcomes("dropped")) == (1, dropped + 1)
