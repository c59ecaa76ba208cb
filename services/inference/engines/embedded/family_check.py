"""Checks that the embedded engine computes the same as a family's own model.

Runs a small random copy of the model, with the same kinds of layers and with windows, chunks and
thresholds of a few tokens, through the engine's own actors: prompts read in several passes, beside
shorter ones, with a shared and with a cached prefix; a hand-off; decode steps beside others, with
drafts and without. All log-probs must equal those of the model's own forward on each sequence
alone. Weights arrive later; `probe` checks each version of them.

Owns the decision at the start of a worker, and of the table of families. Not here: the small
configuration (`forge.rl.model.small_config`).
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

from forge.core.errors import ConfigError, ForgeError, InvalidArgument
from forge.rl.model.capabilities import depends_on_length, forget_lengths, one_line, stock_attention
from forge.rl.model.probe import make_double, randomize
from forge.rl.model.small_config import THRESHOLD, small_config
from services.inference.engines import tensor_bytes
from services.inference.engines.base import (
    KvSpan,
    ModelLimits,
    Piece,
    Prompt,
    Sampling,
    Tokens,
)
from services.inference.engines.embedded.decode import DecodeActor
from services.inference.engines.embedded.decode_step import DecodeStep
from services.inference.engines.embedded.kv import attention
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.kv.shared_prefixes import SharedPrefixes
from services.inference.engines.embedded.kv.slabs import Slabs
from services.inference.engines.embedded.kv.state_rows import StateRows
from services.inference.engines.embedded.messages import HeldPrompt, Join, Read, Reserve
from services.inference.engines.embedded.model.architecture import read_config
from services.inference.engines.embedded.model.failures import reason_of
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.prefill import PrefillActor
from services.inference.engines.embedded.sequences import DecodeSequence
from services.inference.engines.embedded.speculation.depth import DepthChooser
from services.inference.engines.embedded.speculation.drafter import (
    Draft,
    Drafter,
    HeadDrafter,
)

TOLERANCE = 1e-3
"""Largest error of a log-prob, in nats. Norms and rotary embeddings are float32 in the model's own
forward too; a family that the engine does not know differs by nats."""
_BLOCK_TOKENS = 4
_PASS_TOKENS = 24
_ANSWER_TOKENS = 5
_MOST_RUNNING = 16
_SEED = 5
_CONTEXT_TOKENS = 96
_LONGEST_TOKENS = 44
"""Beyond every window and threshold of a small copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of the check of a family."""

    refusal: str = ""
    """Reason why it is not served; "" if it is."""
    error: float | None = None
    """Largest error of a log-prob; None if nothing could be computed."""
    greedy_equal: bool = False
    """Whether the likeliest token is that of the model's own forward, at each position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    name: str
    ids: list[int]


@dataclass(slots=True, kw_only=True)
class _SampledTokens:
    ids: list[int] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)
    """All tokens with their log-probs, at each position."""

    def add(self, tokens: Tokens) -> None:
        self.ids += tokens.ids
        self.likeliest += [dict(top) for top in tokens.top]


def check(model_path: str, *, context_tokens: int) -> None:
    """Raises ConfigError, in one line, for a model that the engine would serve wrongly or not at
    all. `context_tokens`: the longest context served; 0: the model's own limit."""
    try:
        config = read_config(model_path)
    except InvalidArgument as error:
        raise ConfigError(str(error)) from error
    verdict = examine(config, context_tokens=context_tokens)
    if not verdict.refusal:
        return
    remedy = ""
    threshold = _threshold(config)
    if threshold and not examine(config, context_tokens=threshold).refusal:
        remedy = f"; with context_tokens = {threshold} or less it can"
    raise ConfigError(
        f"model_path = {model_path!r}: the embedded engine cannot serve {verdict.refusal}{remedy}"
    )


def examine(config: Any, *, context_tokens: int = 0) -> Verdict:
    """Compare a small copy in the engine with its own forward."""
    attention.register()
    try:
        model = _small_model(config)
    except Exception as error:
        return Verdict(refusal=f"a small copy cannot be built: {one_line(error)}")
    name = type(model).__name__
    try:
        below = depends_on_length(model) and 0 < context_tokens <= _threshold(config)
        longest = THRESHOLD - 2 - _ANSWER_TOKENS if below else _LONGEST_TOKENS
        cases = _cases(_vocabulary(model), longest=longest)
        with torch.inference_mode():
            found = _compare(model, cases)
    except InvalidArgument as error:
        return Verdict(refusal=f"{name}: {error}")
    except Exception as error:
        return Verdict(refusal=f"{name}: a small copy cannot run: {reason_of(error)}")
    worst = float(torch.tensor([one for _, one, _ in found]).max())
    equal = all(same for _, _, same in found)
    for place, apart, _ in found:
        if not apart <= TOLERANCE:
            return Verdict(
                refusal=f"{name}: log-probs of a small copy differ from its own forward by "
                f"{apart:.3g} nats ({place})",
                error=worst,
                greedy_equal=equal,
            )
    return Verdict(error=worst, greedy_equal=equal)


