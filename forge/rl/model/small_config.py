"""A model's configuration with every size made small, and each kind of layer kept.

Owns the meaning of the attributes of transformers' configurations: widths and counts become small,
windows, chunks, index sizes and thresholds of position become shorter than `PROBE_TOKENS`, so that
a sequence of a few dozen tokens goes beyond all of them. What a model computes on the copy is
`forge.rl.model.probe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import accumulate, pairwise
from typing import Any

PROBE_TOKENS = 64
"""Longest sequence that a shrunken model must take; every window and threshold is far below."""
HEAD = 16
"""Channels of an attention head."""
WIDTH = 64
"""Width of the states between layers: four heads."""
VOCABULARY = 64
WINDOW = 6
"""Size of windows, chunks and index sizes, in tokens."""
THRESHOLD = 16
"""Positions from which on a rotary embedding or a scale differs."""
LONGEST_POSITION = 256
"""Length of tables of learned positions: these bound the model's input."""
MOST_KINDS = 16
"""Layers of different kinds that a copy holds."""

_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_blocks")
_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers", "max_window_layers")
"""So many layers from the first on are of one kind."""
_LAST_LAYERS = ("num_kv_shared_layers",)
_PERIODS = (
    ("attn_layer_period", "attn_layer_offset"),
    ("expert_layer_period", "expert_layer_offset"),
    ("decoder_sparse_step", ""),
    ("full_attention_interval", ""),
)
_ROTARY_KINDS = ("dynamic", "longrope", "yarn", "llama3", "proportional")
"""Rotary embeddings scaled by the longest position that the configuration names."""

