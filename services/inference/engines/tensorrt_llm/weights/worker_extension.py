"""Runs in each of the library's GPU workers: takes new weights between two steps.

The library mixes the class into its Ray workers, which gives it `engine` (the PyExecutor) and
`device_id`. Imports torch and the library in the calls alone, so that the driver can name the class
without them. Returns errors as text: an exception of one rank would hide the answers of the others.
"""

from __future__ import annotations

import importlib
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

Bucket = Mapping[str, Any]
"""A file of tensors; see `buckets`."""

# Serial loading keeps all copies on one stream, and needs less memory.
os.environ.setdefault("TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL", "1")


class WorkerExtension:
    """Methods that the driver calls by `collective_rpc`, on all ranks at once.

    No other methods: the library refuses an extension that has a name of its worker, also a private
    one.
    """

    engine: Any
    device_id: int
    forge_update: ExitStack
    """The control action of the update that runs."""

    def check_forge_bucket(self, bucket: Bucket) -> str:
        """Read and compare a bucket; return an error, "" without one. Changes nothing."""
        return _tried(lambda: _read(bucket))

    def begin_forge_update(self, drain: bool | None) -> str:
        """Enter the control action, which lasts until finish or abort; return an error, "" without
        one. `drain`: its argument; None: the version has no such argument."""
        return _tried(lambda: _begin(self, drain))

    def load_forge_bucket(self, bucket: Bucket) -> str:
        """Load the tensors of a bucket; return an error, "" without one.

        After an error of this or the next method the weights of this rank are a mix: the driver
        starts the engine again.
        """
        return _tried(lambda: _load(self, bucket))

    def finish_forge_update(self) -> str:
        """Serve the loaded weights, and leave the control action; return an error, "" without
        one."""
        return _tried(lambda: _finish(self))

    def abort_forge_update(self) -> str:
        """Leave the control action of an update that failed: within it the library cannot shut
        down. Return an error, "" without one."""
        return _tried(lambda: _abort(self))

    def wait_for_engine_idle(self) -> None:
        """Return once no request is active or waits. The library's `pause_generation` calls it on
        each rank: its own extension, whose place this class takes, has it."""
        with self.engine.control_action():
            pass


class _Aborted(Exception):
    """Leaves a control action as a failure of its body does."""


def _tried(step: Callable[[], object]) -> str:
    try:
        step()
    except Exception as error:  # Any error of the library.
        return f"{type(error).__name__}: {error}"
    return ""


def _begin(worker: WorkerExtension, drain: bool | None) -> None:
    worker.forge_update = ExitStack()
    worker.forge_update.enter_context(_control_action(worker.engine, drain))
    _synchronize()
    _call_if_there(worker.engine.model_engine.model_loader, "begin_update_weights")
    for module in worker.engine.model_engine.model.modules():
        _call_hook(module, "pre_reload_weights")


def _load(worker: WorkerExtension, bucket: Bucket) -> None:
    _restart_hang_detector(worker.engine)
    engine = worker.engine.model_engine
    tensors = _tensors(_read(bucket), bucket["tensors"], worker.device_id)
    engine.model_loader.reload(engine.model, tensors, allow_partial_loading=True)
    del tensors
    _synchronize()


def _finish(worker: WorkerExtension) -> None:
    _restart_hang_detector(worker.engine)
    _finalize(worker, worker.engine.model_engine.model_loader)
    _place_experts(worker.engine)
    _synchronize()
    _release_buckets()
    worker.engine.reset_prefix_cache()
    worker.forge_update.close()


def _abort(worker: WorkerExtension) -> None:
    update: ExitStack | None = getattr(worker, "forge_update", None)
    if update is None:
        return
    with suppress(_Aborted), update:
        _call_if_there(worker.engine.model_engine.model_loader, "abort_update_weights")
        raise _Aborted


def _finalize(worker: WorkerExtension, loader: Any) -> None:
    """End the update by the library's own path where it has one: it knows CUDA graphs."""
    finalize = getattr(_library_extension(), "finalize_weight_update", None)
    if finalize is not None:
        finalize(worker)
        return
    _call_if_there(loader, "finalize_update_weights")
    # Both hooks of a module before the next module, as in the library's first load.
    for module in worker.engine.model_engine.model.modules():
        for hook in ("process_weights_after_loading", "post_load_weights"):
            _call_hook(module, hook)


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


def _restart_hang_detector(engine: Any) -> None:
    """Give the next step of the update the whole time of the library's hang detector. The detector
    also counts the control action, in which the executor waits, and kills the ranks after 300 s."""
    detector = getattr(engine, "hang_detector", None)
    if detector is not None:
        detector.checkpoint()


def _call_hook(module: Any, hook: str) -> None:
    if not getattr(module, "_weights_removed", False):
        _call_if_there(module, hook)


def _call_if_there(owner: Any, name: str) -> None:
    hook = getattr(owner, name, None)
    if hook is not None:
        hook()


def _library_extension() -> Any:
    try:
        return importlib.import_module("tensorrt_llm.llmapi.rlhf_utils").WorkerExtension
    except ImportError:
        return None


def _read(bucket: Bucket) -> mmap.mmap:
    """Map the file. Raises `ValueError` for another content."""
    with Path(bucket["path"]).open("rb") as file:
        # Copied on write, so that torch may view it; nothing writes.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    digest = xxh3_64_hexdigest(data)
    if (len(data), digest) != (bucket["bytes"], bucket["digest"]):
        raise ValueError(
            f"{bucket['path']} has {len(data)} bytes with digest {digest}, not {bucket['bytes']} "
            f"with {bucket['digest']}"
        )
    return data


def _tensors(data: mmap.mmap, layout: Sequence[Sequence[Any]], device_id: int) -> dict[str, Any]:
    import torch

    device = torch.device("cuda", device_id) if torch.cuda.is_available() else torch.device("cpu")
    found = {}
    for name, dtype, shape, offset, size in layout:
        if not size:
            found[name] = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)
            continue
        flat = torch.frombuffer(data, dtype=torch.uint8, offset=offset, count=size)
        # A copy: the file ends with the bucket.
        found[name] = flat.view(getattr(torch, dtype)).view(tuple(shape)).to(device, copy=True)
    return found


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _release_buckets() -> None:
    """Give the GPU memory of the buckets back, which torch would keep for itself."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
