"""Engines under contract: how each is started on a tiny model, and how a test talks to it.

A test of an ability takes the engines that declare it: `params=engines.able("cuts")`. With
FORGE_ENGINES=NAME the suite runs on that installed engine alone (vllm: `make test-engines`), with
FORGE_ENGINES_DEVICE=cuda:0 on that device (`make test-gpu-engine`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from examples.engine import ExampleEngine
from forge.core.named_tensor import NamedTensor
from forge.core.routes import RouteSpan
from forge.rl.mtp.heads import MtpHead, MtpHeads
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.aggregated import Aggregated
from services.inference.engines.base import (
    DecodeEngine,
    Likeliest,
    PrefillEngine,
    Prompt,
    Sampling,
    Tokens,
)
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.embedded.engine import EmbeddedBoth, EmbeddedDecode, EmbeddedPrefill
from services.inference.engines.embedded.roles.wiring import CAPABILITIES as EMBEDDED_CAPABILITIES
from services.inference.engines.provider import EngineOptions
from services.inference.engines.refusals import check_request
from services.inference.engines.tensor_bytes import to_named
from services.inference.worker.service import finish_with

# Engines and references compute at the same time; more threads than cores only wait for each other.
torch.set_num_threads(1)

ALONE = os.environ.get("FORGE_ENGINES", "")
ON_VLLM = ALONE == "vllm"
DEVICE = os.environ.get("FORGE_ENGINES_DEVICE", "cpu")
"""Of the engine; references compute on the CPU."""
VOCABULARY = 211
HEAD_SIZE = 32 if ON_VLLM else 16
"""vLLM's attention on CPUs has no smaller one than 32."""
CONTEXT_TOKENS = 512
BLOCK_TOKENS = 8
CACHED_BLOCK_TOKENS = 32 if ON_VLLM else BLOCK_TOKENS
"""vLLM's attention on CPUs has blocks of 32 and their multiples."""

END = 0
"""The token that ends an answer, for tests that want one."""
_PIECES = ["<end>", *map(chr, range(33, 127)), "\u0120", '{"', '":', "12", "na"]
"""The tokenizer: printable ASCII, a space as byte-level tokenizers spell it, and a few merges."""

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    # No token ends an answer unless a test says so.
    "eos_token_id": None,
    "bos_token_id": None,
    # Large enough that the likeliest token is not a matter of rounding.
    "initializer_range": 0.2,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SHAPE, head_dim=HEAD_SIZE, tie_word_embeddings=True),
    "llama": LlamaConfig(**SHAPE, head_dim=HEAD_SIZE, tie_word_embeddings=False),
}

ROUTED = Qwen3MoeConfig(
    **SHAPE,
    head_dim=HEAD_SIZE,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    decoder_sparse_step=1,
    mlp_only_layers=[1],
)
"""A mixture of experts with a layer that has none."""


def reference(family: str, *, seed: int = 0) -> PreTrainedModel:
    """The model as transformers runs it, with random weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        ROUTED if family == "qwen3_moe" else CONFIGS[family], dtype=torch.float32
    )
    return model.eval().requires_grad_(False)


def published(model: PreTrainedModel) -> dict[str, NamedTensor]:
    """Its weights as a trainer sends them: tied ones once."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        tensors[name] = to_named(name, tensor)
    return tensors


