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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from forge.core.errors import ResourceExhausted, Unavailable
from forge.runtime.actors.actor import ThreadActor
from services.inference.engines.base import BrokenWeights, Piece, Prompt
from services.inference.engines.embedded.arrivals import arrived_tensors
from services.inference.engines.embedded.decode_step import DecodeStep, Outcome
from services.inference.engines.embedded.kv.prefix_cache import KvCache, prefix
from services.inference.engines.embedded.memory_shortage import attempt, keep_if_room
from services.inference.engines.embedded.messages import Abort, Join, Reserve, Swap
from services.inference.engines.embedded.outbox import Outbox, sent_back
from services.inference.engines.embedded.sequences import Arrived, DecodeSequence, Reservation
from services.inference.engines.embedded.split_step import SplitStep
from services.inference.engines.embedded.stored_kv import StoredKv

WAITING_SHARE = 1 / 8
"""Memory of prompts that wait for a row, as a share of the memory of running ones; on top of it."""
_MIXED = -1
"""Version of keys and values computed by several weights, or with NaN; never cached."""
_LOOKAHEAD_TOKENS = 512
"""A new sequence gets a row for at most this many further tokens; a longer one moves."""


class DecodeActor(ThreadActor):
    """Owns the model, the running sequences and the prefix cache of a decode instance."""

    def __init__(
        self,
        step: DecodeStep,
        cache: KvCache,
        stored: StoredKv | None = None,
        *,
        max_running: int,
        max_waiting: int,
        threads: int,
        recompute: bool = False,
    ) -> None:
        """`recompute`: a swap ends the answers whose keys and values are of other weights."""
        self._step = step
        self._split_step = SplitStep(step)
        self._policy = step.policy
        self._running = step.running
        self._prefixes = step.prefixes
        self._states = step.states
        self._cache = cache
        self._stored = stored
        self._waiting: deque[DecodeSequence] = deque()
        self._reserved: dict[str, Reservation] = {}
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._threads = threads
        self._recompute = recompute
        self._epoch = 0
        """Number of swaps: each empties the cache, whatever the versions are."""
        self._outbox = Outbox()

    def started(self) -> None:
        """Set the threads of torch."""
        torch.set_num_threads(self._threads)

    def receive(self, message: Any) -> Any:
        """Handle a message between two steps."""
        match message:
            case Reserve(prompt=prompt, cached=cached):
                return self._reserve(prompt, limit_tokens=None if cached else 0)
            case Join():
                self._join(message)
            case Abort(request_id=request_id):
                self._abort(request_id)
            case Swap():
                refusal = message.serve(self._policy, self._cache, self._stored)
                if refusal is None:
                    self.after_swap()
                self.loop.call_soon_threadsafe(message.deliver, refusal)
        return None

    @torch.inference_mode()
    def after_swap(self) -> None:
        """Send back the requests whose keys and values other weights computed, to be read again by
        those in service; the tokens so far are delivered before. Unless they are to be kept."""
        self._step.after_swap()
        self._epoch += 1
        if not self._recompute:
            return
        version = self._policy.version
        for sequence in [one for one in self._running if one.version != version]:
            self._leave(sequence)
            self._outbox.read_again(sequence, f"by weights {version}")
        for sequence in [one for one in self._waiting if one.version != version]:
            self._waiting.remove(sequence)
            self._unpin(sequence)
            self._outbox.read_again(sequence, f"by weights {version}")
        self._outbox.deliver(self.loop)

    def work(self) -> bool:
        """Run one decode step; False when no request is left."""
        self._admit()
        if len(self._running):
            self._run_step()
        self._outbox.deliver(self.loop)
        return bool(len(self._running) or self._waiting)

    def _reserve(self, prompt: Prompt, *, limit_tokens: int | None) -> int:
        self._unreserve(prompt.request_id)
        match = self._cache.match(prompt.ids, limit_tokens=limit_tokens, pin=True)
        self._reserved[prompt.request_id] = Reservation(match, self._policy.version, self._epoch)
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
            arrived = self._arrived(join, reserved)
        except BaseException:
            self._unreserve(prompt.request_id)
            raise
        del self._reserved[prompt.request_id]
        fetched, blocks = arrived.fetched, None
        known = attempt(partial(self._known_routes, reserved, arrived), self._policy.device).result
        routes = fetched.routes if known is None else known
        # A prefix and its continuation by different weights belong to no version.
        of_one = not match.tokens or span.version == reserved.version
        is_whole = of_one and self._has_prefix(match.tokens, reserved.epoch)
        if is_whole and span.version == self._policy.version:
            store = partial(self._cache.store, from_token=match.tokens, routes=fetched.routes)
            if self._keep(partial(store, prompt.ids, fetched.kv)):
                blocks = self._cache.match(prompt.ids, pin=True)
                # One pin for each request: blocks with two are shared, and get a shared prefix.
                self._cache.unpin(match)
        room = self._policy.limits.context_tokens - prompt.tokens
        self._waiting.append(
            DecodeSequence(
                prompt=prompt,
                stream=join.stream,
                deliver=join.deliver,
                asked_s=join.asked_s,
                sampled=array("i", join.first.ids),
                most_sampled=min(prompt.sampling.max_tokens, room),
                version=span.version if of_one else _MIXED,
                arrived=replace(arrived, pinned=blocks is None),
                matcher=join.matcher,
                state=fetched.state,
                prompt_blocks=blocks,
                epoch=self._epoch if blocks is not None else reserved.epoch,
                kv_shape=self._policy.kv_shape,
                routes=bytearray(routes.numpy().tobytes()),
                routes_start=prompt.tokens - len(routes),
                routes_sent=prompt.tokens,
            )
        )

    def _known_routes(self, reserved: Reservation, arrived: Arrived) -> torch.Tensor:
        """Return the experts of a hand-off, behind those of the cached tokens in the store's block
        with the end of the prompt: the answer completes this block."""
        match, fetched = reserved.match, arrived.fetched.routes
        if self._stored is None or not self._has_prefix(match.tokens, reserved.epoch):
            return fetched
        start = min(match.tokens, self._stored.block_start(match.tokens + len(fetched)))
        return torch.cat([self._cache.routes(match, start=start), fetched])

    def _arrived(self, join: Join, reserved: Reservation) -> Arrived:
        """Decode the keys and values of a prompt behind its match in the cache. Raises Unavailable
        without weights, ResourceExhausted if too many requests wait, or if these weights are to
        compute what this engine has computed by others."""
        version, match = self._policy.version, reserved.match
        if version == 0:
            raise Unavailable("no weights have been loaded yet")
        own = {join.span.version} if join.span.kept is not None else set()
        if match.tokens:
            own.add(reserved.version)
        if self._recompute and own - {version}:
            raise sent_back(join.prompt, f"by weights {version}")
        if len(self._waiting) >= self._max_waiting:
            raise ResourceExhausted(
                f"{self._max_waiting} requests already wait for a slot", retry_after_s=1.0
            )
        assert match.tokens + join.span.tokens == join.prompt.tokens
        arrived = Arrived(
            cached=match,
            fetched=arrived_tensors(self._policy, join.span, join.prompt.request_id),
            pinned=True,
        )
        self._require_room_to_wait(arrived.nbytes)
        return arrived

    def _require_room_to_wait(self, arriving_bytes: int) -> None:
        """Raises ResourceExhausted if waiting keys and values would exceed their share of the
        memory; one prompt may wait in any case."""
        most_bytes = int(self._running.capacity_bytes * WAITING_SHARE)

        def is_full() -> bool:
            waiting = [one.arrived.nbytes for one in self._waiting if one.arrived]
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
                self._outbox.refuse(
                    sequence, f"needs more room than all of {self._running.capacity_bytes} bytes"
                )
            self._waiting.popleft()

    def _place(self, sequence: DecodeSequence) -> bool:
        """Give a sequence its row; return False without room."""
        if self._prefixes is not None:
            self._prefixes.seat(sequence, self._running)
        own = sequence.prompt.tokens - sequence.base
        to_come = min(sequence.most_sampled, _LOOKAHEAD_TOKENS)
        if not self._running.add(sequence, tokens=own, expected_tokens=own + to_come):
            if self._prefixes is not None:
                self._prefixes.leave(sequence)
            return False
        if attempt(partial(self._fill, sequence), self._policy.device).shortage:
            self._running.remove(sequence)
            if self._prefixes is not None:
                self._prefixes.leave(sequence)
            return False
        if self._states is not None:
            assert sequence.arrived is not None
            states_1S = sequence.arrived.fetched.recurrent
            assert states_1S is not None
            self._states.add(sequence, states_1S)
        self._drop_arrived(sequence)
        sequence.began_s = sequence.sent_s = time.monotonic()
        return True

    def _fill(self, sequence: DecodeSequence) -> None:
        """Copy a prompt's keys and values to its row, without those in its shared prefix."""
        assert sequence.arrived is not None
        cached, fetched = sequence.arrived.cached, sequence.arrived.fetched.kv
        kv = self._running.kv(sequence)
        self._cache.read(cached, kv, start=sequence.base)
        first = max(cached.tokens, sequence.base)
        own = slice(first - sequence.base, sequence.tokens)
        for layer, new in zip(kv, fetched, strict=True):
            layer[:, :, own] = new[:, :, first - cached.tokens :]

    @torch.inference_mode()
    def _run_step(self) -> None:
        self._make_room()
        if not len(self._running):
            return
        outcomes = self._split_step.run()
        now_s = time.monotonic()
        for sequence, outcome in outcomes:
            self._advance(sequence, outcome, now_s)

    def _make_room(self) -> None:
        """Make room for the next step's tokens, oldest first; without room for all of them, for one
        token. Full slabs evict the youngest."""
        self._step.plan()
        by_age = sorted(self._running, key=lambda sequence: sequence.began_s)
        for sequence in by_age:
            if not self._running.promote(sequence):
                sequence.step_tokens = 1
            while not self._running.promote(sequence):
                youngest = by_age.pop()
                self._leave(youngest)
                self._outbox.refuse(youngest, "was evicted for older requests: the slabs are full")
                if youngest is sequence:
                    break

    def _advance(self, sequence: DecodeSequence, outcome: Outcome, now_s: float) -> None:
        version = self._policy.version
        finish = None
        if outcome.routes is not None:
            sequence.routes += outcome.routes.numpy().tobytes()
        for drawn in outcome.tokens:
            if sequence.version != version or not math.isfinite(drawn.logprob):
                sequence.version = _MIXED
            if not math.isfinite(drawn.logprob):
                self._leave(sequence)
                broken = BrokenWeights(f"weights {version} gave a log-prob that is not finite")
                self._outbox.fail(sequence, broken)
                return
            sequence.sampled.append(drawn.token)
            sequence.unsent.append((drawn, version))
            if sequence.matcher is not None:
                sequence.matcher.advance(drawn.token)
            finish = sequence.finish_with(drawn.token, sampled=len(sequence.sampled))
        if outcome.failure is not None:
            self._leave(sequence)
            self._outbox.fail(sequence, outcome.failure)
        elif finish is not None:
            self._leave(sequence)
            piece = Piece(
                tokens=sequence.take_unsent(),
                finish=finish,
                queue_s=sequence.began_s - sequence.asked_s,
                decode_s=now_s - sequence.began_s,
            )
            self._outbox.add(sequence, piece)
        elif sequence.is_due(now_s):
            sequence.sent_s = now_s
            self._outbox.add(sequence, Piece(tokens=sequence.take_unsent()))

    def _leave(self, sequence: DecodeSequence) -> None:
        """Free the row; cache its keys and values if the present weights computed them."""
        of_one = sequence.version == self._policy.version
        if of_one and self._has_prefix(sequence.base, sequence.epoch):
            self._keep(partial(self._cache_answer, sequence))
        if self._states is not None:
            self._states.remove(sequence)
        self._running.remove(sequence)
        if self._prefixes is not None:
            self._prefixes.leave(sequence)
        self._unpin(sequence)

    def _cache_answer(self, sequence: DecodeSequence) -> None:
        known = prefix(sequence.ids, sequence.base + sequence.tokens)
        kv, routes = self._running.kv(sequence), sequence.all_routes()
        self._cache.store(known, kv, from_token=sequence.base, routes=routes)
        if self._states is not None:
            self._cache.store_states(known, self._states.kept(sequence))
        if self._stored is not None:
            # Prefill has stored the whole blocks of the prompt.
            whole = sequence.prompt.tokens
            self._stored.write(
                known, kv, routes, after_token=whole, from_token=sequence.base, reused=True
            )

    def _keep(self, work: Callable[[], None]) -> bool:
        """Cache keys and values; False: there is no memory for it."""
        return keep_if_room("decode", work, self._policy.device)

    def _has_prefix(self, tokens: int, epoch: int) -> bool:
        """Whether the cache still has the pinned prefix of so many tokens, found in this epoch."""
        return not tokens or epoch == self._epoch

    def _unpin(self, sequence: DecodeSequence) -> None:
        self._drop_arrived(sequence)
        if sequence.prompt_blocks is not None:
            self._cache.unpin(sequence.prompt_blocks)
            sequence.prompt_blocks = None

    def _drop_arrived(self, sequence: DecodeSequence) -> None:
        arrived, sequence.arrived = sequence.arrived, None
        if arrived is not None and arrived.pinned:
            self._cache.unpin(arrived.cached)
