"""What a transformers model computes, as far as merging prefixes is concerned.

Owns reading it off a configuration. `forge.rl.model.probe` compares what is left to chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MERGED_LAYERS = ("full_attention", "sliding_attention")
"""Layer types whose outputs depend on a token's ancestors alone, by their positions."""
LENGTH_ROTARY = ("dynamic", "longrope")
"""Rotary embeddings that differ with the length of the whole sequence, not only with position."""


def _number(config: Any, name: str) -> int:
    """An attribute that is one number; 0 where there is none, or where layers differ in it."""
    try:
        value = getattr(config, name, None)
    except Exception:  # of whatever kind: an error where layers have values of their own
        value = vars(config).get(name)
    if isinstance(value, (list, tuple)) and value:
        value = max(value)
    return value if isinstance(value, int) else 0


def attention_channels(config: Any) -> int:
    """Query heads times head size of a transformers configuration."""
    text = config.get_text_config(decoder=True)
    heads = _number(text, "num_attention_heads") or 1
    size = _number(text, "head_dim") or _number(text, "hidden_size") // heads
    return heads * max(1, size)


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
    text = config.get_text_config(decoder=True)
    queries = attention_channels(config)
    heads = _number(text, "num_attention_heads") or 1
    keys = queries * (_number(text, "num_key_value_heads") or heads) // heads
    width = _number(text, "hidden_size") or queries
    inner = _number(text, "intermediate_size") or 4 * width
    return 2 * keys / layer_elements(width, inner, queries=queries, keys=keys)


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
    config = model.config.get_text_config(decoder=True)
    layers = set(getattr(config, "layer_types", None) or ())
    others = sorted(map(str, layers.difference(MERGED_LAYERS)))
    if others:
        return f"layer types {', '.join(others)}"
    if getattr(model, "_is_stateful", False):
        return "its layers carry a state from token to token"
    lengths = _length_rotary(config)
    return f"rotary embeddings of type {', '.join(lengths)}" if lengths else ""


def depends_on_length(model: Any) -> bool:
    """Whether the configuration says that states differ with the length of the sequence."""
    return bool(_length_rotary(model.config.get_text_config(decoder=True)))


def _length_rotary(config: Any) -> list[str]:
    return sorted(set(_rotary_types(getattr(config, "rope_parameters", None))) & {*LENGTH_ROTARY})


def forget_lengths(model: Any) -> None:
    """Make the next pass independent of how long the sequences before it were.

    Dynamic rotary embeddings of transformers keep the frequencies of the longest sequence seen.
    """
    for module in model.modules():
        for name in [one for one in vars(module) if one.endswith("max_seq_len_cached")]:
            prefix = name.removesuffix("max_seq_len_cached")
            original = getattr(module, f"{prefix}original_inv_freq", None)
            current = getattr(module, f"{prefix}inv_freq", None)
            if original is not None and current is not None:
                setattr(module, f"{prefix}inv_freq", original.to(current.device))
                setattr(module, name, getattr(module, "original_max_seq_len", 0))


def _rotary_types(parameters: Any) -> Iterator[str]:
    """Of all layers; some models have parameters per layer type."""
    if not isinstance(parameters, dict):
        return
    kind = parameters.get("rope_type")
    if isinstance(kind, str):
        yield kind
    for nested in parameters.values():
        yield from _rotary_types(nested)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a model's trees are computed."""

    unmerged: str = ""
    """Why sequence by sequence; "" if merged."""
    separate: bool = False
    """Each sample is computed alone, rather than as the beginning of a longer one."""


def told(error: BaseException) -> str:
    """One short line."""
    (line, *_) = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {line[:160]}" if line else type(error).__name__
