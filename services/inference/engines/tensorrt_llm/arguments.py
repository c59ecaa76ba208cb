"""Arguments of the library's engine, from the settings of a worker."""

from __future__ import annotations

from enum import Enum
from typing import Any

from forge.core.errors import ConfigError
from services.inference.engine_settings import TensorRtLlmSettings
from services.inference.engines.base import ModelLimits
from services.inference.engines.provider import EngineOptions
from services.inference.engines.tensorrt_llm.library.library import Library
from services.inference.engines.tensorrt_llm.library.surface import TARGET, Feature

EXTENSION = "services.inference.engines.tensorrt_llm.weights.worker_extension.WorkerExtension"
_PASS_TOKENS = 8192
_MIB = 1 << 20


class Role(Enum):
    """Work of the engine."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


def transfers(role: Role, settings: TensorRtLlmSettings) -> bool:
    """Whether keys and values come from or go to another engine, through a transceiver."""
    return role is not Role.BOTH or settings.take_hand_offs


def engine_arguments(
    library: Library,
    options: EngineOptions,
    settings: TensorRtLlmSettings,
    *,
    role: Role,
    limits: ModelLimits,
) -> dict[str, Any]:
    """Return the keywords of AsyncLLM. Raises `ConfigError` for what this version lacks."""
    _check(library, options, settings, role)
    arguments: dict[str, Any] = {
        "model": options.model_path,
        "backend": "pytorch",
        "max_batch_size": options.max_running,
        "max_num_tokens": options.pass_tokens or _PASS_TOKENS,
        "max_seq_len": limits.context_tokens,
        # The library's default of 1024 refuses longer prompts.
        "max_input_len": limits.context_tokens,
        "enable_chunked_prefill": True,
        "kv_cache_config": _kv_cache(library, options, settings),
        "enable_iter_perf_stats": True,
        "ray_worker_extension_cls": EXTENSION,
    }
    if options.dtype != "auto":
        arguments["dtype"] = options.dtype
    return (
        arguments
        | _devices(settings)
        | _decode_arguments(library, options, settings)
        | _role_arguments(library, settings, role=role, limits=limits)
    )


def _devices(settings: TensorRtLlmSettings) -> dict[str, Any]:
    found = {"tensor_parallel_size": settings.tensor_parallel}
    if settings.pipeline_parallel > 1:
        found["pipeline_parallel_size"] = settings.pipeline_parallel
    if settings.expert_parallel:
        found["moe_expert_parallel_size"] = settings.expert_parallel
    return found


def _decode_arguments(
    library: Library, options: EngineOptions, settings: TensorRtLlmSettings
) -> dict[str, Any]:
    """CUDA graphs and drafts."""
    found: dict[str, Any] = {}
    if settings.cuda_graphs and Feature.CUDA_GRAPHS in library.features:
        graphs = library.arguments.CudaGraphConfig
        found["cuda_graph_config"] = graphs(max_batch_size=options.max_running)
    if settings.mtp_layers:
        found["speculative_config"] = library.arguments.MTPDecodingConfig(
            max_draft_len=settings.mtp_layers, use_rejection_sampling=True
        )
    return found


def _role_arguments(
    library: Library, settings: TensorRtLlmSettings, *, role: Role, limits: ModelLimits
) -> dict[str, Any]:
    """Arguments of an engine that hands over or takes prompts."""
    found: dict[str, Any] = {}
    if transfers(role, settings):
        found["cache_transceiver_config"] = library.arguments.CacheTransceiverConfig(
            backend=settings.transceiver,
            max_tokens_in_buffer=settings.transfer_tokens or limits.context_tokens,
        )
    if role is Role.PREFILL:
        found["disable_overlap_scheduler"] = True
    return found


def _kv_cache(library: Library, options: EngineOptions, settings: TensorRtLlmSettings) -> Any:
    return library.arguments.KvCacheConfig(
        enable_block_reuse=True,
        free_gpu_memory_fraction=settings.gpu_memory_share,
        host_cache_size=settings.host_cache_mib * _MIB or None,
        event_buffer_max_size=settings.cache_events,
        tokens_per_block=options.block_tokens,
        dtype=settings.kv_dtype,
    )


def _check(
    library: Library, options: EngineOptions, settings: TensorRtLlmSettings, role: Role
) -> None:
    if options.device not in ("cuda", "cuda:0"):
        raise ConfigError(
            f"device = {options.device!r}: engine 'tensorrt_llm' runs on the first visible NVIDIA "
            "GPUs; set device = 'cuda', and choose the GPUs by CUDA_VISIBLE_DEVICES"
        )
    if options.extra:
        raise ConfigError(
            f"engine_options = {dict(options.extra)}: engine 'tensorrt_llm' has none; its settings "
            "are in the table tensorrt_llm"
        )
    if options.kv_store is not None:
        raise ConfigError("kv.store_dir: engine 'tensorrt_llm' shares no keys and values by files")
    if transfers(role, settings):
        both = role is Role.BOTH
        setting = "tensorrt_llm.take_hand_offs = true" if both else f"role = {role.value!r}"
        _demand(library, Feature.DISAGGREGATION, setting)
    if settings.mtp_layers:
        _demand(library, Feature.REJECTION_SAMPLING, "tensorrt_llm.mtp_layers")
        _demand(library, Feature.SEEDS, "tensorrt_llm.mtp_layers")
    if settings.cuda_graphs and Feature.CUDA_GRAPHS in library.features:
        _demand(library, Feature.CUDA_GRAPH_UPDATES, "tensorrt_llm.cuda_graphs = true")
    if transfers(role, settings) and 0 < settings.transfer_tokens < options.context_tokens:
        raise ConfigError(
            f"tensorrt_llm.transfer_tokens = {settings.transfer_tokens}: prompts have up to "
            f"context_tokens = {options.context_tokens}"
        )


def _demand(library: Library, feature: Feature, setting: str) -> None:
    if feature not in library.features:
        lacks = ", ".join(library.surface.missing(feature))
        raise ConfigError(
            f"{setting} needs tensorrt_llm {TARGET} or newer: the surface "
            f"{library.surface.version} lacks {lacks}"
        )
