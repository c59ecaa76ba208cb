"""The programs in this environment that `benchmarks.inference` compares, each a child process.

    python -m benchmarks.support.inference.child KIND --model DIRECTORY --dtype TYPE

`engine` is the embedded engine in the role both, `service` a router and a worker of that role,
`service_two` a router, a prefill and a decode worker; `generate` and `generate_batch` are those of
transformers. A child reads one JSON request a line, {"prompts": [[id]], "tokens": n}, and answers
each with one line, {"answers": [[id]], "cpu_s": seconds}: the CPU time of its whole process, of the
services that of router and workers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.support.inference.service import start
from forge.core.token_columns import int32_bytes
from forge.runtime.actors.actor_system import ActorSystem
from forge.runtime.process.allocator import settle
from services.inference.engines.base import (
    KvSpan,
    Prompt,
    Sampling,
)
from services.inference.engines.embedded.engine import EmbeddedBoth
from services.inference.engines.provider import EngineOptions
from services.inference.engines.tensor_bytes import to_named

Generate = Callable[[list[list[int]], int], Awaitable[list[list[int]]]]
"""Prompts and the tokens of each answer; returns the answers."""
Started = tuple[Generate, Callable[[], float]]
"""A program, and the CPU seconds that it has taken so far."""


async def engine(options: argparse.Namespace) -> Started:
    """The embedded engine, called as a worker calls it."""
    system = ActorSystem("benchmark")
    chosen = EngineOptions(
        model_path=str(options.model),
        dtype=options.dtype,
        cache_bytes=options.cache_mib << 20,
        request_timeout_s=3600.0,
    )
    served = await EmbeddedBoth.start(system, chosen)
    weights = load_file(options.model / "model.safetensors")
    await served.load({name: to_named(name, one) for name, one in weights.items()}, version=1)
    settle()
    numbers = itertools.count()

    async def one(ids: list[int], tokens: int) -> list[int]:
        number = next(numbers)
        sampling = Sampling(
            temperature=1.0, top_p=1.0, top_k=0, max_tokens=tokens, stop_ids=frozenset(),
            seed=number,
        )  # fmt: skip
        prompt = Prompt(request_id=str(number), ids=int32_bytes(ids), sampling=sampling)
        read = await served.prefill(prompt, hold_s=3600)
        answer = [*read.first.ids]

        async def fetch(from_token: int) -> KvSpan:
            span = await served.local_kv(prompt.request_id, from_token=from_token)
            served.release(prompt.request_id)
            return span

        if tokens == 1:
            served.release(prompt.request_id)
            return answer
        async for piece in served.decode(prompt, read.first, fetch, stream=False):
            answer += piece.tokens.ids
        return answer

    async def run(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return await asyncio.gather(*(one(ids, tokens) for ids in prompts))

    return run, time.process_time


async def generate(options: argparse.Namespace) -> Started:
    """One call of `generate` for all prompts, padded on the left."""
    model = _model(options, attention="sdpa")

    async def run(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
        seen = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=seen, generation_config=_settings(tokens))
        return [row[longest:] for row in found.tolist()]

    return run, time.process_time


async def generate_batch(options: argparse.Namespace) -> Started:
    """The continuous batching of transformers."""
    model = _model(options, attention="sdpa")

    async def run(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        # Its thread is outside of the inference mode of this one.
        found = model.generate_batch(
            inputs=prompts, generation_config=_settings(tokens), progress_bar=False
        )
        ordered = sorted(found.values(), key=lambda one: int(one.request_id.rpartition("_")[2]))
        return [list(one.generated_tokens) for one in ordered]

    return run, time.process_time


async def service(options: argparse.Namespace) -> Started:
    """Router and one worker that does both."""
    return await start(options.model, options.dtype, roles=("both",), cache_mib=options.cache_mib)


async def service_two(options: argparse.Namespace) -> Started:
    """Router, prefill and decode worker, which hand over."""
    roles = ("prefill", "decode")
    return await start(options.model, options.dtype, roles=roles, cache_mib=options.cache_mib)


def _model(options: argparse.Namespace, *, attention: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation=attention
    )
    return model.eval().requires_grad_(False)


def _settings(tokens: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=tokens,
        min_new_tokens=tokens, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip


_KINDS: dict[str, Callable[[argparse.Namespace], Awaitable[Started]]] = {
    "engine": engine,
    "service": service,
    "service_two": service_two,
    "generate": generate,
    "generate_batch": generate_batch,
}


async def _serve(options: argparse.Namespace) -> None:
    # Libraries print on stdout, too.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run, used_s = await _KINDS[options.kind](options)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        began_s = used_s()
        answers = await run(request["prompts"], request["tokens"])
        cpu_s = used_s() - began_s
        print(json.dumps({"answers": answers, "cpu_s": cpu_s}), file=replies, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=_KINDS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--cache-mib", type=int, default=512)
    torch.set_num_threads(1)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