def draftable(config: LlamaConfig | None = None, *, seed: int = 0) -> PreTrainedModel:
    """A llama whose layers change little: its next token depends mostly on the last one, as
    `with_heads` drafts it."""
    torch.manual_seed(seed)
    config = config or CONFIGS["llama"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data *= 0.05
    return model.eval().requires_grad_(False)


def last_token_model(*, seed: int = 0) -> PreTrainedModel:
    """A qwen3 whose layers add nothing: its next token depends on the last one alone, so its
    distribution is a table, and keys and values of other weights change nothing."""
    model = reference("qwen3", seed=seed)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.zero_()
    return model


def logprob_table(model: PreTrainedModel) -> torch.Tensor:
    """The log-prob of each token behind each, of a `last_token_model`; [V, V]."""
    found: torch.Tensor = model(torch.arange(VOCABULARY)[:, None]).logits[:, 0].log_softmax(-1)
    return found


def with_heads(
    tensors: Mapping[str, NamedTensor], *, count: int = 3, channels: int = 64
) -> dict[str, NamedTensor]:
    """The weights with draft heads, which draft as if the model had no layers."""
    with torch.random.fork_rng():
        heads = MtpHeads(count, channels=channels, embedding_channels=channels)
    for head in heads:
        assert isinstance(head, MtpHead)
        head.fuse.weight.data = torch.cat([torch.zeros(channels, channels), torch.eye(channels)], 1)
        head.down.weight.data.zero_()
    drafted = {name: to_named(name, one) for name, one in heads.named_tensors().items()}
    return {**tensors, **drafted}


def is_greedy(model: PreTrainedModel, ids: list[int], sampled: list[int]) -> bool:
    """Whether each token is the likeliest after all before it, by one full forward."""
    logits = model(torch.tensor([ids + sampled])).logits[0, len(ids) - 1 : -1]
    found: bool = logits.argmax(-1).tolist() == sampled
    return found


def prompt_ids(tokens: int, *, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, tokens).tolist()
    return found


def save_tokenizer(folder: Path) -> None:
    """For engines to read grammars with; most tests know tokens as numbers only."""
    vocabulary = {piece: token for token, piece in enumerate(_PIECES)}
    merges = [(piece[0], piece[1]) for piece in _PIECES[-4:]]
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=_PIECES[END]).save_pretrained(folder)


def text_of(ids: list[int]) -> str:
    return "".join(_PIECES[token] for token in ids).replace("\u0120", " ")


GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=16, stop_ids=frozenset(), seed=0)
SAMPLED = replace(GREEDY, temperature=1.0)
_request_numbers = count()


def make_prompt(ids: list[int], sampling: Sampling) -> Prompt:
    """A request of its own."""
    return Prompt(
        request_id=f"request-{next(_request_numbers)}",
        ids=np.asarray(ids, dtype="<i4").tobytes(),
        sampling=sampling,
    )


