"""The actor that reads prompts: batches of prompts, each with its own cached part.

A prefix that prompts of a batch share is computed once: the later prompt copies it, layer by layer
and in the same forward pass, from the earlier one.

Shape suffixes as in kv/slabs.py; S = tokens computed for one prompt in one pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from forge.core.errors import ForgeError, Unavailable
from forge.core.placement.prefix_cache import PrefixCache
from forge.runtime.actors.actor import ThreadActor
from services.inference.engines.base import BrokenWeights, Prefilled, Prompt
from services.inference.engines.embedded.kv.attention import Heads, attention_bias
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.messages import Swap
from services.inference.engines.embedded.model import Policy
from services.inference.engines.embedded.probe import adopt
from services.inference.engines.embedded.sampler import DrawnToken, draw, tokens_of
from services.inference.engines.embedded.stored_kv import StoredKv
from services.inference.engines.grammar_masks import Matcher

_MASK_ELEMENTS = 1 << 24
"""Most elements of one prompt's attention mask in one pass; longer prompts take several passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Ask: read a prompt; the answer is a HeldPrompt."""

    prompt: Prompt
    asked_s: float
    """Monotonic time of the request."""
    matcher: Matcher | None = None
    """State of the grammar at the start of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPrompt:
    """A prompt with all its keys and values; immutable."""

    prefilled: Prefilled
    kv: torch.Tensor
    """[layers, 2, heads, tokens, head_size]."""
    version: int


@dataclass(slots=True, eq=False, kw_only=True)
class _Reading:
    """A prompt during its computation."""

    prompt: Prompt
    ids: torch.Tensor
    """int64, shape [tokens]."""
    kv: torch.Tensor
    done: int
    """Tokens whose keys and values are in `kv`."""
    cached: int
    stored: int = 0
    """Those of the cached tokens that the KV store had."""
    stored_s: float = 0.0
    source: _Reading | None = None
    """An earlier prompt of the batch that shares its first `shared` tokens."""
    shared: int = 0
    logits: torch.Tensor | None = None
    """Logits of the last computed token, shape [vocabulary]."""

    @property
    def start(self) -> int:
        """First token that is computed."""
        return max(self.cached, self.shared)


class PrefillActor(ThreadActor):
    """Owns the model and the prefix cache of a prefill instance."""

    batch_size: ClassVar[int] = 64
    # The rollouts of a group start together; a short wait joins their prompts.
    batch_wait_s: ClassVar[float] = 0.002

    def __init__(
        self,
        policy: Policy,
        cache: KvCache,
        stored: StoredKv | None = None,
        *,
        block_tokens: int,
        pass_tokens: int,
        threads: int,
    ) -> None:
        self._policy = policy
        self._cache = cache
        self._stored = stored
        self._block_tokens = block_tokens
        self._pass_tokens = pass_tokens
        self._threads = threads

    def started(self) -> None:
        """Set the threads of torch."""
        torch.set_num_threads(self._threads)

    def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Read consecutive prompts as one batch; a swap separates batches."""
        answers: list[Any] = []
        waiting: list[Read] = []
        for message in messages:
            match message:
                case Read():
                    waiting.append(message)
                case Swap():
                    answers += self._read(waiting)
                    waiting = []
                    answers.append(self._swap(message))
        return [*answers, *self._read(waiting)]

    def _swap(self, swap: Swap) -> ForgeError | None:
        try:
            adopt(self._policy, swap.weights, swap.probe)
        except ForgeError as error:
            return error
        self._cache.clear()
        if self._stored is not None:
            self._stored.serve(swap.kv_identity)
        return None

    @torch.inference_mode()
    def _read(self, batch: Sequence[Read]) -> Sequence[HeldPrompt | ForgeError]:
        if not batch:
            return []
        if self._policy.version == 0:
            return [Unavailable("no weights have been loaded yet") for _ in batch]
        began_s = time.monotonic()
        readings = self._compute([message.prompt for message in batch])
        drawn = draw(
            torch.stack([reading.logits for reading in readings if reading.logits is not None]),
            [message.prompt for message in batch],
            positions=[message.prompt.tokens for message in batch],
            matchers=[message.matcher for message in batch],
            answers=[()] * len(batch),
        )
        prefill_s = time.monotonic() - began_s
        return [
            drawn.failed.get(row)
            or self._result(message, reading, drawn.row(row), began_s=began_s, prefill_s=prefill_s)
            for row, (message, reading) in enumerate(zip(batch, readings, strict=True))
        ]

    def _compute(self, prompts: Sequence[Prompt]) -> list[_Reading]:
        """Return one reading per prompt; equal prompts share it.

        The rollouts of a group have the same first prompt: it is computed once and sampled by each.
        """
        distinct: dict[bytes, Prompt] = {}
        for prompt in prompts:
            distinct.setdefault(prompt.ids, prompt)
        readings = self._plan(list(distinct.values()))
        began_s = time.monotonic()
        to_compute = sum(reading.prompt.tokens - reading.done for reading in readings)
        pending = list(readings)
        while pending:
            pending = self._pass(pending)
        if self._stored is not None:
            self._stored.observe_compute(seconds=time.monotonic() - began_s, tokens=to_compute)
        by_ids = {reading.prompt.ids: reading for reading in readings}
        return [by_ids[prompt.ids] for prompt in prompts]

    def _result(
        self,
        message: Read,
        reading: _Reading,
        drawn: DrawnToken,
        *,
        began_s: float,
        prefill_s: float,
    ) -> HeldPrompt | ForgeError:
        version = self._policy.version
        if not math.isfinite(drawn.logprob):
            return BrokenWeights(f"weights {version} gave a log-prob that is not finite")
        its_own = reading.prompt is message.prompt
        if its_own:
            self._cache.store(reading.prompt.ids, reading.kv)
            if self._stored is not None:
                self._stored.write(reading.prompt.ids, reading.kv, after_token=reading.start)
        return HeldPrompt(
            prefilled=Prefilled(
                first=tokens_of([(drawn, version)], message.prompt.sampling),
                cached_tokens=reading.start if its_own else reading.prompt.tokens,
                queue_s=began_s - message.asked_s,
                prefill_s=prefill_s,
                stored_tokens=reading.stored if its_own else 0,
                stored_s=reading.stored_s if its_own else 0.0,
            ),
            kv=reading.kv,
            version=version,
        )

    def _plan(self, prompts: Sequence[Prompt]) -> list[_Reading]:
        """Find each prompt's part in the cache, and its part in an earlier prompt."""
        shape = self._policy.kv_shape
        batch_index = PrefixCache(
            block_tokens=self._block_tokens,
            capacity_tokens=sum(prompt.tokens for prompt in prompts),
        )
        owners: dict[int, _Reading] = {}
        readings = []
        for prompt in prompts:
            # The last token is always computed: its logits give the first token of the answer.
            limit = prompt.tokens - 1
            match = self._cache.match(prompt.ids, limit_tokens=limit)
            reading = _Reading(
                prompt=prompt,
                ids=torch.frombuffer(prompt.ids, dtype=torch.int32).long().to(shape.device),
                kv=shape.empty(prompt.tokens),
                done=match.tokens,
                cached=match.tokens,
            )
            self._cache.read(match, reading.kv)
            self._read_stored(reading, limit)
            earlier = batch_index.match(prompt.ids, limit_tokens=limit)
            if earlier.tokens > reading.cached:
                reading.source = owners[earlier.slots[-1]]
                reading.shared = earlier.tokens
                reading.done = earlier.tokens
            for placed in batch_index.insert(prompt.ids):
                owners[placed.slot] = reading
            readings.append(reading)
        return readings

    def _read_stored(self, reading: _Reading, limit_tokens: int) -> None:
        if self._stored is None:
            return
        began_s, cached = time.monotonic(), reading.cached
        present = self._stored.read(
            reading.prompt.ids, reading.kv, from_token=cached, limit_tokens=limit_tokens
        )
        reading.done = reading.cached = present
        reading.stored, reading.stored_s = present - cached, time.monotonic() - began_s

    def _pass(self, pending: Sequence[_Reading]) -> list[_Reading]:
        """Compute as many tokens as fit, in order; return the unfinished readings.

        The order ensures that the source of a shared prefix is in this pass or finished.
        """
        spans = []
        room = self._pass_tokens
        for reading in pending:
            end = min(reading.prompt.tokens, reading.done + min(room, _most_tokens(reading.done)))
            if end > reading.done:
                spans.append(_Span(reading=reading, start=reading.done, end=end))
            room -= end - reading.done
            if end < reading.prompt.tokens:
                break
        kv_pass = _PrefillPass(spans)
        device = self._policy.device
        last_R = (
            torch.tensor([span.end - span.start for span in spans], device=device).cumsum(0) - 1
        )
        logits_RV = self._policy.forward(
            torch.cat([span.reading.ids[span.start : span.end] for span in spans]),
            torch.cat([torch.arange(span.start, span.end, device=device) for span in spans]),
            kv_pass,
            logits_at=last_R,
        )
        for span, logits_V in zip(spans, logits_RV, strict=True):
            span.reading.done = span.end
            span.reading.logits = logits_V
        return [reading for reading in pending if reading.done < reading.prompt.tokens]


