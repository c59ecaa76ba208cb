"""The actor that reads prompts: one forward pass after another over all waiting prompts.

A prompt joins at the next pass, with its own cached part, and is answered after the pass that
computes its last token. A prefix that waiting prompts share is computed once: the later prompt
copies it, layer by layer, from the earlier one. Equal prompts, such as the first turns of a group,
are computed once and sampled by each request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from forge.core.errors import ForgeError, Unavailable
from forge.runtime.actors.actor import ThreadActor
from services.inference.engines.embedded.device.prompt_layers import PromptLayers
from services.inference.engines.embedded.first_tokens import Complete, FirstTokens
from services.inference.engines.embedded.known_prefixes import KnownPrefixes
from services.inference.engines.embedded.kv.device_attention import PackedAttention
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.memory_shortage import PassLimit, attempt, refusal
from services.inference.engines.embedded.messages import (
    Abort,
    HeldPrompt,
    PartRead,
    Read,
    Swap,
)
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.prefill_pass import PrefillPass
from services.inference.engines.embedded.prefill_schedule import (
    Reading,
    Span,
    WaitingPrefixes,
    next_pass,
)
from services.inference.engines.embedded.recurrent.packed import Piece
from services.inference.engines.embedded.stored_kv import StoredKv

_LEAST_TOKENS = 16
"""The smallest pass after shortages of memory."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Pending:
    """A reading and the requests for it."""

    reading: Reading
    requests: list[Read] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """Results of a pass."""

    logits_RV: torch.Tensor
    """Of the last token of each span."""
    states: Sequence[torch.Tensor | None]
    """The last hidden state of each span, as `Reading.state`."""
    routes_NX: torch.Tensor | None
    """Experts of all tokens, on the host; None if they are not recorded."""