def _threshold(config: Any) -> int:
    """The length above which a rotary embedding changes, 0 without one."""
    text = config.get_text_config(decoder=True)
    parameters = getattr(text, "rope_parameters", None) or {}
    name = "original_max_position_embeddings"
    found: int = getattr(text, name, None) or parameters.get(name) or 0
    return found


def _small_model(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(small_config(config), dtype=torch.float32).eval()
        randomize(model)
    model.requires_grad_(False)
    make_double(model)
    return model


def _vocabulary(model: Any) -> int:
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size


def _cases(vocabulary: int, *, longest: int) -> list[_Case]:
    """Prompts in the order of their reads; the first three are read as one batch."""
    rng = Random(_SEED)

    def ids(count: int) -> list[int]:
        return rng.choices(range(3, min(vocabulary, 64) - 4), k=count)

    long = ids(longest)
    half = longest // 2
    return [
        _Case(name=f"a prompt of {longest} tokens, in several passes", ids=long),
        _Case(name="a prompt of 3 tokens beside longer ones", ids=ids(3)),
        _Case(name="a prompt that shares its first half", ids=[*long[:half], *ids(longest // 4)]),
        _Case(name="a prompt with a cached prefix", ids=[*long[: longest - 3], *ids(3)]),
    ]


def _compare(model: Any, cases: Sequence[_Case]) -> list[tuple[str, float, bool]]:
    """For each case and role: its place, the largest error, whether the likeliest are equal."""
    own_attention = stock_attention(model.config)
    model.set_attn_implementation(attention.IMPLEMENTATION)
    vocabulary = _vocabulary(model)
    limits = ModelLimits(context_tokens=_CONTEXT_TOKENS, vocabulary=vocabulary)
    policy = Policy(model, limits=limits)
    policy.version = 1
    prompts = [case.ids for case in cases]
    plain = _Pair(policy, HeadDrafter(policy)).sample(prompts, vocabulary=vocabulary)
    drafted = []
    if policy.kv_shape.states is None:
        drafter = _KnownAnswers([answer.ids for answer in plain], vocabulary)
        drafted = _Pair(policy, drafter).sample(prompts, vocabulary=vocabulary)
    model.set_attn_implementation(own_attention)
    found = []
    decoded = [", decoded"] * len(plain) + [", decoded with drafts"] * len(drafted)
    sampled = [*plain, *drafted]
    answers = zip([*cases, *cases][: len(sampled)], sampled, decoded, strict=True)
    for case, answer, last_place in answers:
        own_NV = _own_logprobs(model, case.ids + answer.ids)[len(case.ids) - 1 : -1]
        engine_NV = torch.full_like(own_NV, torch.nan)
        for row, likeliest in enumerate(answer.likeliest):
            engine_NV[row, list(likeliest)] = torch.tensor([*likeliest.values()]).to(own_NV)
        errors_N = (engine_NV - own_NV).abs().amax(-1)
        same_N = engine_NV.argmax(-1) == own_NV.argmax(-1)
        for place, rows in (("", slice(0, 1)), (last_place, slice(1, None))):
            # NaN stays NaN, and is above any tolerance.
            error = float(errors_N[rows].max())
            found.append((case.name + place, error, bool(same_N[rows].all())))
    return found


def _own_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], by the model's own forward on this sequence alone."""
    forget_lengths(model)
    logits_NV = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    logprobs: torch.Tensor = logits_NV.log_softmax(-1)
    return logprobs


class _KnownAnswers:
    """Drafts answers that are known, two tokens a step; for every other request the second one is
    wrong."""

    most = 2

    def __init__(self, answers: Sequence[list[int]], vocabulary: int) -> None:
        self._answers = answers
        self._vocabulary = vocabulary

    def is_ready(self, sequence: DecodeSequence) -> bool:
        return True

    def draft(self, sequences: Sequence[DecodeSequence]) -> list[Draft]:
        return [self._of(sequence) for sequence in sequences]

    def observe(self, tokens: Sequence[int]) -> None: ...

    def _of(self, sequence: DecodeSequence) -> Draft:
        number, done = int(sequence.prompt.request_id), len(sequence.sampled)
        ids = self._answers[number][done : done + sequence.step_tokens - 1]
        if number % 2 and len(ids) > 1:
            ids[1] = (ids[1] + 1) % self._vocabulary
        return Draft(ids=ids)


class _AtOnce:
    """Stands in for the event loop: calls at once."""

    def call_soon_threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)


class _UncountedStep(DecodeStep):
    """Leaves the metrics of drafts alone, which are those of requests."""

    def _observe(self, *_: object, **__: object) -> None: ...


class _Pair:
    """Both actors of the engine, without threads."""

    def __init__(self, policy: Policy, drafter: Drafter) -> None:
        shape = policy.kv_shape
        capacity = 64 * (_CONTEXT_TOKENS * shape.token_bytes + shape.state_bytes)

        def cache() -> KvCache:
            return KvCache(shape, block_tokens=_BLOCK_TOKENS, capacity_bytes=capacity)

        self._prefill = PrefillActor(
            policy, cache(), block_tokens=_BLOCK_TOKENS, pass_tokens=_PASS_TOKENS, threads=1
        )
        self._prefill.loop = cast(asyncio.AbstractEventLoop, _AtOnce())
        decoded = cache()
        slabs: Slabs[Any] = Slabs(shape, context_tokens=_CONTEXT_TOKENS, capacity_bytes=capacity)
        prefixes = None
        if not shape.windowed:
            prefixes = SharedPrefixes(
                shape,
                decoded,
                context_tokens=_CONTEXT_TOKENS,
                running=slabs,
                least_tokens=2 * _BLOCK_TOKENS,
            )
        depth = DepthChooser(_KnownAnswers.most, adaptive=False)
        states = None
        if shape.states is not None:
            states = StateRows(
                shape.states, shape.device, rows=_MOST_RUNNING, block_tokens=_BLOCK_TOKENS
            )
        step = _UncountedStep(policy, slabs, prefixes, drafter, depth, states=states)
        self._decode = DecodeActor(
            step, decoded, max_running=_MOST_RUNNING, max_waiting=16, threads=1
        )
        self._decode.loop = cast(asyncio.AbstractEventLoop, _AtOnce())

    def sample(self, prompts: Sequence[list[int]], *, vocabulary: int) -> list[_SampledTokens]:
        """Sample an answer to each: the last one is read after the others, all are decoded
        together."""
        sampling = Sampling(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=_ANSWER_TOKENS,
            stop_ids=frozenset(),
            seed=_SEED,
            top_logprobs=vocabulary,
        )
        asked = [
            Prompt(request_id=str(number), ids=array("i", ids).tobytes(), sampling=sampling)
            for number, ids in enumerate(prompts)
        ]
        held = [*self._read(asked[:-1]), *self._read(asked[-1:])]
        answers = [_SampledTokens() for _ in asked]
        for prompt, one, answer in zip(asked, held, answers, strict=True):
            answer.add(one.prefilled.first)
            self._join(prompt, one, answer)
        while self._decode.work():
            pass
        return answers

    def _read(self, prompts: Sequence[Prompt]) -> list[HeldPrompt]:
        held: dict[str, HeldPrompt] = {}

        def read(prompt: Prompt) -> Read:
            def deliver(outcome: HeldPrompt | ForgeError) -> None:
                if isinstance(outcome, ForgeError):
                    raise outcome
                held[prompt.request_id] = outcome

            return Read(prompt=prompt, asked_s=0.0, deliver=deliver)

        self._prefill.receive_batch([read(prompt) for prompt in prompts])
        while self._prefill.work():
            pass
        return [held[prompt.request_id] for prompt in prompts]

    def _join(self, prompt: Prompt, held: HeldPrompt, answer: _SampledTokens) -> None:
        cached: int = self._decode.receive(Reserve(prompt=prompt))
        kv = held.kv[:, :, :, cached:]
        span = KvSpan(
            from_token=cached,
            tokens=kv.shape[3],
            version=held.version,
            dtype=tensor_bytes.NAMES[kv.dtype],
            shape=tuple(kv.shape),
            data=tensor_bytes.to_bytes(kv),
            recurrent=b"" if held.recurrent is None else tensor_bytes.to_bytes(held.recurrent),
        )

        def deliver(piece: Piece | ForgeError) -> None:
            if isinstance(piece, ForgeError):
                raise piece
            answer.add(piece.tokens)

        join = Join(
            prompt=prompt,
            first=held.prefilled.first,
            span=span,
            stream=False,
            asked_s=0.0,
            deliver=deliver,
        )
        self._decode.receive(join)
