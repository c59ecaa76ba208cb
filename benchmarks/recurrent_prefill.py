"""Prefill of recurrent layers in packed rows: `python -m benchmarks.recurrent_prefill`.

    [--dtype float32|bfloat16] [--rounds N] [--only MODEL...] [--tokens N...] [--quick]
    [--json FILE]

Prompts arrive at once at a prefill engine without cache; weights are random, shapes are four layers
of a small published model. All ways run in turn, one thread. Keys, for each model and length:

    one_s       CPU seconds of the layers' forward on one prompt after the other, an earlier way
    packed_s    CPU seconds of one forward over all tokens; convolution and scan one by one
    whole_s     the same with scans that pad each piece to whole chunks
    gain        median of one / packed within a round
    chunk_gain  median of whole / packed within a round
    logprob_err largest difference of the first sampled tokens' log-probs
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest import mock

import torch
from transformers import FalconH1Config, Mamba2Config, Qwen3NextConfig
from transformers.utils.logging import disable_progress_bar

from benchmarks.support.report import arguments, keep, show
from services.inference.engines.base import Prompt, Sampling
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.messages import Read
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.prefill import PrefillActor
from services.inference.engines.embedded.recurrent import layers, packed
from services.inference.engines.tensor_bytes import to_named

CONFIGS: dict[str, Any] = {
    "mamba2": Mamba2Config(
        hidden_size=768, num_heads=24, head_dim=64, state_size=128, n_groups=1,
        num_hidden_layers=4, vocab_size=1000, chunk_size=256,
    ),
    "falcon_h1": FalconH1Config(
        hidden_size=1024, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64,
        mamba_n_groups=1, mamba_d_state=128, mamba_chunk_size=128, vocab_size=1000,
    ),
    "qwen3_next": Qwen3NextConfig(
        hidden_size=1024, num_hidden_layers=4, num_experts=0, mlp_only_layers=[0, 1, 2, 3],
        layer_types=["linear_attention"] * 3 + ["full_attention"], intermediate_size=2048,
        linear_num_value_heads=16, linear_num_key_heads=8, linear_key_head_dim=128,
        linear_value_head_dim=128, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        vocab_size=1000,
    ),
}  # fmt: skip
PROMPTS = 16
LENGTHS = (40, 250)


class _AtOnce:
    """Stands in for the event loop."""

    def call_soon_threadsafe(self, call: Any, *args: Any) -> None:
        call(*args)


def policy_of(config: Any, dtype: str) -> Policy:
    """A model with random weights."""
    torch.manual_seed(0)
    with TemporaryDirectory() as directory:
        config.save_pretrained(Path(directory))
        policy = Policy.build(directory, dtype=dtype, device="cpu")
    tensors = {
        name: to_named(name, torch.ones(one.shape) if "norm" in name else drawn)
        for name, one in policy.module.state_dict().items()
        if (drawn := torch.randn(one.shape) * 0.02) is not None
    }
    policy.swap(policy.stage(tensors, version=1))
    return policy


def prefill(policy: Policy, length: int, *, seed: int) -> tuple[float, list[float]]:
    """CPU seconds and log-probs of the first tokens."""
    cache = KvCache(policy.kv_shape, block_tokens=16, capacity_bytes=1 << 20)
    actor = PrefillActor(policy, cache, block_tokens=16, pass_tokens=2048, threads=1)
    actor.loop = cast(asyncio.AbstractEventLoop, _AtOnce())
    rng = torch.Generator().manual_seed(seed)
    sampling = Sampling(
        temperature=1.0, top_p=1.0, top_k=0, max_tokens=2, stop_ids=frozenset(), seed=1
    )
    found: dict[int, Any] = {}

    def read(number: int) -> Read:
        ids = torch.randint(0, 1000, (length + number % 7,), generator=rng).tolist()
        prompt = Prompt(request_id=str(number), ids=array("i", ids).tobytes(), sampling=sampling)
        return Read(
            prompt=prompt,
            asked_s=0.0,
            deliver=lambda outcome: found.__setitem__(number, outcome),
        )

    reads = [read(number) for number in range(PROMPTS)]
    began_s = time.process_time()
    actor.receive_batch(reads)
    while actor.work():
        pass
    took_s = time.process_time() - began_s
    return took_s, [found[number].prefilled.first.logprobs[0] for number in range(PROMPTS)]


@contextmanager
def one_by_one() -> Iterator[None]:
    """Context in which no layer is packed."""
    with mock.patch.object(layers, "can_pack", lambda _: False):
        yield


@contextmanager
def whole_chunks() -> Iterator[None]:
    """Context in which a short piece of a prompt has no shorter chunk."""
    with mock.patch.object(packed, "_fit_chunk", lambda *_: None):
        yield


def measure(policy: Policy, length: int, *, rounds: int) -> dict[str, float]:
    """The keys of one model and length; the first round warms up."""
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "one": one_by_one,
        "whole": whole_chunks,
        "packed": nullcontext,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    errors = []
    for number in range(rounds + 1):
        found = []
        for name, way in ways.items():
            with way():
                took_s, logprobs = prefill(policy, length, seed=number)
            found.append(logprobs)
            if number:
                seconds[name].append(took_s)
        wanted, *others = found
        errors += [abs(a - b) for got in others for a, b in zip(wanted, got, strict=True)]

    def gain(slow: str) -> float:
        return median(a / b for a, b in zip(seconds[slow], seconds["packed"], strict=True))

    return {f"{name}_s": median(of_way) for name, of_way in seconds.items()} | {
        "gain": gain("one"),
        "chunk_gain": gain("whole"),
        "logprob_err": max(errors),
    }


def main() -> None:
    parser = arguments(__doc__, quick="prompts of 40 tokens, one round")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=CONFIGS, default=[*CONFIGS])
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS, help="of a prompt")
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    numbers: dict[str, float] = {}
    for name in options.only:
        policy = policy_of(CONFIGS[name], options.dtype)
        for length in LENGTHS[:1] if options.quick else options.tokens:
            found = measure(policy, length, rounds=1 if options.quick else options.rounds)
            show(f"{name}, {PROMPTS} prompts of {length} tokens, {options.dtype}", found)
            numbers |= {f"{name}.{length}.{key}": one for key, one in found.items()}
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
