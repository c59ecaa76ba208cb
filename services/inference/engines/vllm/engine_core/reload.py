"""vLLM's reload of a model layer by layer, with the weights that it would lose.

During a reload the parameters have no data: vLLM keeps what the loader of a parameter gets, until
the layer is complete. A model may copy a weight into a parameter without its loader. Such a copy
has no effect and gives no error: the layer keeps its weights of before. `lost` finds such models.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

Weights = Iterable[tuple[str, torch.Tensor]]
_STACKED = re.compile(r"(.+\.experts)\.((?:gate_up|down)_proj(?:_bias)?)")
_SINKS = ".sinks"
_LAYERWISE_LOG = "vllm.model_executor.model_loader.reload.layerwise"


def begin(model: torch.nn.Module) -> None:
    """Prepare the layers: they are filled beside the served ones and post-processed whole."""
    initialize_layerwise_reload(model)
    if current_platform.is_cpu():
        _renew_kernels(model)


def load(model: Any, weights: Weights) -> None:
    """Load weights of a checkpoint, each through the loader of its parameter."""
    if type(model).__name__ == "GptOssForCausalLM":
        weights = _with_loaders(model, weights)
    model.load_weights(weights)


def finish(model: torch.nn.Module, model_config: Any) -> None:
    """Post-process the loaded weights and serve them."""
    finalize_layerwise_reload(model, model_config)
    if _is_tied(model_config):
        _renew_tied_head(model)


def lost(model: torch.nn.Module, model_config: Any, weights: Weights) -> list[str]:
    """Return the parameters that a reload of `weights` would leave as they are. Call it before the
    first weights: some models copy values of `weights` at once. Quantized models are not examined:
    their checkpoints may lack parameters."""
    if model_config.quantization is not None:
        return []
    initialize_layerwise_reload(model)
    reached: set[str] = set()
    loaders = []
    try:
        for name, parameter in _loaded_parameters(model, model_config):
            loaders.append((name, parameter, parameter.weight_loader))
            parameter.weight_loader = _noting(parameter.weight_loader, name, reached)
        load(model, weights)
    finally:
        # The next reload has the same parameters.
        for _, parameter, loader in loaders:
            parameter.weight_loader = loader
        with _silent(_LAYERWISE_LOG):
            # Without a loaded weight it puts everything back.
            finalize_layerwise_reload(model, model_config)
    return [name for name, *_ in loaders if name not in reached]


def _loaded_parameters(model: torch.nn.Module, model_config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that wait for a checkpoint, by their names in vLLM."""
    for prefix, layer in model.named_modules():
        # Scales of a cache, which a checkpoint may lack; `finish` renews a tied head.
        tied = _is_tied(model_config) and isinstance(layer, ParallelLMHead)
        if tied or is_deferred_attention_layer(layer):
            continue
        for name, parameter in layer.named_parameters(prefix, recurse=False):
            if parameter.is_meta:
                yield name, parameter


def _noting(loader: Any, name: str, reached: set[str]) -> Callable[..., Any]:
    """Return the loader below that of the reload, so that no layer is completed."""
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__

    def note(*args: Any, **kwargs: Any) -> Any:
        reached.add(name)
        return loader(*args, **kwargs)

    return note


@contextmanager
def _silent(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def _is_tied(model_config: Any) -> bool:
    return bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False))


def _renew_kernels(model: torch.nn.Module) -> None:
    """Have experts packed as at the first load. With an existing kernel vLLM leaves out the packing
    for CPUs, and the kernel would read plain matrices as packed ones."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _with_loaders(model: Any, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Load the sinks of gpt-oss, which its `load_weights` copies; yield the other weights, with
    stacked experts one by one: it copies a stack, and gives a single expert to the loader."""
    for name, tensor in weights:
        stacked = _STACKED.fullmatch(name)
        if name.endswith(_SINKS):
            sinks = model.get_parameter(model.hf_to_vllm_mapper.map_name(name))
            first = get_tensor_model_parallel_rank() * len(sinks)
            sinks.weight_loader(sinks, tensor[first : first + len(sinks)])
        elif stacked is not None:
            experts, projection = stacked.groups()
            yield from ((f"{experts}.{n}.{projection}", one) for n, one in enumerate(tensor))
        else:
            yield name, tensor


def _renew_tied_head(model: torch.nn.Module) -> None:
    """Give the head what the embedding has. A checkpoint has a tied weight once, so the reload
    leaves the head as it was, with a packed copy of older weights."""
    embeddings = [one for one in model.modules() if isinstance(one, VocabParallelEmbedding)]
    tables = [one for one in embeddings if not isinstance(one, ParallelLMHead)]
    for head in embeddings:
        if not isinstance(head, ParallelLMHead):
            continue
        table = next(one for one in tables if one.weight.shape == head.weight.shape)
        if head.weight.data_ptr() != table.weight.data_ptr():
            head.weight.data.copy_(table.weight)
        head.quant_method.process_weights_after_loading(head)
