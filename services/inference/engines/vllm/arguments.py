"""vLLM's arguments from the options of a worker, and the environment of its process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from math import lcm
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from forge.core.errors import ConfigError
from services.inference.engine_settings import VllmSettings
from services.inference.engines.base import ModelLimits
from services.inference.engines.capabilities import Role
from services.inference.engines.provider import EngineOptions
from services.inference.engines.vllm.exchange import names
from services.inference.engines.vllm.hand_off import require_nixl, transfer_config
from services.inference.engines.vllm.models import (
    architecture_of,
    has_delta_nets,
    has_latent_attention,
    served_dtype,
)

MOST_TOP_LOGPROBS = 20
_LEAST_PASS_TOKENS = 2048
_WEIGHTLESS_DRAFTS = ("ngram", "suffix", "custom_class")
_CPU_BLOCK_TOKENS = 32
_DEVICES = ("tensor_parallel_size", "pipeline_parallel_size")
_ENVIRONMENT = {
    # The machine belongs to the worker's settings: no pinning to cores that others use, too.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Where `engine_output` looks for errors.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    # A fork of this process would have gRPC's threads without their work.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Sends nothing to another host.
    "VLLM_NO_USAGE_STATS": "1",
    # The answers' logits are changed in its first model runner, see `answer_logits`.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def prepare_environment(options: EngineOptions) -> None:
    """Set what vLLM reads from the environment; a variable that is set stays."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    if _is_eager_on_cpu(options):
        # vLLM's sampler has two small functions that torch would compile all the same, at the first
        # request of each process; without a C++ compiler the process would end.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def _is_eager_on_cpu(options: EngineOptions) -> bool:
    return options.device == "cpu" and options.extra.get("enforce_eager", True) is True


def block_size(options: EngineOptions) -> int:
    """Return the tokens of a block: a whole number of the router's, of a size that vLLM has."""
    return lcm(options.block_tokens, _CPU_BLOCK_TOKENS if options.device == "cpu" else 16)


def settings_of(options: EngineOptions) -> VllmSettings:
    """Return the settings of the table vllm."""
    found = options.settings
    return found if isinstance(found, VllmSettings) else VllmSettings()


def _check_hand_offs(options: EngineOptions) -> None:
    """Raises ConfigError for options that the roles prefill and decode cannot have."""
    if drafts(options):
        raise ConfigError(
            "vllm.draft_tokens, or speculative_config among engine_options: the engine vllm drafts "
            "in the role both alone; leave it out"
        )
    if settings_of(options).hand_off == "nixl":
        require_nixl()
    if settings_of(options).hand_off == "copy" and not is_one_device(options):
        raise ConfigError(
            "vllm.hand_off = 'copy' moves the keys and values of one device; use 'nixl' for more"
        )


def _transfer(options: EngineOptions, role: Role) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**transfer_config(settings_of(options).hand_off, role=role))


def drafts(options: EngineOptions) -> bool:
    """Whether vLLM drafts tokens: its logits processors are then off."""
    by_heads = settings_of(options).draft_tokens > 0
    return by_heads or options.extra.get("speculative_config") is not None


def _check_drafts(options: EngineOptions) -> None:
    """Raises ConfigError for drafts by weights: a publication has none for vLLM's drafters."""
    chosen = options.extra.get("speculative_config")
    method = chosen.get("method", "a draft model") if isinstance(chosen, dict) else chosen
    if chosen is not None and method not in _WEIGHTLESS_DRAFTS:
        raise ConfigError(
            f"engine_options.speculative_config drafts by {method}: its weights come with no "
            f"publication; the engine vllm drafts by {', '.join(_WEIGHTLESS_DRAFTS)}, or with "
            "vllm.draft_tokens by the draft heads among the weights"
        )


def _draft_arguments(options: EngineOptions) -> dict[str, Any]:
    count = settings_of(options).draft_tokens
    if not count:
        return {}
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": names.DRAFT_HEADS,
            "num_speculative_tokens": count,
            **_unpadded(options, count),
        }
    }


def _unpadded(options: EngineOptions, count: object) -> dict[str, Any]:
    """A schedule of as many drafts for any number of requests. Without a schedule vLLM gives a
    request that has all but one token in the prefix cache drafts of the token -1. The request's
    seed then gives other tokens, and a kernel for CPUs takes a probability beside its row."""
    return {"num_speculative_tokens_per_batch_size": [(1, options.max_running, count)]}


def records_experts(options: EngineOptions, role: Role) -> bool:
    """Whether the experts of a model that has some can be recorded: with each layer called by
    Python, on one device, and with keys and values that it has computed itself."""
    alone = role == "both" and is_one_device(options)
    return _is_eager_on_cpu(options) and alone and not drafts(options)


def is_one_device(options: EngineOptions) -> bool:
    """Whether vLLM computes in one process."""
    return all(options.extra.get(name, 1) == 1 for name in _DEVICES)


def caches_prefixes(options: EngineOptions) -> bool:
    """Whether vLLM has a prefix cache. On a CPU latent attention has none, and for recurrent layers
    it needs prompts in several passes."""
    config = AutoConfig.from_pretrained(options.model_path).get_text_config()
    lacks = has_delta_nets(config) or has_latent_attention(config)
    return options.device != "cpu" or not lacks


def _overrides(options: EngineOptions) -> dict[str, Any]:
    """Return changes of config.json."""
    config = AutoConfig.from_pretrained(options.model_path)
    narrow_head = options.extra.get("quantization") or hasattr(config, "quantization_config")
    # What transformers computes for any DeepSeek V3; vLLM reads it from fields that a config
    # which transformers writes may lack.
    routes = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return {
        **(routes if config.model_type == "deepseek_v3" else {}),
        "architectures": [architecture_of(options.model_path)],
        # The trainer's head computes in float32. Logits in 16 bits have steps of 1/8 above 16.
        # vLLM refuses another type for a quantized head.
        **({} if narrow_head else {"head_dtype": "float32"}),
    }


