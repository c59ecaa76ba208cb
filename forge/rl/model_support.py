"""What a transformers model computes, as far as merging prefixes is concerned.

Owns reading it off a configuration. `TreePolicy.check` compares what is left to chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MERGED_LAYERS = ("full_attention", "sliding_attention")
"""Layer types whose outputs depend on a token's ancestors alone, by their positions."""
LENGTH_ROTARY = ("dynamic", "longrope")
"""Rotary embeddings that differ with the length of the whole sequence, not only with position."""


def attention_channels(config: Any) -> int:
    """Query heads times head size of a transformers configuration."""
    text = config.get_text_config()
    heads: int = getattr(text, "num_attention_heads", None) or 1
    size: int = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads * size


def pair_cost(channels: int) -> float:
    """What one query-key pair costs, relative to a token's work outside of attention.

    Per layer 4 operations per channel and pair, against 2 per weight; a layer of width h has about
    12 h^2 weights, and its heads are about as wide as it is.
    """
    return 1.0 / (6 * channels)


def prefix_cost(config: Any) -> float:
    """What a token of a pass's prefix takes of memory, of what one of its own does.

    Per layer its key and its value, against what autograd holds of a token between the layer's
    input and its output: six times its width, five times that of queries and of keys, seven times
    that of the feed-forward layer.
    """
    text = config.get_text_config()
    queries = attention_channels(config)
    heads = getattr(text, "num_attention_heads", None) or 1
    keys = queries * (getattr(text, "num_key_value_heads", None) or heads) // heads
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return 2 * keys / layer_elements(text.hidden_size, inner, queries=queries, keys=keys)


def layer_elements(width: int, inner: int, *, queries: int, keys: int) -> int:
    """Of one token, held in one layer while it is differentiated; its input is apart."""
    return 6 * width + 5 * queries + 5 * keys + 7 * inner


def logit_scale(config: Any) -> float:
    """Granite divides its logits, Cohere multiplies them."""
    scale: float = getattr(config, "logit_scale", None) or (
        1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    )
    return scale


def unmergeable(model: Any) -> str:
    """Why a token's state is more than a function of its ancestors' keys and values; "" if not."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    others = sorted(map(str, layers.difference(MERGED_LAYERS)))
    if others:
        return f"layer types {', '.join(others)}"
    if getattr(model, "_is_stateful", False):
        return "its layers carry a state from token to token"
    lengths = sorted(
        set(_rotary_types(getattr(config, "rope_parameters", None))) & {*LENGTH_ROTARY}
    )
    if lengths:
        return f"rotary embeddings of type {', '.join(lengths)}"
    return ""


def _rotary_types(parameters: Any) -> Iterator[str]:
    """Of all layers; some models have parameters per layer type."""
    if not isinstance(parameters, dict):
        return
    kind = parameters.get("rope_type")
    if isinstance(kind, str):
        yield kind
    for nested in parameters.values():
        yield from _rotary_types(nested)
