"""Settings of a router, prefill or decode instance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from forge.runtime.config import ServiceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceConfig(ServiceConfig):
    """Samples from the policy: a router, or one of the workers behind it."""

    role: Literal["router", "prefill", "decode"] = "router"
    """Part that this process has."""
    model_path: str = ""
    """Folder with the model's config.json."""
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    """Prompt and answer together; 0: the model's own limit."""
    request_timeout_s: Annotated[float, Meta(ge=1, le=86_400)] = 3600.0
    """Longest time one request may take."""

    # The router alone.
    queue_limit: Annotated[int, Meta(ge=1)] = 4096
    """Requests that may wait in the router; more are refused."""
    worker_wait_s: Annotated[float, Meta(ge=0, le=3600)] = 30.0
    """How long a request waits for a worker when none is left."""

    # Workers alone.
    engine: str = "embedded"
    """Runs the model: embedded, or an engine of an installed package."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type that the model computes in; auto: that of its config.json, and float32 for bfloat16 on a
    device without it."""
    device: str = "cpu"
    """Torch device, e.g. cpu or cuda:0."""
    torch_threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Threads torch computes with."""
    policy: str = "default"
    """Policy to serve: its weights are at weights/<policy>/latest."""
    weight_silence_s: Annotated[float, Meta(ge=0.1, le=3600)] = 15.0
    """Longest silence in the middle of a weight fetch; then the next source is tried."""
    max_running: Annotated[int, Meta(ge=1, le=65_536)] = 128
    """decode: requests sampled at the same time."""
    pass_tokens: Annotated[int, Meta(ge=16)] = 4096
    """prefill: most tokens of one forward pass."""
    block_tokens: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Prefixes are cached in blocks of this many tokens."""
    cache_mib: Annotated[int, Meta(ge=0)] = 512
    """Memory for prefixes that may be used again, MiB."""
    kv_mib: Annotated[int, Meta(ge=1)] = 2048
    """Memory for running sequences (decode) or prompts held for one (prefill), MiB."""
    hold_s: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    """router: time that prefill holds a prompt for decode to fetch."""
