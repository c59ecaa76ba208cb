"""Code in vLLM's own process: Forge's weight transfer, and the end of the process with the worker.

vLLM imports this module by the name of `WorkerExtension`, before it builds the model. The weights
come in memory that the worker has filled (`staging`); nothing of them is in the call.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from xxhash import xxh3_64_intdigest

from services.inference.engines.tensor_bytes import from_bytes
from services.inference.engines.vllm.engine_core import (
    cpu_kernels,
    draft_heads,
    expert_recorder,
    reload,
)
from services.inference.engines.vllm.engine_core.answer_logits import install
from services.inference.engines.vllm.exchange.kv_format import Layout, layout_of
from services.inference.engines.vllm.exchange.names import WEIGHT_BACKEND, WORKER_PID
from services.inference.engines.vllm.exchange.shared_memory import Address, open_shared
from services.inference.engines.weight_checks import DRAFT_PREFIX


class WorkerExtension:
    """Methods for `collective_rpc`."""

    def forge_kv_layout(self) -> Layout:
        """Return the layers of the keys and values."""
        connector: Any = get_kv_transfer_group()
        return layout_of(connector.caches)

    def forge_answer_sampler(self) -> None:
        """Have the model runner sample with `AnswerSampler`."""
        install(self.model_runner)  # type: ignore[attr-defined]

    def forge_prepare_drafts(self, by_heads: bool) -> None:
        """Mend the sampler of drafts; with `by_heads`, draft by `DraftHeads`."""
        cpu_kernels.install()
        if by_heads:
            draft_heads.install(self.model_runner)  # type: ignore[attr-defined]

    def forge_drafts(self) -> tuple[int, int]:
        """Return how many tokens the heads drafted, and how many of them were accepted."""
        drafter = self.model_runner.drafter  # type: ignore[attr-defined]
        return drafter.drafted, drafter.accepted

    def forge_record_experts(self) -> tuple[int, int, int] | str:
        """Record the experts of each token from now on. Return layers, experts of a token and
        experts of a layer, or why they cannot be recorded."""
        try:
            shape = expert_recorder.install(self.model_runner)  # type: ignore[attr-defined]
        except expert_recorder.NotRecordable as error:
            return str(error)
        return shape.layers, shape.top_k, shape.experts

    def forge_lost_weights(
        self, tensors: list[tuple[str, str, list[int]]]
    ) -> tuple[str, list[str]]:
        """Return why a reload of these tensors (name, dtype, shape) could not be tried, empty if it
        could, and the parameters that it would not change."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        zeros = (
            (name, torch.zeros(shape, dtype=getattr(torch, dtype)))
            for name, dtype, shape in tensors
        )
        try:
            return "", reload.lost(runner.get_model(), runner.model_config, zeros)
        except Exception as error:
            return f"{type(error).__name__}: {error}", []


def end_with_worker() -> None:
    """End this process when the worker ends, also by SIGKILL and while the model is built, which
    takes minutes."""
    pid = os.environ.get(WORKER_PID)
    if pid is None:
        return
    try:
        # Not PR_SET_PDEATHSIG, which means the thread that started this process.
        worker = os.pidfd_open(int(pid))
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    Thread(target=_end_after, args=(worker,), daemon=True, name="forge-worker-watch").start()


def _end_after(process: int) -> None:
    select.select([process], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class TransferInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on."""


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket of a version: the memory that has it, and the place of each tensor in it."""

    address: Address
    tensors: list[tuple[str, str, list[int], int, int, int]]
    """Name, dtype, shape, first byte, bytes and XXH3-64 of each."""


class ForgeTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads weights from memory of the worker, layer by layer, as a checkpoint is loaded."""

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Nothing to do: each update names its memory."""

    def start_weight_update(self) -> None:
        """Prepare the model; see `reload`."""
        self._heads: dict[str, torch.Tensor] = {}
        reload.begin(self.model)

    def receive_weights(self, update_info: TransferUpdate) -> None:
        """Load one bucket. Raises ValueError for a wrong checksum."""
        with open_shared(update_info.address) as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        data = memoryview(mapped)
        found = [_tensor(data, entry) for entry in update_info.tensors]
        reload.load(self.model, [one for one in found if not one[0].startswith(DRAFT_PREFIX)])
        self._heads |= {name: one for name, one in found if name.startswith(DRAFT_PREFIX)}

    def finish_weight_update(self) -> None:
        """Post-process the loaded weights and serve them."""
        reload.finish(self.model, self.model_config)
        drafter = draft_heads.drafter_of(self.model)
        if drafter is not None:
            drafter.serve(self._heads)

    def shutdown(self) -> None:
        """Nothing to release."""


def _tensor(
    data: memoryview, entry: tuple[str, str, list[int], int, int, int]
) -> tuple[str, torch.Tensor]:
    name, dtype, shape, start, size, checksum = entry
    part = data[start : start + size]
    if (found := xxh3_64_intdigest(part)) != checksum:
        raise ValueError(f"{name}: XXH3-64 {found:016x} in vLLM's process, not {checksum:016x}")
    return name, from_bytes(part, dtype=dtype, shape=tuple(shape))


end_with_worker()
cpu_kernels.mend_rotary_embedding()
if WEIGHT_BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(WEIGHT_BACKEND, ForgeTransfer)