_SIZES: dict[str, int] = {
    "hidden_size": WIDTH, "d_model": WIDTH, "n_embd": WIDTH, "emb_dim": WIDTH,
    "embedding_dim": WIDTH, "embedding_size": WIDTH, "word_embed_proj_dim": WIDTH,
    "lru_width": WIDTH, "attention_hidden_size": WIDTH, "input_embedding_size": WIDTH,
    "output_embedding_size": WIDTH, "dim_model_base": WIDTH, "query_pre_attn_scalar": HEAD,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4, "swa_num_attention_heads": 4, "linear_num_heads": 4,
    "head_dim": HEAD, "kv_channels": HEAD, "dim_head": HEAD, "d_head": HEAD, "swa_head_dim": HEAD,
    "global_head_dim": HEAD, "attention_head_size": HEAD, "linear_head_dim": HEAD,
    "attention_head_dim": HEAD, "index_head_dim": HEAD, "index_n_heads": 2,
    "linear_key_head_dim": HEAD, "linear_value_head_dim": HEAD,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, "rotary_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "hc_lowrank": 8,
    "ple_embed_dim": WIDTH, "hidden_size_per_layer_input": 16, "laurel_rank": 8, "d_rel": 8,
    "adapter_rank": 8, "router_hidden_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "zero_expert_num": 2, "num_shared_experts": 1, "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2,
    "n_group": 2, "num_expert_group": 2, "topk_group": 1,
    "sliding_window": WINDOW, "window_size": WINDOW, "sliding_window_size": WINDOW,
    "attention_window_size": WINDOW, "local_attention": WINDOW, "attention_chunk_size": WINDOW,
    "keep_window_size": WINDOW, "local_attention_window_len": WINDOW, "block_size": 8,
    "index_topk": WINDOW, "index_topk_blocks": 2, "index_block_size": 4, "rel_extent": 8,
    "chunk_size": 8, "mamba_chunk_size": 8, "local_attn_chunk_length": 8,
    "lsh_attn_chunk_length": 8, "floor_scale": 8, "log_scaling_n_floor": 8,
    "original_max_position_embeddings": THRESHOLD, "relative_max_distance": 16,
    "position_bias_max_distance": 16,
    "n_positions": LONGEST_POSITION, "n_ctx": LONGEST_POSITION, "max_seq_len": LONGEST_POSITION,
    "context_length": LONGEST_POSITION, "max_target_positions": LONGEST_POSITION,
    "max_source_positions": LONGEST_POSITION, "model_max_length": LONGEST_POSITION,
    "vocab_size": VOCABULARY, "unpadded_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "ngram_vocab_size_base": 61, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 1,
    "heads_per_ngram": 2,
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8, "time_step_rank": 4,
    "mamba_dt_rank": 4, "encoder_layers": 1, "decoder_layers": 2, "num_encoder_layers": 1,
    "num_decoder_layers": 2,
    "n_mamba_heads": 2, "mamba_num_heads": 8, "mamba_n_heads": 8, "mamba_head_dim": HEAD,
    "mamba_d_head": HEAD, "mamba_headdim": HEAD, "mamba_d_ssm": 128, "n_groups": 1,
    "num_mel_bins": 80, "image_size": 0, "patch_size": 0, "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Lowered value of each attribute; 0 leaves it unchanged."""
_INNER = ("intermediate", "ffn", "feed_forward", "d_inner", "dff", "dim_ff")
"""Parts of the names of widths within feed-forward layers, which may differ by layer."""
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
_KEPT = ("chunk_size_feed_forward", "id2label", "label2id", "seed", "transformers_version")


def small_config(config: Any) -> Any:
    """A shrunken copy of a transformers configuration, sub-configurations included.

    Raises `ValueError` for one with more kinds of layers than a small model holds.
    """
    small = deepcopy(config)
    text = small.get_text_config(decoder=True)
    for one in _configs(small):
        _shrink(one, language=one is text or one is small)
    return small


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _configs(value)


def _shrink(config: Any, *, language: bool) -> None:
    kept = _keep_layers(config)
    own = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, value in own.items():
        if type(value) is int and name not in _KEPT:
            small = _small(name, value, own, language=language)
            if small != value:
                setattr(config, name, small)
        elif isinstance(value, list) and any(part in name for part in _INNER):
            setattr(config, name, [min(one, WIDTH) if type(one) is int else one for one in value])
    _shorten_rotary(config)
    _derive(config, own)
    overrides = _layer_overrides(config)
    if overrides:
        config.per_layer_config = {
            place: {name: _overridden(name, value, own) for name, value in overrides[layer].items()}
            for place, layer in enumerate(kept)
            if layer in overrides
        }


def _overridden(name: str, value: Any, own: dict[str, Any]) -> Any:
    """Values of one layer alone: small, and still different from those of the other layers."""
    if type(value) is not int:
        return value
    small = _small(name, value, own, language=True)
    return small if value == own.get(name) or small >= value else 2 * small


def _layer_overrides(config: Any) -> dict[int, dict[str, Any]]:
    """By layer: attributes that differ from those of the whole configuration."""
    spec = vars(config).get("_heterogeneity_spec")
    return dict(spec.per_layer_overrides) if spec is not None else {}


def _small(name: str, value: int, own: dict[str, Any], *, language: bool) -> int:
    if name in _KV_HEADS:
        return _kv_heads(value, own)
    if name.endswith(("token_id", "token_index")):
        return min(value, VOCABULARY - 1)
    if name == "head_dim" and own.get("qk_rope_head_dim"):
        rotary = int(own["qk_rope_head_dim"])
        return min(_SIZES["qk_rope_head_dim"], rotary) * max(1, value // rotary)
    if name == "v_head_dim":
        return min(value, HEAD if value == _query_size(own) else 8)
    if name == "qk_head_dim" and own.get("qk_rope_head_dim"):
        rotary, rest = int(own["qk_rope_head_dim"]), int(own["qk_nope_head_dim"])
        return min(rotary, 8) + min(rest, 8)
    if name == "max_position_embeddings":
        return _longest(value, own)
    if name in _SIZES:
        return min(value, _SIZES[name] or value)
    if any(part in name for part in _INNER):
        return min(value, WIDTH)
    # An unknown size may be a window: make it shorter than the sequences.
    return min(value, THRESHOLD) if language and value > PROBE_TOKENS else value


def _query_size(own: dict[str, Any]) -> int:
    """Channels of a query head of multi-head latent attention."""
    size: int = own.get("qk_nope_head_dim", 0) + own.get("qk_rope_head_dim", 0)
    return size


def _kv_heads(value: int, own: dict[str, Any]) -> int:
    heads = max((own.get(name, 0) or 0) for name in ("num_attention_heads", "n_head", "n_heads"))
    return min(value, 4 if value >= heads else 2)


def _longest(value: int, own: dict[str, Any]) -> int:
    """Positions there are: a threshold where the rotary embedding has one."""
    kinds = {one.get("rope_type") for one in _rotary(own.get("rope_parameters"))}
    if "dynamic" in kinds:
        return min(value, THRESHOLD)
    original = own.get("original_max_position_embeddings") or 0
    for one in _rotary(own.get("rope_parameters")):
        original = one.get("original_max_position_embeddings") or original
    if kinds.intersection(_ROTARY_KINDS) and original:
        return max(1, value // original) * THRESHOLD  # the factor between the two stays
    return min(value, LONGEST_POSITION)


def _rotary(parameters: Any) -> Iterator[dict[str, Any]]:
    """Each set of rotary parameters; some models have one per layer type."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters or "type" in parameters:
            yield parameters
        for nested in parameters.values():
            yield from _rotary(nested)


def _shorten_rotary(config: Any) -> None:
    for one in _rotary(_get(config, "rope_parameters")):
        if one.get("original_max_position_embeddings"):
            one["original_max_position_embeddings"] = THRESHOLD
        head = _get(config, "qk_rope_head_dim") or _get(config, "head_dim")
        pairs = int((head or HEAD) * (one.get("partial_rotary_factor") or 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            factors = one.get(name)
            if isinstance(factors, list) and factors:
                one[name] = [factors[at * len(factors) // pairs] for at in range(pairs)]
        sections = one.get("mrope_section")
        if isinstance(sections, list) and sections:
            one["mrope_section"] = _shares(sections, pairs)


def _shares(parts: Sequence[int], total: int) -> list[int]:
    """Whole numbers in about the same ratio that add up to `total`."""
    whole = sum(parts)
    bounds = [0, *(part * total // whole for part in accumulate(parts))]
    return [after - before for before, after in pairwise(bounds)]


def _derive(config: Any, own: dict[str, Any]) -> None:
    """Sizes that follow from others, and lists of sizes per layer."""
    heads = own.get("num_attention_heads_per_layer")
    if isinstance(heads, list) and heads:
        least = min(heads)
        config.num_attention_heads_per_layer = [4 if one == least else 8 for one in heads]
    if "mamba_d_ssm" in own:
        config.mamba_d_ssm = config.mamba_n_heads * config.mamba_d_head
    if "state_size" in own and "num_heads" in own:  # Mamba 2
        config.num_heads = config.expand * WIDTH // HEAD
    if "mamba_headdim" in own:  # Zamba 2, with heads of attention over two states
        config.n_mamba_heads = config.mamba_expand * WIDTH // HEAD
        config.attention_hidden_size = 2 * WIDTH
        config.attention_head_dim = 2 * WIDTH // config.num_attention_heads


def _keep_layers(config: Any) -> list[int]:
    """The first layer of each kind stays, in their order; two at least. Returns their numbers."""
    count_name = next((one for one in _LAYER_COUNTS if isinstance(_get(config, one), int)), "")
    if not count_name:
        return []
    count: int = _get(config, count_name)
    _shorten_periods(config)
    kinds = _layer_kinds(config, count)
    kept: list[int] = []
    seen: set[tuple[Any, ...]] = set()
    for layer in range(count):
        kind = tuple(repr(of(layer)) for of in kinds)
        if kind not in seen:
            seen.add(kind)
            kept.append(layer)
    if len(kept) > MOST_KINDS:
        raise ValueError(f"{len(kept)} kinds of layers, more than {MOST_KINDS}")
    fill = (layer for layer in range(count) if layer not in kept)
    while len(kept) < min(count, _layers_needed(config)):
        kept.append(next(fill))
    kept.sort()
    _take_layers(config, count_name, kept, count)
    return kept


def _layers_needed(config: Any) -> int:
    """Two, or what a whole number of the periods takes."""
    periods = [_get(config, period) or 1 for period, _ in _PERIODS if _get(config, period)]
    return max([2, *(2 * period for period in periods if period > 1)])


def _shorten_periods(config: Any) -> None:
    for period, offset in _PERIODS:
        if isinstance(_get(config, period), int) and _get(config, period) > 1:
            setattr(config, period, 2)
            if offset and isinstance(_get(config, offset), int):
                setattr(config, offset, _get(config, offset) % 2)


def _layer_kinds(config: Any, count: int) -> list[Callable[[int], Any]]:
    """Differences between layers, as functions of a layer's number."""
    kinds: list[Callable[[int], Any]] = [_layer_overrides(config).get]
    for name, value in vars(config).items():
        if _names_layers(name, value, count):
            kinds.append(set(value).__contains__)
        elif isinstance(value, (list, tuple)) and len(value) == count:
            kinds.append(value.__getitem__)
        elif name in _FIRST_LAYERS and isinstance(value, int):
            kinds.append(value.__gt__)
        elif name in _LAST_LAYERS and isinstance(value, int) and value:
            kinds.append((count - value).__le__)
    return kinds


def _names_layers(name: str, value: Any, count: int) -> bool:
    if not isinstance(value, (list, tuple)) or not value or "token" in name:
        return False
    if not ("layer" in name or name.endswith("_idxs")):
        return False
    if not all(type(one) is int and 0 <= one < count for one in value):
        return False
    return all(before < after for before, after in pairwise(value))


def _take_layers(config: Any, count_name: str, kept: list[int], count: int) -> None:
    for name, value in list(vars(config).items()):
        if _names_layers(name, value, count):
            chosen = (place for place, layer in enumerate(kept) if layer in value)
            setattr(config, name, type(value)(chosen))
        elif isinstance(value, (list, tuple)) and len(value) == count:
            setattr(config, name, type(value)(value[layer] for layer in kept))
        elif name in _FIRST_LAYERS and isinstance(value, int):
            setattr(config, name, sum(layer < value for layer in kept))
        elif name in _LAST_LAYERS and isinstance(value, int) and value:
            setattr(config, name, sum(layer >= count - value for layer in kept))
    setattr(config, count_name, len(kept))


def _get(config: Any, name: str) -> Any:
    return vars(config).get(name)
