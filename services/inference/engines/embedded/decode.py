"""The actor that samples: continuous batching, one forward pass per step for all running requests.

Requests join and leave between steps; weights change between steps. The life of a request:

    Reserve (pins the cached part of its prompt) -> the caller fetches the rest -> Join -> waiting
    -> running -> a finish reason | Abort | eviction because the slabs are full

Owns the running sequences and the prefix cache; keys and values of older weights are never cached.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from forge.core.errors import ForgeError, ResourceExhausted, Unavailable
from forge.core.placement.prefix_cache import Match
from forge.runtime.actors.actor import ThreadActor
from services.inference.engines.base import BrokenWeights, Finish, Piece, Prompt, Tokens
from services.inference.engines.embedded.kv.decode_attention import SlabStep
from services.inference.engines.embedded.kv.prefix_cache import KvCache, prefix
from services.inference.engines.embedded.kv.shared_prefixes import Branch, Trunks
from services.inference.engines.embedded.kv.slabs import Slabs
from services.inference.engines.embedded.messages import Abort, Deliver, Join, Reserve, Swap
from services.inference.engines.embedded.model import Policy
from services.inference.engines.embedded.probe import adopt
from services.inference.engines.embedded.sampler import DrawnToken, draw, tokens_of
from services.inference.engines.embedded.stored_kv import StoredKv
from services.inference.engines.embedded.tensor_bytes import from_bytes
from services.inference.engines.grammar_masks import Matcher

STREAM_INTERVAL_S = 0.05
"""Shortest time between two pieces of a streamed request."""
CHECKPOINT_TOKENS = 64
"""Tokens in a piece of an unstreamed request; a crash loses at most so many."""
WAITING_SHARE = 1 / 8
"""Memory of prompts that wait for a row, as a share of the memory of running ones; on top of it."""
_MIXED = -1
"""Version of keys and values computed by several weights, or with NaN; never cached."""
_LOOKAHEAD_TOKENS = 512
"""A new sequence gets a row for at most this many further tokens; a longer one moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrived:
    """A prompt's keys and values: the cached, pinned part and the fetched part."""

    cached: Match
    fetched: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Reservation:
    """A pinned prefix of a request that fetches its other keys and values."""

    match: Match
    version: int
    """Version of the weights that computed the prefix."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Sequence(Branch):
    """A waiting or running request."""

    prompt: Prompt
    stream: bool
    deliver: Deliver
    asked_s: float
    sampled: array[int]
    """All sampled tokens, the first from prefill; the slabs do not have the last one yet."""
    most_sampled: int
    version: int
    """Version of all its keys and values."""
    arrived: _Arrived | None
    """Set until it has its row."""
    matcher: Matcher | None
    began_s: float = 0.0
    sent_s: float = 0.0
    unsent: list[tuple[DrawnToken, int]] = field(default_factory=list)
    """Tokens with the version of the weights that sampled each."""

    @property
    def ids(self) -> bytes:
        return self.prompt.ids + self.sampled.tobytes()

    def take_unsent(self) -> Tokens:
        unsent, self.unsent = self.unsent, []
        return tokens_of(unsent, self.prompt.sampling)


class DecodeActor(ThreadActor):
    """Owns the model, the running sequences and the prefix cache of a decode instance."""

    def __init__(
        self,
        policy: Policy,
        cache: KvCache,
        slabs: Slabs[_Sequence],
        trunks: Trunks | None,
        stored: StoredKv | None = None,
        *,
        max_running: int,
        max_waiting: int,
        threads: int,
    ) -> None:
        self._policy = policy
        self._cache = cache
        self._running = slabs
        self._trunks = trunks
        self._stored = stored
        self._waiting: deque[_Sequence] = deque()
        self._reserved: dict[str, _Reservation] = {}
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._threads = threads
        self._outbox: list[tuple[Deliver, Piece | ForgeError]] = []

    def started(self) -> None:
        """Set the threads of torch."""
        torch.set_num_threads(self._threads)

    def receive(self, message: Any) -> Any:
        """Handle a message between two steps."""
        match message:
            case Reserve(prompt=prompt):
                return self._reserve(prompt)
            case Join():
                self._join(message)
            case Abort(request_id=request_id):
                self._abort(request_id)
            case Swap():
                adopt(self._policy, message.weights, message.probe)
                self._cache.clear()
                if self._stored is not None:
                    self._stored.serve(message.kv_identity)
        return None

    def work(self) -> bool:
        """Run one decode step; False when no request is left."""
        self._admit()
        if len(self._running):
            self._step()
        self._deliver()
        return bool(len(self._running) or self._waiting)

    def _reserve(self, prompt: Prompt) -> int:
        self._unreserve(prompt.request_id)
        match = self._cache.match(prompt.ids, pin=True)
        self._reserved[prompt.request_id] = _Reservation(match, self._policy.version)
        return match.tokens

    def _unreserve(self, request_id: str) -> None:
        reserved = self._reserved.pop(request_id, None)
        if reserved is not None:
            self._cache.unpin(reserved.match)

    @torch.inference_mode()
    def _join(self, join: Join) -> None:
        span, prompt = join.span, join.prompt
        reserved = self._reserved[prompt.request_id]
        match = reserved.match
        try:
            if self._policy.version == 0:
                raise Unavailable("no weights have been loaded yet")
            if len(self._waiting) >= self._max_waiting:
                raise ResourceExhausted(
                    f"{self._max_waiting} requests already wait for a slot", retry_after_s=1.0
                )
            assert match.tokens + span.tokens == prompt.tokens
            fetched = from_bytes(span.data, dtype=span.dtype, shape=span.shape)
            fetched = fetched.to(self._policy.device)
            self._require_room_to_wait(fetched.nbytes)
        except BaseException:
            self._unreserve(prompt.request_id)
            raise
        del self._reserved[prompt.request_id]
        blocks = None
        # A prefix and its continuation by different weights belong to no version.
        of_one = not match.tokens or span.version == reserved.version
        if of_one and span.version == self._policy.version:
            self._cache.store(prompt.ids, fetched, from_token=match.tokens)
            blocks = self._cache.match(prompt.ids, pin=True)
        room = self._policy.limits.context_tokens - prompt.tokens
        self._waiting.append(
            _Sequence(
                prompt=prompt,
                stream=join.stream,
                deliver=join.deliver,
                asked_s=join.asked_s,
                sampled=array("i", join.first.ids),
                most_sampled=min(prompt.sampling.max_tokens, room),
                version=span.version if of_one else _MIXED,
                arrived=_Arrived(cached=match, fetched=fetched),
                matcher=join.matcher,
                prompt_blocks=blocks,
            )
        )

    def _require_room_to_wait(self, arriving_bytes: int) -> None:
        """Raises ResourceExhausted if waiting keys and values would exceed their share of the
        memory; one prompt may wait in any case."""
        most_bytes = int(self._running.capacity_bytes * WAITING_SHARE)

        def is_full() -> bool:
            waiting = [one.arrived.fetched.nbytes for one in self._waiting if one.arrived]
            return bool(waiting) and sum(waiting) + arriving_bytes > most_bytes

        if is_full():
            self._admit()
        if is_full():
            raise ResourceExhausted(
                f"keys and values of {len(self._waiting)} waiting requests fill the {most_bytes} "
                "bytes for them",
                retry_after_s=0.5,
            )

    @torch.inference_mode()
    def _abort(self, request_id: str) -> None:
        self._unreserve(request_id)
        for sequence in self._running:
            if sequence.prompt.request_id == request_id:
                self._leave(sequence)
                return
        for sequence in self._waiting:
            if sequence.prompt.request_id == request_id:
                self._waiting.remove(sequence)
                self._unpin(sequence)
                return

    @torch.inference_mode()
    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            if not self._place(self._waiting[0]):
                if len(self._running):
                    return
                sequence = self._waiting[0]
                self._unpin(sequence)
                self._refuse(
                    sequence, f"needs more room than all of {self._running.capacity_bytes} bytes"
                )
            self._waiting.popleft()

    def _place(self, sequence: _Sequence) -> bool:
        """Give a sequence its row; return False without room."""
        if self._trunks is not None:
            self._trunks.seat(sequence, self._running)
        own = sequence.prompt.tokens - sequence.base
        to_come = min(sequence.most_sampled, _LOOKAHEAD_TOKENS)
        if not self._running.add(sequence, tokens=own, expected_tokens=own + to_come):
            if self._trunks is not None:
                self._trunks.leave(sequence)
            return False
        self._fill(sequence)
        sequence.began_s = sequence.sent_s = time.monotonic()
        return True

    def _fill(self, sequence: _Sequence) -> None:
        """Copy a prompt's keys and values to its row, without those in its trunk."""
        assert sequence.arrived is not None
        cached, fetched = sequence.arrived.cached, sequence.arrived.fetched
        kv = sequence.slab.kv(sequence)
        self._cache.read(cached, kv, start=sequence.base)
        first = max(cached.tokens, sequence.base)
        own = slice(first - sequence.base, sequence.tokens)
        for layer, new in zip(kv, fetched, strict=True):
            layer[:, :, own] = new[:, :, first - cached.tokens :]
        self._cache.unpin(cached)
        sequence.arrived = None

    @torch.inference_mode()
    def _step(self) -> None:
        self._make_room()
        sequences = list(self._running)
        if not sequences:
            return
        trunk_slabs = self._trunks.slabs.occupied if self._trunks is not None else []
        step = SlabStep(self._running.occupied, trunk_slabs)
        device = self._policy.device
        logits_NV = self._policy.forward(
            torch.tensor([sequence.sampled[-1] for sequence in sequences], device=device),
            step.positions_N,
            step,
        )
        # Before any leaves: the removal of one sequence moves another one in its slab.
        for sequence in sequences:
            sequence.tokens += 1
        positions = [sequence.base + sequence.tokens for sequence in sequences]
        prompts = [sequence.prompt for sequence in sequences]
        matchers = [sequence.matcher for sequence in sequences]
        answers = [sequence.sampled for sequence in sequences]
        drawn = draw(logits_NV, prompts, positions=positions, matchers=matchers, answers=answers)
        now_s = time.monotonic()
        for row, sequence in enumerate(sequences):
            if row in drawn.failed:
                self._leave(sequence)
                self._send_error(sequence, drawn.failed[row])
            else:
                self._advance(sequence, drawn.row(row), now_s)

    def _make_room(self) -> None:
        """Make room for a token each, oldest first; full slabs evict the youngest."""
        by_age = sorted(self._running, key=lambda sequence: sequence.began_s)
        for sequence in by_age:
            while not self._running.promote(sequence):
                youngest = by_age.pop()
                self._leave(youngest)
                self._refuse(youngest, "was evicted for older requests: the slabs are full")
                if youngest is sequence:
                    break

    def _advance(self, sequence: _Sequence, drawn: DrawnToken, now_s: float) -> None:
        version = self._policy.version
        if sequence.version != version or not math.isfinite(drawn.logprob):
            sequence.version = _MIXED
        if not math.isfinite(drawn.logprob):
            self._leave(sequence)
            broken = BrokenWeights(f"weights {version} gave a log-prob that is not finite")
            self._send_error(sequence, broken)
            return
        sequence.sampled.append(drawn.token)
        sequence.unsent.append((drawn, version))
        if sequence.matcher is not None:
            sequence.matcher.advance(drawn.token)
        finish = self._finish(sequence, drawn.token)
        if finish is not None:
            self._leave(sequence)
            piece = Piece(
                tokens=sequence.take_unsent(),
                finish=finish,
                queue_s=sequence.began_s - sequence.asked_s,
                decode_s=now_s - sequence.began_s,
            )
            self._outbox.append((sequence.deliver, piece))
        elif self._is_due(sequence, now_s):
            sequence.sent_s = now_s
            self._outbox.append((sequence.deliver, Piece(tokens=sequence.take_unsent())))

    def _finish(self, sequence: _Sequence, token: int) -> Finish | None:
        if token in sequence.prompt.sampling.stop_ids:
            return Finish.STOP
        if len(sequence.sampled) >= sequence.most_sampled:
            return Finish.LENGTH
        return None

    def _is_due(self, sequence: _Sequence, now_s: float) -> bool:
        if sequence.stream:
            return now_s - sequence.sent_s >= STREAM_INTERVAL_S
        return len(sequence.unsent) >= CHECKPOINT_TOKENS

    def _leave(self, sequence: _Sequence) -> None:
        """Free the row; cache its keys and values if the present weights computed them."""
        if sequence.version == self._policy.version:
            known = prefix(sequence.ids, sequence.base + sequence.tokens)
            kv = sequence.slab.kv(sequence)
            self._cache.store(known, kv, from_token=sequence.base)
            if self._stored is not None:
                # Prefill has stored the whole blocks of the prompt.
                whole = sequence.prompt.tokens
                self._stored.write(known, kv, after_token=whole, kv_from=sequence.base)
        self._running.remove(sequence)
        if self._trunks is not None:
            self._trunks.leave(sequence)
        self._unpin(sequence)

    def _unpin(self, sequence: _Sequence) -> None:
        if sequence.arrived is not None:
            self._cache.unpin(sequence.arrived.cached)
            sequence.arrived = None
        if sequence.prompt_blocks is not None:
            self._cache.unpin(sequence.prompt_blocks)
            sequence.prompt_blocks = None

    def _refuse(self, sequence: _Sequence, reason: str) -> None:
        request = sequence.prompt.request_id
        refusal = ResourceExhausted(f"request {request} {reason}", retry_after_s=0.5)
        self._send_error(sequence, refusal)

    def _send_error(self, sequence: _Sequence, error: ForgeError) -> None:
        if sequence.unsent:
            self._outbox.append((sequence.deliver, Piece(tokens=sequence.take_unsent())))
        self._outbox.append((sequence.deliver, error))

    def _deliver(self) -> None:
        if self._outbox:
            self.loop.call_soon_threadsafe(_deliver_all, self._outbox)
            self._outbox = []


def _deliver_all(outbox: Sequence[tuple[Deliver, Piece | ForgeError]]) -> None:
    for deliver, answer in outbox:
        deliver(answer)
