"""Runs in each of the library's GPU workers: takes new weights between two steps.

The library mixes the class into its Ray workers, which gives it `engine` (the PyExecutor) and
`device_id`. Imports torch and the library in the calls alone, so that the driver can name the class
without them. Returns errors as text: an exception of one rank would hide the answers of the others.
"""

from __future__ import annotations

import importlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

Plan = Mapping[str, Any]
"""version, drain (None: the version has no such argument), and buckets: path, digest and tensors,
each as name, dtype, shape, offset and bytes."""

# Serial loading keeps all copies on one stream, and needs less memory.
os.environ.setdefault("TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL", "1")


class WorkerExtension:
    """Methods that the driver calls by `collective_rpc`, on all ranks at once.

    No other methods: the library refuses an extension that has a name of its worker, also a private
    one.
    """

    engine: Any
    device_id: int

    def check_forge_update(self, plan: Plan) -> str:
        """Read and compare all buckets; return an error, "" without one. Changes nothing."""
        for bucket in plan["buckets"]:
            try:
                with _mapped(bucket["path"]) as data:
                    digest = xxh3_64_hexdigest(data)
            except (OSError, ValueError) as error:
                return f"{bucket['path']}: {error}"
            if digest != bucket["digest"]:
                return f"{bucket['path']}: digest {digest}, not {bucket['digest']}"
        return ""

    def apply_forge_update(self, plan: Plan) -> str:
        """Load all buckets in one control action; return an error, "" without one.

        After an error the weights of this rank are a mix: the driver starts the engine again.
        """
        loader = self.engine.model_engine.model_loader
        try:
            with _control_action(self.engine, plan["drain"]):
                try:
                    _load(self, plan["buckets"], loader)
                except Exception:
                    _call_if_there(loader, "abort_update_weights")
                    raise
        except Exception as error:  # Any error of the library.
            return f"{type(error).__name__}: {error}"
        return ""

    def wait_for_engine_idle(self) -> None:
        """Return once no request is active or waits. The library's `pause_generation` calls it on
        each rank: its own extension, whose place this class takes, has it."""
        with self.engine.control_action():
            pass


def _load(worker: WorkerExtension, buckets: Sequence[Mapping[str, Any]], loader: Any) -> None:
    model = worker.engine.model_engine.model
    _synchronize()
    _call_if_there(loader, "begin_update_weights")
    for module in _modules_with(model, "pre_reload_weights"):
        module.pre_reload_weights()
    for bucket in buckets:
        with _mapped(bucket["path"]) as data:
            tensors = _tensors(data, bucket["tensors"], worker.device_id)
            loader.reload(model, tensors, allow_partial_loading=True)
            del tensors
            _synchronize()
    _finalize(worker, loader)
    _place_experts(worker.engine)
    _synchronize()
    worker.engine.reset_prefix_cache()


def _finalize(worker: WorkerExtension, loader: Any) -> None:
    """End the update by the library's own path where it has one: it knows CUDA graphs."""
    finalize = getattr(_library_extension(), "finalize_weight_update", None)
    if finalize is not None:
        finalize(worker)
        return
    _call_if_there(loader, "finalize_update_weights")
    for hook in ("process_weights_after_loading", "post_load_weights"):
        for module in _modules_with(worker.engine.model_engine.model, hook):
            getattr(module, hook)()


def _place_experts(engine: Any) -> None:
    """Renew what the load balancer of experts has copied; no hook of the library does it."""
    balancer: Any = getattr(engine.model_engine, "moe_load_balancer", None)
    # A model without one may have an empty stand-in.
    if hasattr(balancer, "register_weight_slots_after_to_cuda"):
        balancer.register_weight_slots_after_to_cuda()
        balancer.finalize_model()


def _control_action(engine: Any, drain: bool | None) -> AbstractContextManager[Any]:
    action: AbstractContextManager[Any] = (
        engine.control_action() if drain is None else engine.control_action(drain=drain)
    )
    return action


def _modules_with(model: Any, hook: str) -> Iterator[Any]:
    for module in model.modules():
        if hasattr(module, hook) and not getattr(module, "_weights_removed", False):
            yield module


def _call_if_there(loader: Any, name: str) -> None:
    hook = getattr(loader, name, None)
    if hook is not None:
        hook()


def _library_extension() -> Any:
    try:
        return importlib.import_module("tensorrt_llm.llmapi.rlhf_utils").WorkerExtension
    except ImportError:
        return None


def _mapped(path: str) -> mmap.mmap:
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _tensors(data: mmap.mmap, layout: Sequence[Sequence[Any]], device_id: int) -> dict[str, Any]:
    import torch

    device = torch.device("cuda", device_id) if torch.cuda.is_available() else torch.device("cpu")
    found = {}
    for name, dtype, shape, offset, size in layout:
        # A copy: the mapping is read-only, and ends before the GPU may have read it.
        flat = torch.frombuffer(bytearray(data[offset : offset + size]), dtype=torch.uint8)
        found[name] = flat.view(getattr(torch, dtype)).view(tuple(shape)).to(device)
    return found


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
