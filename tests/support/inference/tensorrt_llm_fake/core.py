"""The executor of all ranks: a thread that takes steps, and control actions between them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from tests.support.inference.tensorrt_llm_fake.behaviour import behaviour, misuse
from tests.support.inference.tensorrt_llm_fake.blocks import Blocks
from tests.support.inference.tensorrt_llm_fake.disaggregated_params import DisaggregatedParams
from tests.support.inference.tensorrt_llm_fake.executor.result import (
    CompletionOutput,
    GenerationResult,
)
from tests.support.inference.tensorrt_llm_fake.llmapi.llm_args import TorchLlmArgs
from tests.support.inference.tensorrt_llm_fake.model import RankModel, draw
from tests.support.inference.tensorrt_llm_fake.sampling_params import SamplingParams

_WAIT_S = 60.0
_HELD: dict[int, Core] = {}
"""Keys and values that wait for a decode engine of this process, by id."""
_numbers = count(1)


@dataclass(kw_only=True)
class Request:
    """One running request."""

    ids: list[int]
    params: SamplingParams
    salt: str | None
    hand_off: DisaggregatedParams | None
    result: GenerationResult | None = None
    output: CompletionOutput = field(default_factory=CompletionOutput)
    cache: Any = field(default_factory=DynamicCache)
    generator: torch.Generator | None = None
    transfer_left: int = 0
    aborted: bool = False
    is_read: bool = False


class Core:
    """The requests and the models of all ranks."""

    def __init__(self, args: TorchLlmArgs) -> None:
        self.args = args
        world = args.tensor_parallel_size * args.pipeline_parallel_size
        self.ranks = [RankModel(Path(args.model), computes=rank == 0) for rank in range(world)]
        kv = args.kv_cache_config
        assert kv is not None
        self.blocks = Blocks(
            block_tokens=kv.tokens_per_block, buffer_events=kv.event_buffer_max_size
        )
        self.reuses = kv.enable_block_reuse
        self.requests: list[Request] = []
        self._outputs: list[tuple[GenerationResult, CompletionOutput | Exception]] = []
        self.steps = 0
        self.control_actions = 0
        self.condition = threading.Condition()
        self._controlled: set[int] = set()
        self._stepping = False
        self._closed = False
        self._shared = torch.Generator().manual_seed(0)
        self._thread = threading.Thread(target=self._run, name="stand-in executor", daemon=True)
        self._thread.start()

    @property
    def held(self) -> int:
        """Prompts that wait for a decode engine."""
        return sum(owner is self for owner in _HELD.values())

    def submit(self, request: Request) -> None:
        """Queue a request."""
        hand_off = request.hand_off
        if hand_off is not None and hand_off.request_type == "generation_only":
            self._receive(request, hand_off)
        with self.condition:
            if self._closed:
                raise RuntimeError("the executor is shut down")
            self.requests.append(request)
            self.condition.notify_all()

    def abort(self, request: Request) -> None:
        """Stop a request; a transfer cannot be stopped."""
        with self.condition:
            if request not in self.requests:
                return
            if request.transfer_left:
                behaviour().leaks += 1
            request.aborted = True
            self.condition.notify_all()

    @contextmanager
    def control(self, rank: int, *, drain: bool) -> Iterator[None]:
        """Run between two steps; with `drain` once no request is left."""
        if rank in self._controlled:
            raise misuse("control_action is not re-entrant")
        with self.condition:
            ended = self.condition.wait_for(
                lambda: not self._stepping and not (drain and (self.requests or self.held)),
                timeout=_WAIT_S,
            )
            if not ended:
                raise misuse("a draining control action waits forever")
            self._controlled.add(rank)
            self.control_actions += rank == 0
        try:
            yield
        finally:
            with self.condition:
                self._controlled.discard(rank)
                self.condition.notify_all()

    def close(self) -> None:
        """End the thread; all requests fail."""
        if self._controlled:
            raise misuse("a shutdown within a control action waits forever")
        with self.condition:
            self._closed = True
            self.condition.notify_all()
        self._thread.join()
        for uid in [uid for uid, owner in _HELD.items() if owner is self]:
            del _HELD[uid]
        for request in self.requests:
            self._feed(request, RuntimeError("the executor is shut down"))
        self.requests.clear()
        self._deliver()

    def _receive(self, request: Request, hand_off: DisaggregatedParams) -> None:
        uid = hand_off.disagg_request_id or 0
        state = (hand_off.opaque_state or b"").decode().split()
        if len(state) != 3 or int(state[0]) != uid:
            raise misuse("decode has another id than the one that prefill returned")
        if hand_off.ctx_info_endpoint != [f"tcp://127.0.0.1:{state[1]}"]:
            raise misuse(f"decode has the endpoint {hand_off.ctx_info_endpoint!r}")
        if int(state[1]) == os.getpid() and _HELD.pop(uid, None) is None:
            raise RuntimeError(f"no keys and values are held for {uid}")
        if int(state[2]) != len(request.ids):
            raise misuse("decode has another prompt than prefill")
        request.transfer_left = behaviour().transfer_steps
        request.output.token_ids += hand_off.first_gen_tokens or []
        request.output.logprobs += (hand_off.first_gen_log_probs or [[]])[0]

    def _run(self) -> None:
        while True:
            with self.condition:
                self._stepping = False
                self.condition.notify_all()
                self.condition.wait_for(
                    lambda: self._closed or (self.requests and not self._controlled)
                )
                if self._closed:
                    return
                self._stepping = True
                batch = self.requests[: self.args.max_batch_size]
            self.steps += 1
            for request in batch:
                try:
                    done = self._advance(request)
                except Exception as error:
                    self._feed(request, error)
                    done = True
                if done:
                    with self.condition:
                        self.requests.remove(request)
                self._deliver()

    def _advance(self, request: Request) -> bool:
        """Take one step of one request; whether it has ended."""
        if request.aborted:
            request.output.finish_reason = "cancelled"
            self._feed(request, copy(request.output))
            return True
        if request.transfer_left:
            request.transfer_left -= 1
            return False
        if len({rank.generation for rank in self.ranks}) > 1:
            raise misuse("ranks have unlike weights")
        if self.ranks[0].calls:
            raise misuse("a step in the middle of an update")
        generation = self.ranks[0].generation
        if not request.is_read:
            self._read(request, generation)
        # With drafts a step gives two tokens.
        for _ in range(2 if self.args.speculative_config else 1):
            self._sample(request)
            if request.output.finish_reason:
                break
        if request.output.finish_reason and self.reuses:
            computed = [*request.ids, *request.output.token_ids[:-1]]
            self.blocks.store(computed, salt=request.salt, generation=generation)
        if request.hand_off is not None and request.hand_off.request_type == "context_only":
            self._hand_over(request, request.hand_off)
        self._feed(request, copy(request.output))
        return request.output.finish_reason is not None

    def _read(self, request: Request, generation: int) -> None:
        request.is_read = True
        if self.reuses:
            self.blocks.reuse(request.ids, salt=request.salt, generation=generation)
        if request.params.prompt_logprobs == 0:
            request.output.prompt_logprobs = self.ranks[0].score(request.ids)

    def _sample(self, request: Request) -> None:
        params, output = request.params, request.output
        if request.generator is None:
            request.generator = self._shared
            if params.seed is not None:
                request.generator = torch.Generator().manual_seed(params.seed)
        logits = self.ranks[0].next_logits([*request.ids, *output.token_ids], request.cache)
        token, logprobs = draw(logits, params, request.generator)
        output.token_ids = [*output.token_ids, token]
        if logprobs:
            output.logprobs = [*output.logprobs, logprobs]
        if token in (params.stop_token_ids or ()):
            if not params.include_stop_str_in_output:
                output.token_ids = output.token_ids[:-1]
            output.finish_reason = "stop"
        elif len(output.token_ids) >= params.max_tokens:
            output.finish_reason = "length"

    def _hand_over(self, request: Request, hand_off: DisaggregatedParams) -> None:
        uid = hand_off.disagg_request_id or 0
        if behaviour().reassigns_ids:
            uid += 1
        _HELD[uid] = self
        request.output.disaggregated_params = DisaggregatedParams(
            request_type="context_only",
            first_gen_tokens=list(request.output.token_ids),
            first_gen_log_probs=[list(request.output.logprobs)],
            ctx_request_id=next(_numbers),
            opaque_state=f"{uid} {os.getpid()} {len(request.ids)}".encode(),
            disagg_request_id=uid,
            ctx_info_endpoint=[f"tcp://127.0.0.1:{os.getpid()}"],
        )

    def _feed(self, request: Request, output: CompletionOutput | Exception) -> None:
        if request.result is not None:
            self._outputs.append((request.result, output))

    def _deliver(self) -> None:
        """Send the outputs: the caller of a request that has ended finds it gone."""
        for result, output in self._outputs:
            result.feed(output)
        self._outputs.clear()