def engine_arguments(
    options: EngineOptions, limits: ModelLimits, *, role: Role, events: Any
) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs`. Raises ConfigError for options it cannot have.

    `events`: where vLLM publishes its cache events.
    """
    _check_options(options, role)
    ours = (
        _model_arguments(options)
        | _pass_arguments(options, limits)
        | _cache_arguments(options, role=role, events=events)
        | _sampling_arguments(options)
        | _draft_arguments(options)
        | _weight_arguments()
        | {"disable_log_stats": True}
    )
    _check_extra(options, ours)
    return _defaults(options) | _extra(options) | ours


def _extra(options: EngineOptions) -> dict[str, Any]:
    """Return engine_options, with drafts as `_unpadded` has them."""
    extra = dict(options.extra)
    chosen = extra.get("speculative_config")
    if isinstance(chosen, dict) and "num_speculative_tokens" in chosen:
        count = chosen["num_speculative_tokens"]
        extra["speculative_config"] = _unpadded(options, count) | chosen
    return extra


def _check_options(options: EngineOptions, role: Role) -> None:
    """Raises ConfigError for options that the engine lacks."""
    if options.kv_store is not None:
        raise ConfigError("kv.store_dir: the engine vllm shares no keys and values; leave it empty")
    _check_drafts(options)
    replicas = options.extra.get("data_parallel_size", 1)
    if replicas != 1:
        raise ConfigError(
            f"engine_options.data_parallel_size = {replicas}: a worker is one replica of the "
            "model; leave it out and start more workers"
        )
    hosts = options.extra.get("nnodes", 1)
    if hosts != 1:
        raise ConfigError(
            f"engine_options.nnodes = {hosts}: the weights come in memory of the worker's host; "
            "leave it out and start a worker on each host"
        )
    if options.extra.get("enable_return_routed_experts"):
        raise ConfigError(
            "engine_options.enable_return_routed_experts: vLLM records experts in its second model "
            "runner, which needs a GPU and has another sampler than this engine; leave it out: on "
            "a CPU the engine records them itself, on a GPU replay those of engine = 'embedded'"
        )
    if role != "both":
        _check_hand_offs(options)


def _model_arguments(options: EngineOptions) -> dict[str, Any]:
    has_tokenizer = (Path(options.model_path) / "tokenizer.json").is_file()
    return {
        "model": options.model_path,
        "dtype": served_dtype(options.model_path, options.dtype, device=options.device),
        "hf_overrides": _overrides(options),
        "skip_tokenizer_init": not has_tokenizer,
        "generation_config": "vllm",
    }


def _pass_arguments(options: EngineOptions, limits: ModelLimits) -> dict[str, Any]:
    """Sizes of requests, of the batch, and of a pass."""
    found: dict[str, Any] = {
        "max_model_len": limits.context_tokens,
        "max_num_seqs": options.max_running,
    }
    if options.device == "cpu":
        # A prompt in several passes, with a seed, ends vLLM's process: a generator on a CPU cannot
        # take back the draw of a pass that samples nothing.
        found["enable_chunked_prefill"] = False
        found["max_num_batched_tokens"] = max(
            limits.context_tokens, options.max_running, _LEAST_PASS_TOKENS
        )
    elif options.pass_tokens:
        found["max_num_batched_tokens"] = max(options.pass_tokens, options.max_running)
    return found


def _cache_arguments(options: EngineOptions, *, role: Role, events: Any) -> dict[str, Any]:
    return {
        "kv_cache_memory_bytes": options.kv_bytes + options.cache_bytes,
        "block_size": block_size(options),
        "kv_events_config": events,
        "kv_transfer_config": None if role == "both" else _transfer(options, role),
        "enable_prefix_caching": caches_prefixes(options),
    }


def _sampling_arguments(options: EngineOptions) -> dict[str, Any]:
    return {
        "logprobs_mode": "processed_logprobs",
        # One more has the log-prob in the model's own distribution.
        "max_logprobs": MOST_TOP_LOGPROBS + 1,
        "structured_outputs_config": {"backend": "guidance"},
        **({} if drafts(options) else {"logits_processors": [names.ANSWER_LOGITS]}),
    }


def _weight_arguments() -> dict[str, Any]:
    from vllm.config import WeightTransferConfig

    return {
        # The first weights come as all others do.
        "load_format": "dummy",
        "weight_transfer_config": WeightTransferConfig(backend=names.WEIGHT_BACKEND),
        "worker_extension_cls": names.WORKER_EXTENSION,
    }


def _defaults(options: EngineOptions) -> dict[str, Any]:
    """Return the arguments that engine_options may replace."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    if options.device != "cpu":
        return {}
    # Compilation takes a minute or more, which pays on a GPU alone. By its name, this executor
    # would be replaced by one with another process, for a pinning that is off here.
    found = {"enforce_eager": True, "distributed_executor_backend": UniProcExecutor}
    config = AutoConfig.from_pretrained(options.model_path).get_text_config()
    if has_latent_attention(config):
        # The kernel for processors with AMX has no float32, and frees weights that a reload needs.
        found["attention_config"] = {"backend": "CPU_MLA"}
    return found


def _check_extra(options: EngineOptions, ours: Mapping[str, Any]) -> None:
    """Raises ConfigError for engine_options that vLLM lacks or that `ours` has."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in fields(AsyncEngineArgs)}
    for name in options.extra:
        if name in ours or name not in known:
            what = "set by other settings" if name in ours else "no argument of this vLLM"
            raise ConfigError(f"engine_options has {name!r}: {what}")
