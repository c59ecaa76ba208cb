"""In vLLM's process: the experts that each token was computed with.

Owns a row for each slot of the keys and values, so that a cached prefix has its rows. A request
names memory of the worker (`ASKED`), which gets the rows of its tokens after each pass. vLLM's own
record needs its second model runner, which does not start on a CPU. Not here: that memory, see
`expert_rows`.

Shape suffixes: T tokens of a pass, S slots, L layers with experts, K experts of a token.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.kv_cache_interface import FullAttentionSpec

from forge.core.routes import RouteShape
from services.inference.engines.vllm.exchange.expert_rows import ASKED
from services.inference.engines.vllm.exchange.shared_memory import Address, open_shared


class NotRecordable(Exception):
    """The model's experts cannot be recorded, and why."""


@dataclass(slots=True)
class _Request:
    """A request that asks for its experts."""

    file: BinaryIO
    start: int
    """First token whose row the file has."""
    end: int
    """The token behind the last one with a row."""


class ExpertRecorder:
    """Observes the routers of a model, and the passes of its runner."""

    def __init__(self, runner: Any) -> None:
        """Raises NotRecordable."""
        routers = _routers(runner.get_model())
        self.shape = _shape(routers)
        self._runner = runner
        self._group, block_tokens = _whole_group(runner.kv_cache_config)
        self._block_tokens = block_tokens
        self._kind = np.dtype(f"<u{self.shape.id_bytes}")
        slots = runner.kv_cache_config.num_blocks * block_tokens
        size = (slots, self.shape.layers, self.shape.top_k)
        self._rows_SLK = np.full(size, np.iinfo(self._kind).max, self._kind)
        self._chosen: list[list[torch.Tensor]] = [[] for _ in routers]
        """Chosen experts of this pass, by layer."""
        self._asking: dict[str, _Request | None] = {}
        """By name; None for a request that does not ask."""
        for layer, router in enumerate(routers):
            router.set_capture_fn(partial(self._note, layer))

    def _note(self, layer: int, ids_TK: torch.Tensor) -> None:
        self._chosen[layer].append(ids_TK)

    def begin(self, scheduled: Any) -> None:
        """Prepare for a pass."""
        for chosen in self._chosen:
            chosen.clear()
        for name in scheduled.finished_req_ids:
            request = self._asking.pop(name, None)
            if request is not None:
                request.file.close()

    def end(self, scheduled: Any) -> None:
        """Store the rows of a pass, and give them to the requests that ask."""
        tokens = scheduled.total_num_scheduled_tokens
        if not tokens:
            return
        rows_TLK = self._pass_rows(tokens)
        batch = self._runner.input_batch
        slots_T = batch.block_table[self._group].slot_mapping.gpu[:tokens].cpu().numpy()
        self._rows_SLK[slots_T] = rows_TLK
        first = 0
        for place, name in enumerate(batch.req_ids):
            last = first + scheduled.num_scheduled_tokens[name]
            if (request := self._request(name)) is not None:
                at = int(batch.num_computed_tokens_cpu[place])
                self._give(request, name, rows_TLK[first:last], at=at)
            first = last

    def _pass_rows(self, tokens: int) -> np.ndarray[Any, Any]:
        ids_LTK = [torch.cat(chosen)[:tokens] for chosen in self._chosen]
        if any(len(ids_TK) < tokens for ids_TK in ids_LTK):
            raise RuntimeError(f"routers chose experts for fewer than {tokens} tokens of a pass")
        return torch.stack(ids_LTK, 1).cpu().numpy().astype(self._kind)

    def _request(self, name: str) -> _Request | None:
        if name not in self._asking:
            params = self._runner.requests[name].sampling_params
            asked = (params.extra_args or {}).get(ASKED) if params is not None else None
            self._asking[name] = _opened(*asked) if asked is not None else None
        return self._asking[name]

    def _give(
        self, request: _Request, name: str, rows_TLK: np.ndarray[Any, Any], *, at: int
    ) -> None:
        """Write the rows of a pass that begins at the token `at`, and those of cached tokens before
        it."""
        if request.end < at:
            cached = np.arange(request.end, at)
            blocks = np.array(self._runner.requests[name].block_ids[self._group])
            slots = blocks[cached // self._block_tokens] * self._block_tokens
            cached_TLK = self._rows_SLK[slots + cached % self._block_tokens]
            self._write(request, cached_TLK, at=request.end)
        self._write(request, rows_TLK, at=at)

    def _write(self, request: _Request, rows_TLK: np.ndarray[Any, Any], *, at: int) -> None:
        skipped = max(0, request.start - at)
        rows = rows_TLK[skipped:]
        if len(rows):
            row_bytes = rows[0].nbytes
            os.pwrite(
                request.file.fileno(), rows.tobytes(), (at + skipped - request.start) * row_bytes
            )
            request.end = max(request.end, at + skipped + len(rows))


def install(runner: Any) -> RouteShape:
    """Record the experts of each pass of a runner. Raises NotRecordable."""
    recorder = ExpertRecorder(runner)
    execute: Callable[..., Any] = runner.execute_model

    def execute_model(scheduled: Any, *args: Any, **options: Any) -> Any:
        recorder.begin(scheduled)
        found = execute(scheduled, *args, **options)
        recorder.end(scheduled)
        return found

    runner.execute_model = execute_model
    return recorder.shape


def _routers(model: torch.nn.Module) -> list[BaseRouter]:
    """Return the routers in the order of their layers."""
    layers = [module for module in model.modules() if isinstance(module, MoERunner)]
    if not layers:
        raise NotRecordable("the model has no experts")
    for layer in layers:
        if layer._quant_method.is_monolithic or not isinstance(layer.router, BaseRouter):
            raise NotRecordable(f"the kernel of {layer.layer_name} chooses experts by itself")
    return [layer.router for layer in sorted(layers, key=lambda layer: int(layer.layer_id))]


def _shape(routers: list[BaseRouter]) -> RouteShape:
    widths = {int(router.top_k) for router in routers}
    if len(widths) != 1:
        raise NotRecordable(f"layers choose {sorted(widths)} experts")
    experts = max(int(router.global_num_experts) for router in routers)
    return RouteShape(layers=len(routers), top_k=widths.pop(), experts=experts)


def _whole_group(config: Any) -> tuple[int, int]:
    """Return the group of layers whose keys and values stay for the whole sequence, and the tokens
    of its blocks."""
    for place, group in enumerate(config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return place, int(group.kv_cache_spec.block_size)
    raise NotRecordable("no layer keeps the keys and values of all tokens")


def _opened(address: Address, start: int) -> _Request | None:
    """Open the memory of a request; None if the worker has ended the request."""
    try:
        file = open_shared(address, "r+b")
    except OSError:
        return None
    return _Request(file=file, start=start, end=start)
