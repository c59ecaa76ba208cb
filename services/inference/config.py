"""Settings of a router, prefill or decode instance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from forge.core.errors import InvalidArgument
from forge.runtime.serving_groups import check_group, kind_in
from forge.runtime.settings import ServiceConfig
from forge.runtime.settings.agreed import agreed_model, agreed_settings
from forge.runtime.settings.bulk_settings import BulkSettings
from forge.runtime.settings.weight_group_settings import WeightGroupSettings
from services.inference.engine_settings import TensorRtLlmSettings, VllmSettings

_ENGINES_ON_FIRST_GPUS = ("tensorrt_llm", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Requests that wait in the router."""

    queue_limit: Annotated[int, Meta(ge=1)] = 4096
    """Most requests that wait; the router refuses more."""
    worker_wait_s: Annotated[float, Meta(ge=0, le=3600)] = 300.0
    """Longest time that a request waits while no worker serves: long enough for a worker to start
    again. Keep it below the callers' deadlines of one call."""
    version_wait_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    """Longest wait of an answer for a worker with the weights of its newest token, or newer ones,
    from the moment at which the first worker had them; then a worker with older weights continues
    it. Keep it below worker_wait_s."""
    hold_s: Annotated[float, Meta(ge=1, le=3600)] = 60.0
    """Time for which prefill holds a prompt until decode fetches it."""
    local_prefill_tokens: Annotated[int, Meta(ge=0)] = 512
    """Most uncached tokens of a prompt that a worker of the role both computes itself; a prefill
    worker computes a prompt with more. Without prefill workers the role both computes every
    prompt."""
    early_hand_off_tokens: Annotated[int, Meta(ge=0)] = 1024
    """Least number of uncached tokens of a prompt for an early hand-off: decode fetches its keys
    and values while prefill computes them. 0: no early hand-offs."""
    canary_engine: str = ""
    """Engine under trial beside others in the group: it gets canary_share of the sessions, and no
    more while other engines are available. Empty: none."""
    canary_share: Annotated[float, Meta(ge=0, le=1)] = 0.05
    """Share of the sessions for workers with canary_engine."""
    stream_interval_s: Annotated[float, Meta(ge=0, le=5)] = 0.05
    """Longest time for which the router collects the pieces of a streamed answer before it sends
    them together. It sends the first piece at once. 0: each piece at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSettings:
    """Memory of a worker for keys and values."""

    mib: Annotated[int, Meta(ge=1)] = 2048
    """Memory for running sequences with their shared prefixes (decode) or held prompts (prefill),
    MiB; the role both gives a quarter to held prompts. Decode takes up to an eighth more for
    waiting prompts."""
    cache_mib: Annotated[int, Meta(ge=0)] = 512
    """Memory for the prefix cache, MiB."""
    block_tokens: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens of one block of the prefix cache."""
    on_update: Literal["keep", "recompute"] = "keep"
    """Keys and values of running answers when the weights change: keep (the answer continues with
    those of the older weights) or recompute (the new weights compute prompt and answer again).
    Either empties the prefix cache. recompute needs an engine with the capability recomputes."""
    store_dir: str = ""
    """Directory on a shared file system through which the workers of a model share keys and values
    (KV store); empty: none. Only the workers' user may have write access."""
    store_mib: Annotated[int, Meta(ge=1)] = 10_240
    """Largest size of store_dir over all workers, MiB; above it the least recently read blocks are
    evicted."""
    store_host_mib: Annotated[int, Meta(ge=0)] = 0
    """Memory of this worker for blocks of store_dir, MiB."""
    store_block_tokens: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Tokens of one file in store_dir; workers share only files of the same number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """Drafts by the draft heads among the weights (the trainer's mtp table)."""

    most_drafts: Annotated[int, Meta(ge=0, le=8)] = 4
    """Most tokens that decode drafts per step; 0: none, and the worker loads no draft heads."""
    adaptive: bool = True
    """Choose the number of drafts by measured acceptance and speed, possibly 0; false: always one
    per head, up to most_drafts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceConfig(ServiceConfig):
    """Samples from the policy: a router, or one of the workers behind it."""

    role: Literal["router", "prefill", "decode", "both"] = "router"
    """Role of this process; both: a worker that computes prompts and samples."""
    model_path: str = ""
    """Directory with the model's config.json; for frozen weights also with its safetensors."""
    serving_group: str = ""
    """Name of the serving group, whose routers and workers serve another model than the policy; the
    gateway's table models has the same name. Empty: the policy."""
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    """Longest context, prompt and answer; 0: the model's own limit."""
    request_timeout_s: Annotated[float, Meta(ge=1, le=86_400)] = 3600.0
    """Deadline of one request."""
    router: RouterSettings = field(default_factory=RouterSettings)

    # Workers alone.
    engine: str = "embedded"
    """Engine that runs the model: embedded, tensorrt_llm, vllm, or one of an installed package."""
    engine_options: str = ""
    """JSON object with options of this engine alone, e.g. {"tensor_parallel_size": 2} for vllm."""
    dtype: Literal["auto", "device", "float32", "bfloat16", "float16"] = "auto"
    """Type of the model's weights; auto: the type in its config.json, or float32 on a device
    without bfloat16; device: bfloat16 where the device has it, else float32, as the trainer's
    autocast = auto."""
    device: str = "cpu"
    """Torch device, e.g. cpu or cuda:0. The engines tensorrt_llm and vllm take the first GPUs that
    CUDA_VISIBLE_DEVICES names, and refuse another index."""
    torch_threads: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Threads of torch."""
    weights: Literal["follow", "frozen"] = "follow"
    """Weights to serve: follow (the newest of the policy), frozen (those in model_path; only in a
    serving group)."""
    policy: str = "default"
    """Policy to serve; etcd has its newest weights at weights/<policy>/latest."""
    weight_silence_s: Annotated[float, Meta(ge=0.1, le=3600)] = 15.0
    """Longest silence in a weight fetch; then the worker tries the next source."""
    probe_error: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Largest mean error, in nats, of the log-probs that a publication has for the check of its
    weights, published or served in 16 bits; above it they are refused. 0: the engine's limit."""
    probe_exact_error: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """The same where nothing is rounded: weights published and served in float32, and the second
    pass, in float32 over the values in 16 bits. 0: the limit of each."""
    weights_dir: str = ""
    """Directory on any mounted file system where the trainer with the same setting stores each
    version; empty: none. The worker fetches a missing version over gRPC."""
    bulk: BulkSettings = field(default_factory=BulkSettings)
    weight_group: WeightGroupSettings = field(default_factory=WeightGroupSettings)
    max_running: Annotated[int, Meta(ge=1, le=65_536)] = 128
    """decode and both: most requests that sample at the same time."""
    pass_tokens: Annotated[int, Meta(ge=0)] = 0
    """prefill and both: most tokens of one forward pass; 0: 512 on a CPU, 16384 (prefill) or 4096
    (both) on a GPU."""
    kv: KvSettings = field(default_factory=KvSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    tensorrt_llm: TensorRtLlmSettings = field(default_factory=TensorRtLlmSettings)
    vllm: VllmSettings = field(default_factory=VllmSettings)

    def validate(self) -> None:
        """Raises `InvalidArgument` for a malformed group or engine options, and for frozen
        weights in the policy's group."""
        check_group("serving_group", self.serving_group)
        self.options_of_engine()
        # Known before it starts, which takes minutes. Other engines declare it (`recomputes`).
        if self.kv.on_update == "recompute" and self.engine == "tensorrt_llm":
            raise InvalidArgument(
                "kv.on_update = recompute is not allowed with engine = tensorrt_llm: it has its "
                "own rule for running answers"
            )
        self._check_device()
        if self.weight_group.backend != "off":
            # It imports gRPC, which `--help` does without.
            from forge.runtime.weights.group_process import require_private

            require_private(self.weight_group, self)
        if self.weights == "frozen" and not self.serving_group:
            raise InvalidArgument(
                "weights = 'frozen' needs a serving_group: the policy's workers follow its weights"
            )

    def _check_device(self) -> None:
        kind, _, index = self.device.partition(":")
        if self.engine in _ENGINES_ON_FIRST_GPUS and index not in ("", "0"):
            raise InvalidArgument(
                f"device = {self.device!r} is not allowed with engine = {self.engine}, which takes "
                f"the first visible GPUs: set device = {kind!r}, and CUDA_VISIBLE_DEVICES to the "
                "GPUs of this worker"
            )

    def options_of_engine(self) -> dict[str, object]:
        """Return `engine_options`. Raises `InvalidArgument` for no JSON object."""
        try:
            found = json.loads(self.engine_options or "{}")
        except ValueError as error:
            raise InvalidArgument(f"engine_options = {self.engine_options!r}: {error}") from None
        if not isinstance(found, dict):
            raise InvalidArgument(f"engine_options = {self.engine_options!r}: no JSON object")
        return found

    def agreed(self) -> Mapping[str, str]:
        """Return the settings that the workers of a serving group must share, because any of them
        may serve any request."""
        group = self.serving_group
        model = agreed_model(self.model_path, scope=group)
        if self.role == "router":
            return model
        scope = kind_in(group, "inference")
        workers = agreed_settings(scope, self, "context_tokens", "dtype", "weights")
        return model | workers | {f"{group}/policy": self.policy}
