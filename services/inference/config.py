"""Settings of a router, prefill or decode instance."""

from __future__ import annotations

from dataclasses import dataclass

from forge.runtime.config import ServiceConfig, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceConfig(ServiceConfig):
    """Samples from the policy: a router, or one of the workers behind it."""

    role: str = setting(
        "router", help="what this process is", choices=("router", "prefill", "decode")
    )
    model_path: str = setting("", help="folder with the model's config.json")
    context_tokens: int = setting(
        0, help="prompt and answer together; 0: what the model was made for", minimum=0
    )
    request_timeout_s: float = setting(
        3600.0, help="longest time one request may take", minimum=1, maximum=86_400
    )

    # The router alone.
    queue_limit: int = setting(
        4096, help="requests that may wait in the router; more are refused", minimum=1
    )
    worker_wait_s: float = setting(
        30.0,
        help="how long a request waits for a worker when none is left",
        minimum=0,
        maximum=3600,
    )

    # Workers alone.
    dtype: str = setting(
        "auto",
        help="what the model computes in; auto: what its config says, and float32 for bfloat16 "
        "on a device without it",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = setting("cpu", help="torch device, e.g. cpu or cuda:0")
    torch_threads: int = setting(1, help="threads torch computes with", minimum=1, maximum=1024)
    policy: str = setting("default", help="whose weights to serve: weights/<policy>/latest")
    weight_silence_s: float = setting(
        15.0,
        help="longest silence in the middle of a weight fetch; then the next source is tried",
        minimum=0.1,
        maximum=3600,
    )
    max_running: int = setting(
        128, help="decode: requests sampled at the same time", minimum=1, maximum=65_536
    )
    pass_tokens: int = setting(4096, help="prefill: most tokens of one forward pass", minimum=16)
    block_tokens: int = setting(
        16, help="prefixes are cached in blocks of this many tokens", minimum=1, maximum=1024
    )
    cache_mib: int = setting(512, help="memory for prefixes that may be used again, MiB", minimum=0)
    kv_mib: int = setting(
        2048,
        help="memory for running sequences (decode) or prompts held for one (prefill), MiB",
        minimum=1,
    )
    hold_s: float = setting(
        60.0,
        help="router: how long prefill holds a prompt for decode to fetch",
        minimum=1,
        maximum=3600,
    )
