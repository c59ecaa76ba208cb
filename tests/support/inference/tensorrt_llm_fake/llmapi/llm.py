"""The base class of the asynchronous engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tests.support.inference.tensorrt_llm_fake.behaviour import behaviour, misuse
from tests.support.inference.tensorrt_llm_fake.core import Core, Request
from tests.support.inference.tensorrt_llm_fake.disaggregated_params import DisaggregatedParams
from tests.support.inference.tensorrt_llm_fake.executor.result import GenerationResult
from tests.support.inference.tensorrt_llm_fake.llmapi.llm_args import TorchLlmArgs
from tests.support.inference.tensorrt_llm_fake.sampling_params import SamplingParams


class LLM:
    """See the library."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        self.args = TorchLlmArgs.checked(model=model, **kwargs)
        self.core: Core | None = None

    def generate_async(
        self,
        inputs: list[int],
        sampling_params: SamplingParams | None = None,
        lora_request: None = None,
        streaming: bool = False,
        kv_cache_retention_config: None = None,
        disaggregated_params: DisaggregatedParams | None = None,
        scheduling_params: None = None,
        cache_salt: str | None = None,
    ) -> GenerationResult:
        """Start a request."""
        assert self.core is not None, "the engine has not started"
        assert sampling_params is not None
        if behaviour().is_old and cache_salt is not None:
            raise TypeError("generate_async() got an unexpected keyword argument 'cache_salt'")
        sampling_params.use()
        self._check(inputs, sampling_params)
        if disaggregated_params is not None:
            self._check_hand_off(inputs, disaggregated_params)
            if disaggregated_params.request_type == "context_only":
                # On the caller's object, as the library does.
                sampling_params.max_tokens = 1
        request = Request(
            ids=list(inputs),
            params=sampling_params,
            salt=cache_salt,
            hand_off=disaggregated_params,
        )
        core = self.core
        request.result = GenerationResult(
            asyncio.get_running_loop(), on_abort=lambda: core.abort(request)
        )
        core.submit(request)
        return request.result

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[Any]:
        """Yield the events so far; ends after `timeout` without any."""
        return self._read_events(timeout)

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[Any]:
        """Yield statistics of the last steps."""
        return self._read_stats(timeout)

    async def _read_events(self, timeout: float | None) -> AsyncIterator[Any]:
        assert self.core is not None
        if not self.args.kv_cache_config or not self.args.kv_cache_config.event_buffer_max_size:
            raise misuse("events without a buffer for them")
        for _ in range(int((timeout or 0.0) * 100)):
            events = self.core.blocks.take_events()
            for event in events:
                yield event
            if events:
                return
            await asyncio.sleep(0.01)

    async def _read_stats(self, timeout: float | None) -> AsyncIterator[Any]:
        assert self.core is not None
        if not self.args.enable_iter_perf_stats:
            raise misuse("statistics that are not enabled")
        yield {"iter": self.core.steps, "numActiveRequests": len(self.core.requests)}

    def shutdown(self) -> None:
        """End the engine."""
        if self.core is not None:
            self.core.close()
            self.core = None

    def _check(self, inputs: list[int], params: SamplingParams) -> None:
        args = self.args
        if len(inputs) > args.max_input_len:
            raise ValueError(f"{len(inputs)} tokens exceed max_input_len = {args.max_input_len}")
        if len(inputs) > args.max_num_tokens and not args.enable_chunked_prefill:
            raise ValueError(f"{len(inputs)} tokens exceed max_num_tokens")
        if args.max_seq_len and len(inputs) + params.max_tokens > args.max_seq_len:
            raise ValueError(f"prompt and answer exceed max_seq_len = {args.max_seq_len}")
        if args.skip_tokenizer_init and params.end_id is None:
            raise ValueError("tokenizer is required to set end_id")
        if params.detokenize:
            raise misuse("text is decoded that nobody reads")
        speculation = args.speculative_config
        if speculation and params.seed is None:
            raise misuse("an unseeded request shares its random numbers under speculation")
        exact = speculation is None or speculation.use_rejection_sampling
        if not exact and not params.is_greedy:
            raise misuse("sampling with drafts, without rejection sampling")

    def _check_hand_off(self, inputs: list[int], params: DisaggregatedParams) -> None:
        transceiver = self.args.cache_transceiver_config
        if transceiver is None:
            raise ValueError("disaggregated_params need a cache_transceiver_config")
        params.use()
        if params.request_type == "context_only" and not self.args.disable_overlap_scheduler:
            raise misuse("prefill with the overlap scheduler")
        if len(inputs) > (transceiver.max_tokens_in_buffer or 0):
            raise misuse(f"{len(inputs)} tokens do not fit the transfer buffer")
