"""Checks that need a GPU: what the library computes, against the model's own forward.

They run through the adapter, as a worker does, so that a defect of either is found. Imports torch
and transformers in the calls alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from forge.core.named_tensor import NamedTensor
from forge.core.token_columns import int32_bytes
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engine_settings import TensorRtLlmSettings
from services.inference.engines.aggregated import joined
from services.inference.engines.base import Prompt, Sampling, Tokens
from services.inference.engines.provider import EngineOptions
from services.inference.engines.tensorrt_llm.arguments import Role
from services.inference.engines.tensorrt_llm.engine import TensorRtLlm
from services.inference.engines.tensorrt_llm.library.library import Library
from services.inference.engines.tensorrt_llm.library.surface import Feature

_PROMPT_TOKENS = 96
_ANSWER_TOKENS = 32
_ABORTS = 20
_TOLERANCE = 0.15
"""Largest mean difference of log-probs, in nats, for 16-bit weights."""
_GREEDY = Sampling(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    max_tokens=_ANSWER_TOKENS,
    stop_ids=frozenset(),
    seed=0,
)
_SAMPLED = replace(_GREEDY, temperature=1.0)
_numbers = count()


@dataclass(frozen=True, slots=True)
class Subject:
    """Inputs of the checks."""

    library: Library
    model_path: Path
    tensors: dict[str, NamedTensor]
    settings: TensorRtLlmSettings
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """One check; `run` returns a problem, "" without one."""

    text: str
    remedy: str
    run: Callable[[Subject], Awaitable[str]]


async def run_checks(
    library: Library,
    model_path: Path,
    settings: TensorRtLlmSettings | None = None,
    *,
    checks: Sequence[Check] | None = None,
) -> list[tuple[Check, str]]:
    """Run all, or `checks`; return each with its problem, "" without one."""
    subject = Subject(
        library,
        model_path,
        await asyncio.to_thread(_read_weights, model_path),
        settings or TensorRtLlmSettings(),
        _prompt(model_path),
    )
    results = []
    for check in CHECKS if checks is None else checks:
        try:
            problem = await check.run(subject)
        except Exception as error:  # Any failure of the library is the finding.
            problem = f"{type(error).__name__}: {error}"
        results.append((check, problem))
    return results


async def _logprobs_equal(subject: Subject) -> str:
    async with _engine(subject, Role.BOTH) as engine:
        answer = await _answer(engine, subject.prompt_ids, _SAMPLED)
    expected = await asyncio.to_thread(_scores, subject, answer.ids)
    return _distance(answer.logprobs, expected)


async def _update_is_a_fresh_load(subject: Subject) -> str:
    """Other weights, then ours in small buckets: the answer is that of the checkpoint."""
    small = replace(subject, settings=replace(subject.settings, update_bucket_mib=16))
    async with _engine(small, Role.BOTH) as engine:
        fresh = await _answer(engine, subject.prompt_ids, _GREEDY)
        await engine.load(_negated(subject.tensors), version=2)
        other = await _answer(engine, subject.prompt_ids, _GREEDY)
        await engine.load(subject.tensors, version=3)
        again = await _answer(engine, subject.prompt_ids, _GREEDY)
    if other.ids == fresh.ids:
        return "an update with other weights changed no token"
    return "" if again.ids == fresh.ids else "the answer after updates is not the one before"


async def _hand_off_is_exact(subject: Subject) -> str:
    if Feature.DISAGGREGATION not in subject.library.features:
        return ""
    async with _engine(subject, Role.BOTH) as engine:
        alone = await _answer(engine, subject.prompt_ids, _GREEDY)
    async with (
        _engine(subject, Role.PREFILL) as prefill,
        _engine(subject, Role.DECODE) as decode,
    ):
        handed = await _answer(prefill, subject.prompt_ids, _GREEDY, decode=decode)
    if handed.ids != alone.ids:
        return "prefill and decode apart sample other tokens"
    return _distance(handed.logprobs, alone.logprobs)


async def _aborts_leak_nothing(subject: Subject) -> str:
    """Callers leave during transfers; afterwards the engine becomes idle, and serves."""
    if Feature.DISAGGREGATION not in subject.library.features:
        return ""
    async with (
        _engine(subject, Role.PREFILL) as prefill,
        _engine(subject, Role.DECODE) as decode,
    ):
        for _ in range(_ABORTS):
            fetched = asyncio.Event()
            leaving = asyncio.create_task(
                _answer(prefill, subject.prompt_ids, _GREEDY, decode=decode, fetched=fetched)
            )
            await fetched.wait()
            # Two turns of the loop: the decode request is on its way.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait({leaving})
        async with asyncio.timeout(60):
            await decode.idle()
            await _answer(prefill, subject.prompt_ids, _GREEDY, decode=decode)
    return ""


async def _seeds_differ(subject: Subject) -> str:
    async with _engine(subject, Role.BOTH) as engine:
        seeded = [replace(_SAMPLED, seed=seed) for seed in range(8)]
        answers = await asyncio.gather(
            *(_answer(engine, subject.prompt_ids, one) for one in seeded)
        )
    distinct = len({answer.ids for answer in answers})
    return "" if distinct > 1 else f"{len(answers)} seeds gave one answer"


CHECKS = (
    Check(
        "log-probs equal those of the model's own forward",
        "Do not train with this engine: its samples are not of the distribution it reports.",
        _logprobs_equal,
    ),
    Check(
        "an update in buckets equals a fresh load",
        "Turn tensorrt_llm.cuda_graphs off and try again; report the model to its maintainers.",
        _update_is_a_fresh_load,
    ),
    Check(
        "prefill and decode apart equal one engine",
        "Use role = both, or another tensorrt_llm.transceiver.",
        _hand_off_is_exact,
    ),
    Check(
        "callers that leave during a transfer leak nothing",
        "Use role = both, or a newer version of the library.",
        _aborts_leak_nothing,
    ),
    Check(
        "seeds give different answers",
        "Turn tensorrt_llm.mtp_layers off, or install a newer version of the library.",
        _seeds_differ,
    ),
)


@asynccontextmanager
async def _engine(subject: Subject, role: Role) -> AsyncIterator[TensorRtLlm]:
    system = ActorSystem("checklist")
    options = EngineOptions(
        model_path=str(subject.model_path),
        device="cuda",
        block_tokens=32,
        request_timeout_s=600.0,
        settings=subject.settings,
    )
    engine = await TensorRtLlm.start(system, options, subject.library, role)
    try:
        await engine.load(subject.tensors, version=1)
        yield engine
    finally:
        await engine.close()
        await system.stop()


async def _answer(
    prefill: TensorRtLlm,
    ids: tuple[int, ...],
    sampling: Sampling,
    *,
    decode: TensorRtLlm | None = None,
    fetched: asyncio.Event | None = None,
) -> Tokens:
    """Sample one answer. `fetched`: set once decode has the hand-off."""
    prompt = Prompt(request_id=f"check-{next(_numbers)}", ids=int32_bytes(ids), sampling=sampling)
    first = (await prefill.prefill(prompt, hold_s=600)).first

    async def fetch(from_token: int) -> Any:
        span = await prefill.fetch_kv(prompt.request_id, from_token=from_token)
        if fetched is not None:
            fetched.set()
        return span

    answer = first
    async with aclosing((decode or prefill).decode(prompt, first, fetch, stream=True)) as stream:
        async for piece in stream:
            answer = joined(answer, piece.tokens)
    return answer


def _distance(found: tuple[float, ...], expected: tuple[float, ...]) -> str:
    mean = sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(found)
    return "" if mean <= _TOLERANCE else f"log-probs differ by {mean:.3g} (mean)"


def _prompt(model_path: Path) -> tuple[int, ...]:
    from services.inference.engines.model_limits import read_limits

    vocabulary = read_limits(str(model_path), context_tokens=0).vocabulary
    return tuple(7919 * place % vocabulary for place in range(1, _PROMPT_TOKENS + 1))


def _scores(subject: Subject, ids: tuple[int, ...]) -> tuple[float, ...]:
    """Log-probs of an answer by transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(subject.model_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*subject.prompt_ids, *ids]])).logits[0]
    rows = logits[len(subject.prompt_ids) - 1 : -1].log_softmax(-1)
    found = rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
    return tuple(found.tolist())


def _read_weights(model_path: Path) -> dict[str, NamedTensor]:
    from safetensors.torch import load_file

    tensors = {}
    for file in sorted(model_path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            tensors[name] = _named(name, tensor)
    return tensors


def _negated(tensors: dict[str, NamedTensor]) -> dict[str, NamedTensor]:
    """Weights whose answers differ: all matrices of the layers with the other sign."""
    import torch

    changed = {}
    for name, stored in tensors.items():
        flat = torch.frombuffer(bytearray(stored.data), dtype=getattr(torch, stored.dtype))
        turned = -flat if len(stored.shape) > 1 and "layers" in name else flat
        changed[name] = _named(name, turned.view(stored.shape))
    return changed


def _named(name: str, tensor: Any) -> NamedTensor:
    import torch

    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return NamedTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), data=data)
