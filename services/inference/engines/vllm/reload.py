"""vLLM's reload of a model layer by layer, with the weights that it would lose.

During a reload the parameters have no data: vLLM keeps what the loader of a parameter gets, until
the layer is complete. A model may copy a weight into a parameter without its loader. Such a copy
has no effect and gives no error: the layer keeps its weights of before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
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
    """Post-process what is loaded and serve it."""
    finalize_layerwise_reload(model, model_config)
    if getattr(model_config.hf_text_config, "tie_word_embeddings", False):
        _renew_tied_head(model)


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