class PrefillActor(ThreadActor):
    """Owns the model and the prefix cache of a prefill instance."""

    batch_size: ClassVar[int] = 64

    def __init__(
        self,
        policy: Policy,
        cache: KvCache,
        stored: StoredKv | None = None,
        *,
        block_tokens: int,
        pass_tokens: int,
        threads: int,
        packed: PackedAttention | None = None,
        layers: PromptLayers | None = None,
    ) -> None:
        """`packed`: attention for passes of whole prompts. `layers`: those to use in place of the
        model's own."""
        self._policy = policy
        self._cache = cache
        self._stored = stored
        self._known = KnownPrefixes(policy, cache, stored, block_tokens=block_tokens)
        self._block_tokens = block_tokens
        self._limit = PassLimit(
            "prefill", most=pass_tokens, least=_LEAST_TOKENS, setting="pass_tokens"
        )
        self.beside_tokens = pass_tokens
        """Most tokens of a pass while requests that sample wait for it."""
        self.is_awaited = False
        """Whether they do."""
        self._first_tokens = FirstTokens(policy, cache, stored)
        self._threads = threads
        self._packed = packed
        self._layers = layers
        self.after_swap: Callable[[], None] | None = None
        """Called on the actor's thread when other weights are served."""
        self._later: list[Read | Swap] = []
        """A swap that waits for the prompts in `_pending`, and all that comes after it."""
        self._pending: dict[bytes, _Pending] = {}
        """By the ids of the prompt, the oldest first."""
        self._prefixes: WaitingPrefixes | None = None
        """Prefixes of the waiting prompts; None when they must be computed again."""

    def started(self) -> None:
        """Set the threads of torch."""
        torch.set_num_threads(self._threads)

    def receive_batch(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Let prompts join and leave; a swap waits for those that have begun."""
        self._take_all(messages)
        self._swap_if_free()
        return [None] * len(messages)

    def work(self) -> bool:
        """Run one forward pass, or a swap that no prompt delays; False when no prompt is left."""
        self._pass()
        self._swap_if_free()
        return bool(self._pending)

    def _take_all(self, messages: Sequence[Any]) -> None:
        joining = sum(one.prompt.tokens for one in messages if isinstance(one, Read))
        for message in messages:
            self._take(message, joining)
        # It would keep the keys and values of finished prompts.
        self._prefixes = None

    def _take(self, message: Any, joining_tokens: int) -> None:
        """`joining_tokens`: of all prompts of the batch."""
        match message:
            case Read() | Swap() if self._later:
                self._later.append(message)
            case Read():
                self._join(message, joining_tokens)
            case Abort(request_id=request_id):
                self._prefixes = None
                self._abort(request_id)
            case Swap():
                self._later = [message, *self._take_unbegun()]

    def _take_unbegun(self) -> list[Read]:
        """Remove the prompts without any keys and values: other weights will read them. Prompts
        with a cached part have begun, since it may have been handed off."""
        readings = [pending.reading for pending in self._pending.values()]
        begun = {reading for reading in readings if reading.filled}
        # A source is older than the prompts that copy from it.
        for reading in reversed(readings):
            if reading in begun and reading.source and reading.filled < reading.shared:
                begun.add(reading.source)
        unbegun = [ids for ids, one in self._pending.items() if one.reading not in begun]
        self._prefixes = None
        return [read for ids in unbegun for read in self._pending.pop(ids).requests]

    def _swap_if_free(self) -> None:
        """Serve the next weights once the prompts that began before are computed; then let the
        later ones join."""
        while self._later and not self._pending:
            swap, *rest = self._later
            assert isinstance(swap, Swap)
            self._later = []
            refusal = swap.serve(self._policy, self._cache, self._stored)
            if refusal is None and self._layers is not None:
                self._layers.after_swap()
            if refusal is None and self.after_swap is not None:
                self.after_swap()
            self.loop.call_soon_threadsafe(swap.deliver, refusal)
            self._take_all(rest)

    def _join(self, read: Read, joining_tokens: int) -> None:
        if self._policy.version == 0:
            self._deliver([(read, Unavailable("no weights have been loaded yet"))])
            return
        pending = self._pending.get(read.prompt.ids)
        if pending is None:
            prefixes = self._waiting_prefixes(joining_tokens)
            begun = attempt(partial(self._known.begin, read, prefixes), self._policy.device)
            if begun.result is None:
                request, size = read.prompt.request_id, f"a prompt of {read.prompt.tokens} tokens"
                error = refusal("prefill", request, size=size, shortage=begun.shortage)
                self._deliver([(read, error)])
                return
            pending = _Pending(reading=begun.result)
            self._pending[read.prompt.ids] = pending
            prefixes.add(pending.reading)
        pending.requests.append(read)
        if pending.reading.filled:
            self._report([pending.reading])

    def _abort(self, request_id: str) -> None:
        self._later = [
            one
            for one in self._later
            if isinstance(one, Swap) or one.prompt.request_id != request_id
        ]
        for ids, pending in self._pending.items():
            for read in pending.requests:
                if read.prompt.request_id == request_id:
                    pending.requests.remove(read)
                    if not pending.requests and not self._is_source(pending.reading):
                        del self._pending[ids]
                    return

    def _is_source(self, reading: Reading) -> bool:
        return any(
            one.reading.source is reading and one.reading.filled < one.reading.shared
            for one in self._pending.values()
        )

    def _waiting_prefixes(self, joining_tokens: int) -> WaitingPrefixes:
        """Made once for the prompts that join together, after the last change of the others."""
        if self._prefixes is None:
            readings = [pending.reading for pending in self._pending.values()]
            tokens = joining_tokens + sum(reading.prompt.tokens for reading in readings)
            self._prefixes = WaitingPrefixes(
                readings, tokens=tokens, block_tokens=self._block_tokens
            )
        return self._prefixes

    @torch.inference_mode()
    def _pass(self) -> None:
        """Compute as many tokens as fit; answer the prompts that are complete."""
        while self._pending:
            readings = [pending.reading for pending in self._pending.values()]
            if self._limit.is_alone:
                readings = readings[:1]
            budget = self._limit.tokens
            if self.is_awaited:
                budget = min(budget, self.beside_tokens)
            spans = next_pass(readings, budget=budget)
            began_s = time.monotonic()
            tried = attempt(partial(self._forward, spans), self._policy.device)
            if tried.result is not None:
                self._limit.succeeded()
                self._advance(spans, tried.result, took_s=time.monotonic() - began_s)
                return
            self._retreat(spans, tried.shortage)

    def _forward(self, spans: Sequence[Span]) -> _Computed:
        """Run a forward pass."""
        device = self._policy.device
        sizes = [span.end - span.start for span in spans]
        storage = PrefillPass(spans, self._packed)
        with nullcontext() if self._layers is None else self._layers.used():
            logits_RV = self._policy.forward(
                torch.cat([span.reading.ids[span.start : span.end] for span in spans]),
                torch.cat([torch.arange(span.start, span.end, device=device) for span in spans]),
                storage,
                recurrent=_pieces(spans),
                logits_at=torch.tensor(sizes, device=device).cumsum(0) - 1,
            )
        storage.finish()
        states: Sequence[torch.Tensor | None] = [None] * len(spans)
        if self._policy.drafts is not None:
            # Copies: a view would keep the whole pass.
            dtype, last = self._policy.dtype, self._policy.head.states
            states = [state_C.to(dtype, copy=True) for state_C in last]
        routes_NX = self._policy.routes_NX
        computed = _Computed(
            logits_RV=logits_RV,
            states=states,
            routes_NX=None if routes_NX is None else routes_NX.cpu(),
        )
        self._policy.wait()
        return computed

    def _retreat(self, spans: Sequence[Span], shortage: str) -> None:
        """After a pass without memory: make the next one smaller, or refuse its only prompt. Keys
        and values of the pass are computed again."""
        for span in spans:
            if span.reading.recurrent is not None:
                span.reading.recurrent.undo()
        tokens = sum(span.end - span.start for span in spans)
        if len(spans) > 1 or tokens > self._limit.least:
            self._limit.lower(tokens, shortage)
            return
        failed = self._pending.pop(spans[0].reading.prompt.ids)
        for one in self._pending.values():
            if one.reading.source is failed.reading and one.reading.filled < one.reading.shared:
                one.reading.separate()
        self._prefixes = None
        size = f"a prompt of {failed.reading.prompt.tokens} tokens"
        self._deliver(
            [
                (read, self._limit.refuse(read.prompt.request_id, size=size, shortage=shortage))
                for read in failed.requests
            ]
        )

    def _advance(self, spans: Sequence[Span], computed: _Computed, *, took_s: float) -> None:
        """Note the tokens of a pass; answer the prompts that are complete."""
        if computed.routes_NX is not None:
            _keep_routes(spans, computed.routes_NX)
        sizes = [span.end - span.start for span in spans]
        if self._stored is not None:
            self._stored.store.observe_compute(seconds=took_s, tokens=sum(sizes))
        rows = zip(spans, sizes, computed.logits_RV, computed.states, strict=True)
        for span, size, logits_V, state_C in rows:
            reading = span.reading
            reading.done = reading.filled = span.end
            reading.compute_s += took_s * size / sum(sizes)
            reading.logits, reading.state = logits_V, state_C
            if reading.recurrent is not None:
                reading.recurrent.settle()
        self._report([span.reading for span in spans if span.reading.left])
        self._answer([span.reading for span in spans if not span.reading.left])

    def _report(self, readings: Iterable[Reading]) -> None:
        """Report how far prompts are."""
        version = self._policy.version
        parts = [
            (read.progress, PartRead(kv=reading.kv, tokens=reading.filled, version=version))
            for reading in readings
            for read in self._pending[reading.prompt.ids].requests
            if read.progress is not None
        ]
        if parts:
            self.loop.call_soon_threadsafe(_report_all, parts)

    def _answer(self, complete: Iterable[Reading]) -> None:
        ended = [self._pending.pop(reading.prompt.ids) for reading in complete]
        rows = [
            Complete(reading=one.reading, read=read, computed=read is one.requests[0])
            for one in ended
            for read in one.requests
        ]
        if rows:
            answers = self._first_tokens.of(rows)
            self._deliver(answers)
            # Behind the first tokens, which do not wait for it.
            self._first_tokens.cache(rows, answers)

    def _deliver(self, answers: Sequence[tuple[Read, HeldPrompt | ForgeError]]) -> None:
        self.loop.call_soon_threadsafe(_deliver_all, answers)


def _keep_routes(spans: Sequence[Span], routes_NX: torch.Tensor) -> None:
    """Keep the experts of a pass with its readings, and those of prefixes that they copied."""
    row = 0
    for span in spans:
        reading, size = span.reading, span.end - span.start
        if reading.source is not None and span.start == reading.shared:
            copied = slice(reading.cached, reading.shared)
            reading.routes[copied] = reading.source.routes[copied]
        reading.routes[span.start : span.end] = routes_NX[row : row + size]
        row += size


def _pieces(spans: Sequence[Span]) -> list[Piece]:
    """The sequences of a pass for recurrent layers."""
    pieces: list[Piece] = []
    offset = 0
    for span in spans:
        reading, source, begin = span.reading, span.reading.source, None
        if reading.recurrent is not None:
            if source is not None and span.start == reading.shared:
                assert source.recurrent is not None
                begin = source.recurrent.kept[reading.shared]
            pieces += reading.recurrent.pieces(span.start, span.end, offset=offset, begin=begin)
        offset += span.end - span.start
    return pieces


def _report_all(parts: Sequence[tuple[Callable[[PartRead], None], PartRead]]) -> None:
    for progress, part in parts:
        progress(part)


def _deliver_all(answers: Sequence[tuple[Read, HeldPrompt | ForgeError]]) -> None:
    for read, answer in answers:
        read.deliver(answer)
