"""Whether a transformers model allows merged prefixes, according to its configuration.

`forge.rl.model.probe` verifies the answer by computing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from forge.core.errors import InvalidArgument
from forge.rl.model.head_logprobs import Logits

log = logging.getLogger(__name__)

MERGED_LAYERS = ("full_attention", "sliding_attention")
"""Layer types whose outputs depend only on a token's ancestors and their positions."""
FORKED_LAYERS = (
    "attention",
    "conv",
    "hybrid",
    "hybrid_sliding",
    "linear_attention",
    "mamba",
    "mlp",
    "moe",
)
"""Types beside and of recurrent layers (`forge.rl.model.forked_states`)."""
LENGTH_ROTARY = ("dynamic", "longrope")
"""Rotary embeddings that depend on the length of the whole sequence."""
_FACTORS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
"""Settings of factors on logits."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Settings of caps of logits."""


def _number(config: Any, name: str) -> int:
    """A numeric attribute, the largest of a list; 0 without one."""
    try:
        value = getattr(config, name, None)
    except Exception:  # some configurations raise where layers have values of their own
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
    """Cost of one query-key pair, relative to the cost of a token outside of attention.

    A layer does 4 operations per channel and pair, and 2 per weight and token. A layer of width h
    has about 12 h^2 weights, and its heads together are about h wide.
    """
    return 1.0 / (6 * channels)


def prefix_cost(config: Any) -> float:
    """Memory of a prefix token, relative to the memory of a pass's own token.

    Per layer a prefix token takes its key and value. For an own token autograd holds, in multiples
    of widths: six times the layer's, five times those of queries and keys, seven times the
    feed-forward layer's.
    """
    text = config.get_text_config(decoder=True)
    queries = attention_channels(config)
    heads = _number(text, "num_attention_heads") or 1
    keys = queries * (_number(text, "num_key_value_heads") or heads) // heads
    width = _number(text, "hidden_size") or queries
    inner = _number(text, "intermediate_size") or 4 * width
    return 2 * keys / layer_elements(width, inner, queries=queries, keys=keys)


def layer_elements(width: int, inner: int, *, queries: int, keys: int) -> int:
    """Elements that autograd holds of one token in one layer, without the layer's input."""
    return 6 * width + 5 * queries + 5 * keys + 7 * inner


def logits_of(model: Any) -> Logits:
    """Change of the logits by the model: Phi adds a bias, Falcon H1 multiplies them, Granite
    divides them, Gemma caps them."""
    config = model.config.get_text_config(decoder=True)
    scale = math.prod(getattr(config, name, None) or 1.0 for name in _FACTORS)
    divisor = getattr(config, "logits_scaling", None) or 1.0
    multiplied = getattr(config, "model_type", "").startswith("hyperclovax")
    caps = (getattr(config, name, None) for name in _CAPS)
    return Logits(
        bias_V=getattr(model.get_output_embeddings(), "bias", None),
        scale=scale * divisor if multiplied else scale / divisor,
        softcap=next(filter(None, caps), 0.0),
    )


def stock_attention(config: Any) -> str:
    """The model's own attention implementation, but one that caps scores where the model does:
    transformers before 5.18 let Gemma 2 have SDPA, which leaves the cap out."""
    own: str = config._attn_implementation
    capped = getattr(config, "attn_logit_softcapping", None)
    return "eager" if capped and own == "sdpa" else own


def unmergeable(model: Any, *, forked: bool) -> str:
    """Reason why a token's output depends on more than its ancestors' keys, values and states; ""
    if not. `forked`: it has recurrent layers that compute trees."""
    config = model.config.get_text_config(decoder=True)
    layers = set(getattr(config, "layer_types", None) or ())
    known = {*MERGED_LAYERS, *(FORKED_LAYERS if forked else ())}
    others = sorted(map(str, layers.difference(known)))
    if others:
        return f"layer types {', '.join(others)}"
    if getattr(model, "_is_stateful", False) and not forked:
        return "its layers carry a state from token to token"
    lengths = _length_rotary(config)
    return f"rotary embeddings of type {', '.join(lengths)}" if lengths else ""


def depends_on_length(model: Any) -> bool:
    """Whether, by the configuration, states depend on the length of the sequence."""
    return bool(_length_rotary(model.config.get_text_config(decoder=True)))


def _length_rotary(config: Any) -> list[str]:
    return sorted(set(_rotary_types(getattr(config, "rope_parameters", None))) & {*LENGTH_ROTARY})


def forget_lengths(model: Any) -> None:
    """Make the next pass independent of the lengths of earlier sequences.

    Dynamic rotary embeddings of transformers keep the frequencies of the longest sequence seen.
    """
    for module in model.modules():
        for name in [one for one in vars(module) if one.endswith("max_seq_len_cached")]:
            prefix = name.removesuffix("max_seq_len_cached")
            original = getattr(module, f"{prefix}original_inv_freq", None)
            current = getattr(module, f"{prefix}inv_freq", None)
            if original is not None and current is not None:
                # A copy: transformers changes the frequencies in place.
                setattr(module, f"{prefix}inv_freq", original.to(current.device, copy=True))
                setattr(module, name, getattr(module, "original_max_seq_len", 0))


def _rotary_types(parameters: Any) -> Iterator[str]:
    """Types of all rotary embeddings; some models have parameters per layer type."""
    if not isinstance(parameters, dict):
        return
    kind = parameters.get("rope_type")
    if isinstance(kind, str):
        yield kind
    for nested in parameters.values():
        yield from _rotary_types(nested)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Way in which a model's trees are computed."""

    unmerged: str = ""
    """Reason why trees are computed sequence by sequence; "" if merged."""
    separate: bool = False
    """Each sample is computed alone, even if it is the beginning of a longer sample."""
    own_head: bool = False
    """Unmerged trees take the logits of the model's own forward, all at once: its head does more
    than `capabilities.logits_of` says."""


def one_line(error: BaseException) -> str:
    """An error's type and first line."""
    (line, *_) = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {line[:160]}" if line else type(error).__name__


def weight_of(model: Any) -> Tensor:
    """Weight of the language-model head: a part of it while it is sharded. Raises `InvalidArgument`
    for a model without a head."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if not isinstance(weight, Tensor):
        raise InvalidArgument(
            f"{type(model).__name__} cannot be trained: it has no language-model head"
        )
    return weight


def warn_unmerged(family: str, way: Way) -> None:
    """Log why a model is not trained on merged trees."""
    alone = ", each sample alone" if way.separate else ""
    logits = ", with all logits of a sequence in memory" if way.own_head else ""
    log.warning(
        "%s is trained sequence by sequence, without merging prefixes%s%s: %s",
        family,
        alone,
        logits,
        way.unmerged,
    )
