"""Random traffic at the actors of one worker: arrivals, hand-offs, aborts, swaps of weights, full
memory and passes without memory, in any order.

Each answer is greedy under the weights that it was computed by, and after the last request all
memory is free. `make properties` runs more and longer traffic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from forge.core.errors import ForgeError
from services.inference.engines.base import Prompt
from tests.contract.engines import Answer, is_greedy, prompt_ids
from tests.support.inference.embedded_actors import BothByHand
from tests.support.suite.matrix import usual

pytestmark = pytest.mark.hypothesis

SEEDS = 2
MOST = 12
BASES = [prompt_ids(150, seed=1), prompt_ids(150, seed=1)[:70] + prompt_ids(80, seed=2)]
WORKERS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "recompute": {"recompute_on_update": True},
    "llama": {"drafts": True, "draft_tokens": 3, "adaptive_drafts": False},
    "qwen3_next": {},
}


@dataclass(eq=False)
class Request:
    """One request, in any state."""

    ids: list[int]
    prompt: Prompt
    cached: int | None = None
    """Set while it is reserved."""
    answer: Answer | None = None
    is_behind: bool = False
    """Whether its prompt comes from a worker that served other weights."""


class Traffic(RuleBasedStateMachine):
    """One worker and its requests."""

    name = "qwen3"

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        family = self.name if self.name != "recompute" else "qwen3"
        self.both = BothByHand(
            Path(self.folder.name),
            family,
            kv_bytes=1 << 20,
            cache_bytes=1 << 19,
            max_running=4,
            pass_tokens=48,
            **WORKERS[self.name],
        )
        self.reference = lru_cache(self.both.reference)
        self.seeds = {1: 0}
        """The seed of each version."""
        self.version = 1
        self.requests: list[Request] = []
        self.turns: list[list[int]] = []

    @rule(
        base=st.sampled_from(BASES),
        cut=st.integers(0, 150),
        tail=st.integers(1, 40),
        count=st.integers(1, 3),
        seed=st.integers(0, 3),
    )
    def arrive(self, base: list[int], cut: int, tail: int, count: int, seed: int) -> None:
        """A group with a common beginning."""
        group = [base[:cut] + prompt_ids(tail, seed=seed + 10 * one) for one in range(count)]
        self._read(*group)

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def continue_session(self, data: st.DataObject) -> None:
        """The next turn of an answer."""
        self._read(data.draw(st.sampled_from(self.turns)) + prompt_ids(3, seed=4))

    def _read(self, *group: list[int]) -> None:
        for ids, prompt in zip(group, self.both.read(*group, most=MOST), strict=True):
            self.requests.append(Request(ids=ids, prompt=prompt))

    def _ready(self) -> list[Request]:
        held = self.both.held
        return [one for one in self.requests if not one.answer and one.prompt.request_id in held]

    @precondition(lambda self: self._ready())
    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        """A request begins to fetch."""
        request = data.draw(st.sampled_from(self._ready()))
        request.cached = self.both.reserve(request.prompt)

    @precondition(lambda self: self._ready())
    @rule(data=st.data(), sent=st.booleans())
    def join(self, data: st.DataObject, sent: bool) -> None:
        """A request has fetched."""
        self._join(data.draw(st.sampled_from(self._ready())), sent=sent)

    def _join(self, request: Request, *, sent: bool) -> None:
        read_by = self.both.held[request.prompt.request_id].version
        request.is_behind = sent and read_by != self.both.policy.version
        try:
            request.answer = self.both.sample(request.prompt, cached=request.cached, sent=sent)
        except ForgeError:
            self.requests.remove(request)
        request.cached = None

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """A caller leaves, in any state of its request."""
        request = data.draw(st.sampled_from(self.requests))
        self.both.abort(request.prompt)
        self.requests.remove(request)
        if request.answer is not None:
            self._check(request)

    @rule(seed=st.integers(0, SEEDS - 1), back=st.booleans(), broken=st.booleans())
    def swap(self, seed: int, back: bool, broken: bool) -> None:
        """Other weights, or earlier ones again, or ones that are refused."""
        version = 1 if back else max(self.seeds) + 1
        if broken and self.name != "qwen3_next":
            self.both.swap(max(self.seeds) + 1, broken=True)
            return
        self.seeds.setdefault(version, seed)
        self.both.swap(version, seed=self.seeds[version])

    @rule(steps=st.integers(1, 8))
    def work(self, steps: int) -> None:
        """Passes and steps."""
        for _ in range(steps):
            self.both.work()

    @rule(tokens=st.integers(0, 40))
    def work_without_memory(self, tokens: int) -> None:
        """Passes with more tokens fail in the last layer."""
        with self._memory_for(tokens):
            self.both.work()

    @contextmanager
    def _memory_for(self, tokens: int) -> Iterator[None]:
        model: Any = self.both.policy.module

        def check(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            if arguments[0].shape[1] > tokens:
                raise torch.OutOfMemoryError("out of memory")

        hook = model.base_model.layers[-1].register_forward_pre_hook(check)
        try:
            yield
        finally:
            hook.remove()

    def teardown(self) -> None:
        """Answer or drop each request; then check answers and memory."""
        try:
            self._drain()
        finally:
            self.folder.cleanup()

    def _drain(self) -> None:
        both = self.both
        while both.work() or self._ready():
            for number, request in enumerate(self._ready()):
                self._join(request, sent=bool(number % 2))
        for request in self.requests:
            failed = request.prompt.request_id in both.failures
            if request.answer is None:
                assert failed
            else:
                assert failed or len(request.answer.ids) == MOST
                self._check(request)
        self._check_memory()

    def _check(self, request: Request) -> None:
        """The tokens of the version that read the prompt are greedy; with `recompute` an answer
        that this worker has begun has no others."""
        answer = request.answer
        assert answer is not None
        first = answer.versions[0]
        own = next((at for at, one in enumerate(answer.versions) if one != first), len(answer.ids))
        if self.name == "recompute" and not request.is_behind:
            assert own == len(answer.ids)
        model = self.reference(seed=self.seeds[first])
        assert is_greedy(model, request.ids, answer.ids[:own])
        if own == len(answer.ids):
            self.turns.append(request.ids + answer.ids)

    def _check_memory(self) -> None:
        actor: Any = self.both.actor
        prefill, decode = actor._prefill, actor._decode
        assert not prefill._pending and not prefill._later
        assert not decode._waiting and not decode._reserved
        assert not len(decode._running) and not decode._running.bytes
        if decode._prefixes is not None:
            assert not decode._prefixes.slabs.bytes and not decode._prefixes._by_key
        if decode._states is not None:
            assert not len(decode._states)
        cache = decode._cache
        blocks = list(cache._oldest_first)
        assert not any(block.pins for block in blocks)
        assert len(blocks) + len(cache._free) == cache.capacity_blocks
        assert len(cache._states) <= len(blocks)


@pytest.mark.parametrize("name", usual(WORKERS, "qwen3", "llama"))
def test_random_traffic_leaves_right_answers_and_free_memory(name: str) -> None:
    """Shared prefixes, evictions, rollbacks and repeated passes change no answer."""
    fuzz = settings.get_current_profile_name() == "fuzz"
    chosen = settings(max_examples=100 if fuzz else 4, stateful_step_count=50 if fuzz else 30)
    run_state_machine_as_test(type("Traffic", (Traffic,), {"name": name}), settings=chosen)
