"""Roles of workers, hand-off and KV store, with the embedded engine and a small random model.

    python -m benchmarks.roles [--quick] [--json FILE]

`turns`: prompt tokens that are computed per new one over turns, with two roles and with one worker
that does both, and with a publication before each turn. `itl`: the time from step to
step of running answers while long prompts arrive, with decode apart and with one chunked worker.
`hand_off`: 256 MiB of keys and values between two processes, in slices and in shared memory.
`early`: from a prompt's last prefill pass to its first decode token, handed over whole and early.
`store`: a prompt from the KV store against computing it, and the rates of the store.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.support.inference.early_hand_off import measure_early
from benchmarks.support.inference.engine_costs import SHAPES
from benchmarks.support.inference.hand_off import measure_hand_off
from benchmarks.support.inference.random_weights import random_weights
from benchmarks.support.report import arguments, keep, show
from forge.core.named_tensor import NamedTensor
from forge.core.token_columns import int32_bytes
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import (
    KvSpan,
    Prompt,
    Sampling,
)
from services.inference.engines.embedded.decode import DecodeActor
from services.inference.engines.embedded.engine import EmbeddedBoth, EmbeddedDecode, EmbeddedPrefill
from services.inference.engines.provider import EngineOptions, KvStoreOptions

SHAPE = SHAPES["tiny"]


@dataclass(slots=True)
class Answer:
    """One answer."""

    ids: list[int] = field(default_factory=list)
    computed: int = 0
    """Prompt tokens that prefill computed."""


@dataclass(slots=True)
class Pair:
    """A prefill and a decode engine; the same one in the role both."""

    prefill: Any
    decode: Any
    weights: dict[str, NamedTensor]
    version: int = 0
    requests: int = 0

    async def publish(self) -> None:
        """Load the next version."""
        self.version += 1
        await self.prefill.load(self.weights, version=self.version)
        if self.decode is not self.prefill:
            await self.decode.load(self.weights, version=self.version)

    async def sample(self, ids: list[int], tokens: int) -> Answer:
        """Sample one answer."""
        self.requests += 1
        sampling = Sampling(
            temperature=1.0, top_p=1.0, top_k=0, max_tokens=tokens, stop_ids=frozenset(),
            seed=self.requests,
        )  # fmt: skip
        prompt = Prompt(request_id=f"{self.requests}", ids=int32_bytes(ids), sampling=sampling)
        answer = Answer()
        read = await self.prefill.prefill(prompt, hold_s=600)
        answer.ids += read.first.ids
        answer.computed = len(ids) - read.cached_tokens

        async def fetch(from_token: int) -> KvSpan:
            span: KvSpan = await self.prefill.fetch_kv(prompt.request_id, from_token=from_token)
            self.prefill.release(prompt.request_id)
            return span

        if tokens > 1:
            async for piece in self.decode.decode(prompt, read.first, fetch, stream=True):
                answer.ids += piece.tokens.ids
        return answer


@asynccontextmanager
async def engines(role: str, **options: Any) -> AsyncIterator[Pair]:
    """Start the engines of `two` roles or of `both` in one, with weights."""
    with tempfile.TemporaryDirectory() as folder:
        weights = random_weights(SHAPE, folder)
        chosen = EngineOptions(
            model_path=str(Path(folder)), dtype="float32", request_timeout_s=600.0, **options
        )
        systems = [ActorSystem("first"), ActorSystem("second")]
        try:
            if role == "both":
                one = await EmbeddedBoth.start(systems[0], chosen)
                pair = Pair(one, one, weights)
            else:
                pair = Pair(
                    await EmbeddedPrefill.start(systems[0], chosen),
                    await EmbeddedDecode.start(systems[1], chosen),
                    weights,
                )
            await pair.publish()
            yield pair
            await pair.prefill.close()
            if pair.decode is not pair.prefill:
                await pair.decode.close()
        finally:
            for system in systems:
                await system.stop()


def fresh(tokens: int, seed: int) -> list[int]:
    """Return random tokens."""
    drawn = np.random.default_rng(seed).integers(0, SHAPE.vocab_size, tokens)
    return [int(token) for token in drawn]


async def turns(role: str, *, publishes: bool, sessions: int, rounds: int) -> float:
    """Return computed prompt tokens per new one: turns of 60 new and 60 sampled tokens on a prompt
    of 240."""
    computed = new = 0
    async with engines(role) as pair:
        histories = [fresh(240, seed) for seed in range(sessions)]
        new += sum(map(len, histories))
        for turn in range(rounds):
            if publishes and turn:
                await pair.publish()
            answers = await asyncio.gather(*(pair.sample(ids, 60) for ids in histories))
            computed += sum(answer.computed for answer in answers)
            if turn + 1 < rounds:
                for number, answer in enumerate(answers):
                    added = fresh(60, 1000 * turn + number + 7)
                    histories[number] = histories[number] + answer.ids + added
                    new += len(added)
    return computed / new


async def gaps_s(role: str, *, answers: int, prompts: int) -> list[float]:
    """Return the CPU seconds of the decoding thread from step to step, while long prompts are read.

    CPU time: each engine counts as if it had a core of its own.
    """
    found: list[float] = []
    plain = DecodeActor.work
    last_s: list[float] = []

    def work(actor: DecodeActor) -> bool:
        more = plain(actor)
        now_s = time.thread_time()
        found.extend(now_s - before for before in last_s)
        last_s[:] = [now_s] if more else []
        return more

    with mock.patch.object(DecodeActor, "work", work):
        async with engines(role) as pair:
            running = [
                asyncio.create_task(pair.sample(fresh(64, seed), 300)) for seed in range(answers)
            ]
            for seed in range(prompts):
                await pair.sample(fresh(3000, 500 + seed), 1)
            await asyncio.gather(*running)
    return found


async def store(*, tokens: int) -> dict[str, float]:
    """Return the CPU seconds of a prompt computed and of one read, and rates."""
    with tempfile.TemporaryDirectory() as folder:
        options = KvStoreOptions(directory=folder, max_bytes=4 << 30)
        prompts = [fresh(tokens, seed) for seed in range(4)]
        async with engines("both") as pair:
            off_s = await _reads(pair, prompts)
        async with engines("both", kv_store=options) as pair:
            on_s = await _reads(pair, prompts)
        async with engines("both", kv_store=options) as pair:
            read_s = await _reads(pair, prompts)
            read = [await pair.sample([*ids, 1], 1) for ids in prompts]
        assert all(answer.computed < tokens for answer in read)
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    mib = size / (1 << 20)
    return {
        "store.compute_s": off_s, "store.compute_and_write_s": on_s, "store.read_s": read_s,
        "store.compute_over_read": off_s / read_s, "store.write_overhead": on_s / off_s - 1,
        "store.read_mib_per_s": mib / read_s, "store.mib": mib,
    }  # fmt: skip


async def _reads(pair: Pair, prompts: list[list[int]]) -> float:
    await pair.sample(fresh(64, 99), 1)
    began_s = time.process_time()
    for ids in prompts:
        await pair.sample(ids, 1)
    return time.process_time() - began_s


async def measure(*, quick: bool) -> dict[str, float]:
    """Return all figures but those of the hand-off, which has processes of its own."""
    numbers: dict[str, float] = {}
    sessions, rounds = (2, 6) if quick else (4, 10)
    for role in ("two", "both"):
        for publishes in (False, True):
            key = f"turns.{role}{'_published' if publishes else ''}.computed_over_new"
            numbers[key] = await turns(role, publishes=publishes, sessions=sessions, rounds=rounds)
    for role in ("two", "both"):
        gaps = await gaps_s(role, answers=4, prompts=2 if quick else 4)
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            numbers[f"itl.{role}.{name}_ms"] = float(np.quantile(gaps, share)) * 1000
    numbers["itl_p99_disagg_over_agg"] = numbers["itl.two.p99_ms"] / numbers["itl.both.p99_ms"]
    numbers |= await store(tokens=1000 if quick else 4000)
    return numbers


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "", quick="fewer turns, prompts and bytes").parse_args()
    torch.set_num_threads(1)
    numbers = asyncio.run(measure(quick=options.quick))
    numbers |= measure_hand_off(mib=64 if options.quick else 256)
    numbers |= measure_early("tiny", tokens=1000 if options.quick else 4000, rounds=7)
    if not options.quick:
        numbers |= measure_early("small", tokens=2000, rounds=5)
    show("roles, hand-off and KV store", numbers)
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