def _most_tokens(done: int) -> int:
    """Return the most tokens after `done` ones whose mask has at most _MASK_ELEMENTS."""
    return max(1, int((math.sqrt(done * done + 4 * _MASK_ELEMENTS) - done) / 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """The tokens of one prompt that one pass computes."""

    reading: _Reading
    start: int
    end: int


class _PrefillPass:
    """The KvPass over spans of several prompts."""

    def __init__(self, spans: Sequence[_Span]) -> None:
        self._spans = spans
        self._bias: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(self, heads: Heads) -> torch.Tensor:
        layer, q_NQD, k_NHD, v_NHD, scale, window = heads
        kv_heads, head_size = k_NHD.shape[1:]
        groups = q_NQD.shape[1] // kv_heads
        read_NQD = torch.empty_like(q_NQD)
        offset = 0
        for index, span in enumerate(self._spans):
            rows = slice(offset, offset + span.end - span.start)
            offset = rows.stop
            reading = span.reading
            k_HTD, v_HTD = reading.kv[layer, 0], reading.kv[layer, 1]
            if reading.source is not None and span.start == reading.shared:
                copied = slice(reading.cached, reading.shared)
                reading.kv[layer, :, :, copied] = reading.source.kv[layer, :, :, copied]
            k_HTD[:, span.start : span.end] = k_NHD[rows].transpose(0, 1)
            v_HTD[:, span.start : span.end] = v_NHD[rows].transpose(0, 1)
            q_HGSD = q_NQD[rows].view(-1, kv_heads, groups, head_size).permute(1, 2, 0, 3)
            out_HGSD = scaled_dot_product_attention(
                q_HGSD,
                k_HTD[:, None, : span.end].expand(-1, groups, -1, -1),
                v_HTD[:, None, : span.end].expand(-1, groups, -1, -1),
                attn_mask=self._bias_for(index, window),
                is_causal=span.start == 0 and window is None,
                scale=scale,
            )
            read_NQD[rows] = out_HGSD.permute(2, 0, 1, 3).flatten(1, 2)
        return read_NQD

    def _bias_for(self, index: int, window: int | None) -> torch.Tensor | None:
        """Return the causal mask [1, 1, S, end]; None where the kernel's own causal mask fits."""
        if self._spans[index].start == 0 and window is None:
            return None
        if (index, window) not in self._bias:
            span = self._spans[index]
            kv = span.reading.kv
            queries_S = torch.arange(span.start, span.end, device=kv.device)
            bias_ST = attention_bias(queries_S, span.end, window=window, dtype=kv.dtype)
            self._bias[index, window] = bias_ST[None, None]
        return self._bias[index, window]
