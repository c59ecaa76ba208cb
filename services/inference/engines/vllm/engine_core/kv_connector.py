"""In vLLM's process: keys and values of prompts, from a prefill engine to a decode engine.

A connector of vLLM. The worker names memory of its own for each request; vLLM's process fills it
after the pass that ends the prompt, or loads it before the first pass. Whole blocks alone: decode
computes the rest. It stands in place of vLLM's ExampleConnector, which names files by tokens alone,
of any weights, keeps them forever, and ends the process when one is missing. Not here: the way
between the workers; see `hand_off`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from forge.core.errors import ForgeError
from forge.runtime.telemetry import log
from services.inference.engines.vllm.exchange.kv_format import load_blocks, write_blocks
from services.inference.engines.vllm.exchange.names import LOAD, SAVE, TOKENS
from services.inference.engines.vllm.exchange.shared_memory import Address


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks to copy after a pass."""

    address: Address
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks to copy before a pass."""

    address: Address
    skipped: int
    """Blocks at the beginning, which the prefix cache has."""
    blocks: list[int]


@dataclass
class Copies(KVConnectorMetadata):  # type: ignore[misc]
    """The copies of one pass."""

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)


class KvCopies(KVConnectorBase_V1):  # type: ignore[misc]
    """One half is beside vLLM's scheduler, one beside the model."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("the roles prefill and decode need a model with layers of one kind")
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._unsaved: dict[str, tuple[Address, int]] = {}
        """Memory and tokens of each prompt that is not read yet."""
        self._loads: list[Load] = []
        self.caches: dict[str, torch.Tensor] = {}
        """Blocks by layer."""
        self._failed: set[int] = set()

    # Beside the scheduler.

    def on_new_request(self, request: Any) -> None:
        """Note the blocks to save."""
        address = (request.kv_transfer_params or {}).get(SAVE)
        if address is not None:
            self._unsaved[request.request_id] = (address, request.num_prompt_tokens)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens are loaded beyond the computed ones, before the next pass."""
        # After the first token the memory is gone: a preempted request is computed again.
        if request.num_output_tokens:
            return 0, False
        return max(0, self._loadable(request) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note which blocks are loaded."""
        if not num_external_tokens:
            return
        end = self._loadable(request) // self._block_tokens
        start = end - num_external_tokens // self._block_tokens
        (ids,) = blocks.get_block_ids()
        address = request.kv_transfer_params[LOAD]
        self._loads.append(Load(address, start, ids[start:end]))

    def _loadable(self, request: Any) -> int:
        """Tokens that were handed over; the last token of a prompt is computed in any case."""
        tokens: int = (request.kv_transfer_params or {}).get(TOKENS, 0)
        most: int = min(tokens, request.num_tokens - 1)
        return most // self._block_tokens * self._block_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        """Return the copies of this pass."""
        copies = Copies(loads=self._loads)
        self._loads = []
        for request_id, tokens in _progress(scheduler_output):
            address, prompt_tokens = self._unsaved.get(request_id, (None, 0))
            if address is not None and tokens >= prompt_tokens:
                del self._unsaved[request_id]
                (ids,) = self._kv_cache_manager.get_block_ids(request_id)
                copies.saves.append(Save(address, ids[: prompt_tokens // self._block_tokens]))
        return copies

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Forget a request that was aborted; its blocks are free at once."""
        self._unsaved.pop(request.request_id, None)
        return False, None

    # Beside the model.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the blocks of all layers."""
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        """Load; vLLM computes what could not be loaded."""
        for load in self._get_connector_metadata().loads:
            try:
                load_blocks(load.address, self.caches, load.blocks, skipped=load.skipped)
            except (OSError, ValueError, ForgeError) as error:
                log.warning("hand_off_not_loaded", error=str(error))
                self._failed.update(load.blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks without their keys and values."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_save(self) -> None:
        """Save; without it decode computes the prompt."""
        for save in self._get_connector_metadata().saves:
            try:
                write_blocks(save.address, self.caches, save.blocks)
            except (OSError, ValueError) as error:
                log.warning("hand_off_not_saved", error=str(error))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: all layers are loaded before the pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **options: Any
    ) -> None:
        """Nothing to do: all layers are saved after the pass."""


def _progress(scheduler_output: Any) -> Iterator[tuple[str, int]]:
    """Yield each request with its number of computed tokens after this pass."""
    scheduled = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
    cached = scheduler_output.scheduled_cached_reqs
    for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield name, computed + scheduled[name]
