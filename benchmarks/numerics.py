"""Distance of the engine's log-probs from the trainer's: `python -m benchmarks.numerics MODEL...`.

    [--dtype bfloat16|float32|float16] [--prompts N] [--tokens N] [--quick] [--json FILE]

MODEL is a directory of transformers. The embedded engine samples continuations of the project's own
pages, all at once, at temperature 1; the trainer's forward then computes the log-prob of each
sampled token with the same weights, merged into one tree per prompt, as in a step. Keys of a model:

    gap.mean, gap.p99, gap.max   |engine - trainer| over the sampled tokens, in nats
    bias.mean                    mean of engine - trainer
    equal.share                  share of tokens with the same float32 log-prob
    tokens                       sampled tokens
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.support.report import arguments, keep, show
from forge.core.named_tensor import NamedTensor
from forge.core.prefix_tree import Sample
from forge.rl.learner.batch_plan import plan_batch
from forge.rl.model.policy import TreePolicy
from forge.rl.model.served_weights import ServedValues
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.base import (
    KvSpan,
    Prompt,
    Sampling,
    Tokens,
)
from services.inference.engines.embedded.engine import EmbeddedDecode, EmbeddedPrefill
from services.inference.engines.provider import EngineOptions
from services.inference.engines.tensor_bytes import to_named

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PAGES = ("README.md", "docs/architecture.md", "docs/training.md", "docs/inference.md")
PROMPT_TOKENS = (24, 97, 210, 400)
"""Lengths of prompts, in turn; four answers follow each."""
ANSWERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A prompt and what the engine sampled after it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def prompts_of(model: Path, count: int) -> list[tuple[int, ...]]:
    """Token ids of passages of the project's own pages."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "\n".join(Path(page).read_text(encoding="utf-8") for page in PAGES)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    lengths = [PROMPT_TOKENS[number % len(PROMPT_TOKENS)] for number in range(count)]
    starts = [number * (len(ids) - max(lengths)) // count for number in range(count)]
    return [tuple(ids[s : s + length]) for s, length in zip(starts, lengths, strict=True)]


async def sample(
    model: Path,
    weights: Mapping[str, NamedTensor],
    prompts: Sequence[tuple[int, ...]],
    *,
    dtype: str,
    tokens: int,
) -> list[Answer]:
    """Let the engine answer each prompt `ANSWERS` times, all at once."""
    options = EngineOptions(model_path=str(model), dtype=dtype, request_timeout_s=600.0, threads=2)
    actors = ActorSystem("numerics")
    prefill = await EmbeddedPrefill.start(actors, options)
    decode = await EmbeddedDecode.start(actors, options)
    for engine in (prefill, decode):
        await engine.load(weights, version=1)

    async def answer(number: int, ids: tuple[int, ...]) -> Answer:
        sampling = Sampling(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=tokens,
            stop_ids=frozenset(),
            seed=number,
        )
        prompt = Prompt(request_id=str(number), ids=array("i", ids).tobytes(), sampling=sampling)
        first = (await prefill.prefill(prompt, hold_s=600.0)).first

        async def fetch(from_token: int) -> KvSpan:
            return await prefill.fetch_kv(prompt.request_id, from_token=from_token)

        parts: list[Tokens] = [first]
        pieces = decode.decode(prompt, first, fetch, stream=False)
        parts += [piece.tokens async for piece in pieces]
        prefill.release(prompt.request_id)
        return Answer(
            prompt=ids,
            tokens=tuple(token for part in parts for token in part.ids),
            logprobs=tuple(one for part in parts for one in part.logprobs),
        )

    wanted = [ids for ids in prompts for _ in range(ANSWERS)]
    found = await asyncio.gather(*(answer(number, ids) for number, ids in enumerate(wanted)))
    await prefill.close()
    await decode.close()
    return found


def published(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, NamedTensor]:
    """Weights as a trainer publishes them."""
    return {
        name: to_named(name, one.to(dtype) if one.is_floating_point() else one)
        for name, one in model.state_dict().items()
    }


def gaps(model: torch.nn.Module, answers: Sequence[Answer], dtype: torch.dtype) -> torch.Tensor:
    """Engine - trainer for each sampled token: the trainer's pass, as in a step."""
    autocast = None if dtype == torch.float32 else dtype
    policy = TreePolicy(model, autocast=autocast)
    samples = [
        Sample(
            ids=array("i", (*one.prompt, *one.tokens)).tobytes(),
            trained=((len(one.prompt), len(one.prompt) + len(one.tokens)),),
            behavior_logprobs=array("f", one.logprobs).tobytes(),
            weight_versions=array("i", [1] * len(one.tokens)).tobytes(),
            advantages=array("f", [1.0] * len(one.tokens)).tobytes(),
        )
        for one in answers
    ]
    plan = plan_batch(samples, token_budget=4096, channels=policy.channels)
    found = []
    with torch.no_grad(), ServedValues(model, published=dtype, autocast=autocast).in_place():
        for tree in plan.trees:
            logprobs_T, _ = policy.logprobs(tree)
            found.append(tree.behavior_T - logprobs_T)
    return torch.cat(found)


def measure(path: Path, *, dtype: str, prompts: int, tokens: int) -> dict[str, float]:
    """The keys of one model."""
    kind = DTYPES[dtype]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    began = time.process_time()
    answers = asyncio.run(
        sample(path, published(model, kind), prompts_of(path, prompts), dtype=dtype, tokens=tokens)
    )
    took = time.process_time() - began
    gaps_T = gaps(model, answers, kind)
    sizes_T = gaps_T.abs()
    return {
        "gap.mean": float(sizes_T.mean()),
        "gap.p99": float(sizes_T.quantile(0.99)),
        "gap.max": float(sizes_T.max()),
        "bias.mean": float(gaps_T.mean()),
        "equal.share": float((sizes_T == 0).float().mean()),
        "tokens": float(len(gaps_T)),
        "engine_cpu_s": took,
    }


def main() -> None:
    parser = arguments(__doc__, quick="two prompts, 16 tokens")
    parser.add_argument("models", nargs="+", type=Path, help="directories of transformers")
    parser.add_argument("--dtype", choices=[*DTYPES], default="bfloat16")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    disable_progress_bar()
    prompts, tokens = (2, 16) if options.quick else (options.prompts, options.tokens)
    numbers: dict[str, float] = {}
    for path in options.models:
        found = measure(path, dtype=options.dtype, prompts=prompts, tokens=tokens)
        show(f"{path.name}, {options.dtype}", found)
        numbers |= {f"{path.name}.{options.dtype}.{key}": one for key, one in found.items()}
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
