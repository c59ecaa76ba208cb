"""Settings tables of single engines, each named as its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtLlmSettings:
    """TensorRT-LLM on NVIDIA GPUs."""

    tensor_parallel: Annotated[int, Meta(ge=1, le=1024)] = 1
    """GPUs that share each layer."""
    pipeline_parallel: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Groups of layers, each on GPUs of its own."""
    expert_parallel: Annotated[int, Meta(ge=0, le=1024)] = 0
    """GPUs that share the experts of a mixture of experts; 0: the library's choice."""
    gpu_memory_share: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    """Share of the GPU memory that the weights leave free, for keys and values."""
    kv_dtype: Literal["auto", "fp8", "nvfp4"] = "auto"
    """Type of keys and values; auto: that of the checkpoint. The type of the weights is the
    checkpoint's."""
    host_cache_mib: Annotated[int, Meta(ge=0)] = 0
    """Host memory for cached keys and values evicted from the GPU, MiB."""
    cached_tokens: Annotated[int, Meta(ge=0)] = 1_000_000
    """Tokens that routers expect in the prefix cache; the library chooses its size by itself."""
    cache_events: Annotated[int, Meta(ge=0)] = 65_536
    """Most cache events that wait for the worker; 0: no events, and routers estimate the cached
    blocks."""
    transceiver: Literal["NIXL", "UCX", "MOONCAKE"] = "NIXL"
    """Transport of keys and values from prefill to decode, in the roles prefill and decode, and in
    both with take_hand_offs."""
    take_hand_offs: bool = False
    """Role both: sample prompts of prefill workers, too. The engine then has a transceiver, whose
    buffer of transfer_tokens takes GPU memory. false: it computes each prompt itself."""
    transfer_tokens: Annotated[int, Meta(ge=0)] = 0
    """Tokens that fit the transfer buffer, at least the longest prompt; 0: the longest context."""
    cuda_graphs: bool = True
    """Run decode steps as CUDA graphs."""
    mtp_layers: Annotated[int, Meta(ge=0, le=8)] = 0
    """Number of the checkpoint's own MTP layers that draft tokens; 0: none. The engine does not
    serve Forge's draft heads."""
    update_bucket_mib: Annotated[int, Meta(ge=1)] = 1024
    """Weights that one step of an update copies to each GPU at once, MiB; a larger tensor is a step
    of its own."""
    update_dir: str = "/dev/shm"
    """Directory for the weights of an update, which all ranks see, with room for two buckets."""
    update_timeout_s: Annotated[float, Meta(ge=1, le=86_400)] = 600.0
    """Longest time of a weight update in the engine; then the engine restarts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """vLLM."""

    hand_off: Literal["copy", "nixl"] = "copy"
    """Way of keys and values from prefill to decode: copy (through the workers), or nixl (from GPU
    to GPU, by vLLM's NixlConnector; needs the package nixl)."""
    draft_tokens: Annotated[int, Meta(ge=0, le=8)] = 0
    """Most tokens that the draft heads among the weights draft for one step, in the role both; 0:
    none. With drafts vLLM lacks min_p, logit_bias, the log-probs in the model's own distribution,
    and the continuation of grammars and penalties."""
    silence_s: Annotated[float, Meta(ge=1, le=86_400)] = 300.0
    """Longest silence during requests and updates of the weights: no token, no answer of vLLM's
    scheduler, which answers between two steps, and (on a CPU, and during updates) no CPU time of
    its processes. Then the worker kills vLLM's process and ends. On a GPU it must be longer than
    the longest step. Work that gives no sign but CPU time has request_timeout_s."""
