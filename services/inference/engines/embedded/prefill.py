"""The actor that reads prompts: one forward pass after another over all waiting prompts.

A prompt joins at the next pass, with its own cached part, and is answered after the pass that
computes its last token. A prefix that waiting prompts share is computed once: the later prompt
copies it, layer by layer, from the earlier one. Equal prompts, such as the first turns of a group,
are computed once and sampled by each request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from forge.core.errors import ForgeError, Unavailable
from forge.runtime.actors.actor import ThreadActor
from services.inference.engines.base import BrokenWeights, Prefilled
from services.inference.engines.embedded.device.prompt_layers import PromptLayers
from services.inference.engines.embedded.known_prefixes import KnownPrefixes
from services.inference.engines.embedded.kv.device_attention import PackedAttention
from services.inference.engines.embedded.kv.prefix_cache import KvCache
from services.inference.engines.embedded.messages import (
    Abort,
    HeldPrompt,
    PartRead,
    Read,
    Swap,
)
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.probe import adopt
from services.inference.engines.embedded.model.sampler import DrawnToken, draw, tokens_of
from services.inference.engines.embedded.prefill_pass import PrefillPass
from services.inference.engines.embedded.prefill_schedule import (
    Reading,
    Span,
    WaitingPrefixes,
    next_pass,
)
from services.inference.engines.embedded.recurrent.packed import Piece
from services.inference.engines.embedded.stored_kv import StoredKv


@dataclass(slots=True, eq=False, kw_only=True)
class _Pending:
    """A reading and the requests for it."""

    reading: Reading
    requests: list[Read] = field(default_factory=list)


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
        self._pass_tokens = pass_tokens
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
            refusal = self._swap(swap)
            self.loop.call_soon_threadsafe(swap.deliver, refusal)
            self._take_all(rest)

    def _swap(self, swap: Swap) -> ForgeError | None:
        try:
            adopt(self._policy, swap.weights, swap.probe)
        except ForgeError as error:
            return error
        self._cache.clear()
        if self._layers is not None:
            self._layers.after_swap()
        if self._stored is not None:
            self._stored.serve(swap.kv_identity)
        if self.after_swap is not None:
            self.after_swap()
        return None

    def _join(self, read: Read, joining_tokens: int) -> None:
        if self._policy.version == 0:
            self._deliver([(read, Unavailable("no weights have been loaded yet"))])
            return
        pending = self._pending.get(read.prompt.ids)
        if pending is None:
            prefixes = self._waiting_prefixes(joining_tokens)
            pending = _Pending(reading=self._known.begin(read, prefixes))
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
        readings = [pending.reading for pending in self._pending.values()]
        spans = next_pass(readings, budget=self._pass_tokens)
        if not spans:
            return
        began_s = time.monotonic()
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
        self._keep_routes(spans)
        self._policy.wait()
        took_s = time.monotonic() - began_s
        if self._stored is not None:
            self._stored.observe_compute(seconds=took_s, tokens=sum(sizes))
        for span, size, logits_V in zip(spans, sizes, logits_RV, strict=True):
            reading = span.reading
            reading.done = reading.filled = span.end
            reading.compute_s += took_s * size / sum(sizes)
            reading.logits = logits_V
        if self._policy.drafts is not None:
            for span, state_C in zip(spans, self._policy.head.states, strict=True):
                # A copy: a view would keep the whole pass.
                span.reading.state = state_C.to(self._policy.dtype, copy=True)
        self._report([span.reading for span in spans if span.reading.left])
        self._answer([span.reading for span in spans if not span.reading.left])

    def _keep_routes(self, spans: Sequence[Span]) -> None:
        """Keep the experts of a pass with its readings, and those of prefixes that they copied."""
        if self._policy.routes_NX is None:
            return
        rows_NX = self._policy.routes_NX.cpu()
        row = 0
        for span in spans:
            reading, size = span.reading, span.end - span.start
            if reading.source is not None and span.start == reading.shared:
                copied = slice(reading.cached, reading.shared)
                reading.routes[copied] = reading.source.routes[copied]
            reading.routes[span.start : span.end] = rows_NX[row : row + size]
            row += size

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
        rows = [(pending.reading, read) for pending in ended for read in pending.requests]
        if not rows:
            return
        logits = [reading.logits for reading, _ in rows if reading.logits is not None]
        drawn = draw(
            torch.stack(logits),
            [read.prompt for _, read in rows],
            positions=[read.prompt.tokens for _, read in rows],
            matchers=[read.matcher for _, read in rows],
            answers=[()] * len(rows),
        )
        first = {pending.reading: pending.requests[0] for pending in ended if pending.requests}
        answers = []
        for row, (reading, read) in enumerate(rows):
            answer = drawn.failed.get(row) or self._result(
                reading, read, drawn.row(row), computed=first[reading] is read
            )
            answers.append((read, answer))
        self._deliver(answers)

    def _result(
        self, reading: Reading, read: Read, drawn: DrawnToken, *, computed: bool
    ) -> HeldPrompt | ForgeError:
        """`computed`: the request pays for the prompt; others have found it cached."""
        version = self._policy.version
        if not math.isfinite(drawn.logprob):
            return BrokenWeights(f"weights {version} gave a log-prob that is not finite")
        if computed:
            self._cache.store(reading.prompt.ids, reading.kv, routes=reading.routes)
            if reading.recurrent is not None:
                self._cache.store_states(reading.prompt.ids, reading.recurrent.kept)
            if self._stored is not None:
                self._stored.write(
                    reading.prompt.ids, reading.kv, reading.routes, after_token=reading.start
                )
        prefill_s = reading.compute_s + reading.stored_s
        first = tokens_of([(drawn, version)], read.prompt.sampling)
        if (start := read.prompt.sampling.routes_from) is not None:
            rows = reading.routes[start:].numpy().tobytes()
            first = replace(first, routes=self._policy.kv_shape.route_span(rows, start=start))
        return HeldPrompt(
            prefilled=Prefilled(
                first=first,
                cached_tokens=reading.start if computed else reading.prompt.tokens,
                queue_s=max(0.0, time.monotonic() - read.asked_s - prefill_s),
                prefill_s=prefill_s,
                stored_tokens=reading.stored if computed else 0,
                stored_s=reading.stored_s if computed else 0.0,
            ),
            kv=reading.kv,
            routes=reading.routes,
            version=version,
            state=reading.state,
            recurrent=None if reading.recurrent is None else reading.recurrent.now,
        )

    def _deliver(self, answers: Sequence[tuple[Read, HeldPrompt | ForgeError]]) -> None:
        self.loop.call_soon_threadsafe(_deliver_all, answers)


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