@dataclass(kw_only=True)
class Answer:
    """All that one request gave."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    allowed: list[float] = field(default_factory=list)
    top: list[Likeliest] = field(default_factory=list)
    finish: Any = None
    cached_tokens: int = 0
    fetched_tokens: int = 0
    routes: list[RouteSpan] = field(default_factory=list)

    def add(self, tokens: Tokens) -> None:
        self.ids += tokens.ids
        self.logprobs += tokens.logprobs
        self.versions += tokens.versions
        self.allowed += tokens.allowed
        self.top += tokens.top
        if tokens.routes is not None:
            self.routes.append(tokens.routes)


@dataclass(kw_only=True)
class Pair:
    """A prefill and a decode engine, joined as the service joins them."""

    prefill: PrefillEngine
    decode: DecodeEngine

    @property
    def capabilities(self) -> Capabilities:
        return self.decode.capabilities

    @property
    def is_one(self) -> bool:
        """Whether one engine does both, so that the keys and values of answers are where prompts
        are read."""
        both: object = self.decode
        return both is self.prefill

    async def load(self, tensors: Mapping[str, NamedTensor], *, version: int) -> None:
        await self.prefill.load(tensors, version=version)
        if not self.is_one:
            await self.decode.load(tensors, version=version)

    async def sample(
        self,
        ids: list[int],
        sampling: Sampling = GREEDY,
        *,
        on_piece: Any = None,
        on_fetch: Any = None,
    ) -> Answer:
        prompt = make_prompt(ids, sampling)
        check_request(prompt, self.capabilities)
        answer = Answer()
        prefilled = await self.prefill.prefill(prompt, hold_s=60)
        answer.add(prefilled.first)
        answer.cached_tokens = prefilled.cached_tokens
        answer.finish = finish_with(prefilled.first, prompt, self.prefill.limits)
        if answer.finish is not None:
            self.prefill.release(prompt.request_id)
            return answer

        async def fetch_kv(from_token: int) -> Any:
            local = getattr(self.prefill, "local_kv", None) if self.is_one else None
            fetch = local or self.prefill.fetch_kv
            span = await fetch(prompt.request_id, from_token=from_token)
            self.prefill.release(prompt.request_id)
            answer.fetched_tokens = span.tokens
            if on_fetch is not None:
                await on_fetch()
            return span

        pieces = self.decode.decode(prompt, prefilled.first, fetch_kv, stream=bool(on_piece))
        async for piece in pieces:
            answer.add(piece.tokens)
            answer.finish = piece.finish
            if on_piece is not None and await on_piece(answer) is False:
                await pieces.aclose()
                break
        return answer


class Start(Protocol):
    """Starts an engine without weights."""

    def __call__(self, model_path: Path, **options: Any) -> AbstractAsyncContextManager[Pair]: ...


@asynccontextmanager
async def embedded(model_path: Path, **options: Any) -> AsyncIterator[Pair]:
    """The embedded engine, without weights."""
    chosen = make_options(model_path, **options)
    system = ActorSystem("contract")
    decode_system = ActorSystem("contract-decode")
    try:
        yield Pair(
            prefill=await EmbeddedPrefill.start(system, chosen),
            decode=await EmbeddedDecode.start(decode_system, chosen),
        )
    finally:
        await system.stop()
        await decode_system.stop()


@asynccontextmanager
async def embedded_both(model_path: Path, **options: Any) -> AsyncIterator[Pair]:
    """The embedded engine in the role both, without weights."""
    system = ActorSystem("contract-both")
    try:
        both = await EmbeddedBoth.start(system, make_options(model_path, **options))
        yield Pair(prefill=both, decode=both)
    finally:
        await system.stop()


@asynccontextmanager
async def example(model_path: Path, **options: Any) -> AsyncIterator[Pair]:
    """The engine of examples/, as the registry starts it."""
    engine = Aggregated(ExampleEngine(make_options(model_path, **options)))
    yield Pair(prefill=engine, decode=engine)
    await engine.close()


def make_options(model_path: Path, **options: Any) -> EngineOptions:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": DEVICE,
        "block_tokens": BLOCK_TOKENS,
        "request_timeout_s": 600.0,
    }
    if DEVICE != "cpu":
        # Of a device all of it is allocated, by each engine of each test process.
        defaults |= {"kv_bytes": 64 << 20, "cache_bytes": 64 << 20}
    return EngineOptions(model_path=str(model_path), **(defaults | options))


EMBEDDED: dict[str, Start] = {"embedded": embedded, "both": embedded_both}
"""The embedded engine, with separate roles and with both: tests of its memory and its passes."""
SEPARATE: dict[str, Start] = {"embedded": embedded}
"""Two engines, with keys and values as bytes that move between them."""
APART: dict[str, Start] = {**SEPARATE}
"""And those whose keys and values the library moves."""
ENGINES: dict[str, Start] = {**EMBEDDED, "example": example}
"""And engines that do both."""
CAPABILITIES = {
    "embedded": EMBEDDED_CAPABILITIES,
    "both": EMBEDDED_CAPABILITIES,
    "example": ExampleEngine.capabilities,
}
# By name: those modules need this one.
if DEVICE == "cpu" and not ALONE:
    stand_in: Any = import_module("tests.contract.tensorrt_llm_engine")
    APART["tensorrt_llm"] = stand_in.apart
    ENGINES |= {"tensorrt_llm": stand_in.apart, "tensorrt_llm_both": stand_in.both}
    CAPABILITIES["tensorrt_llm"] = stand_in.capabilities(transfers=True)
    CAPABILITIES["tensorrt_llm_both"] = stand_in.capabilities(transfers=False)
if ALONE:
    other: Any = import_module(f"tests.contract.{'vllm' if ON_VLLM else 'installed'}_engine")
    EMBEDDED, SEPARATE, APART = {}, {}, {}
    ENGINES = {ALONE: other.start}
    CAPABILITIES = {ALONE: other.CAPABILITIES if ON_VLLM else other.capabilities()}


ROLES_OF_VLLM = "vLLM's two roles are in tests/engines/test_engines_vllm_handoff.py"


def able(ability: str, value: Any = None) -> list[str]:
    """Engines that declare an ability: at all, with `value`, or with `value` among others."""

    def declares(found: Any) -> bool:
        if value is None:
            return bool(found)
        return value in found if isinstance(found, frozenset) else bool(found == value)

    return [name for name in ENGINES if declares(getattr(CAPABILITIES[name], ability))]


def require(ability: bool, lacking: str) -> None:
    """Ends the test of an ability that the engine does not declare, by its name `lacking`."""
    if not ability:
        pytest.skip(f"the engine declares no {lacking}")


def or_skipped(names: Iterable[str], reason: str) -> list[Any]:
    """Engines of a test, or one skipped test with the reason why none of the suite's can run it."""
    return [*names] or [pytest.param("none", marks=pytest.mark.skip(reason=reason))]
