"""Log-probs of a model whose linear layers are quantized as engine tensorrt_llm quantizes them.

    python -m benchmarks.quantized_weights --model DIRECTORY [--text FILE...] [--quick]
        [--json FILE]

The model computes windows of 512 tokens of a text in bfloat16, on the CPU. Each quantization is
compared with the same model in bfloat16, on the tokens that follow another of their window:

    gap     mean distance of the log-probs of those tokens, in nats
    kl      mean KL divergence of all tokens, from the quantized model, in nats
    probe   error of a worker's probe: 16 random tokens, beside the model in float32, the mean
            distance without the two largest; of 16 probes the mean, and `probe_largest`

`float32` is the model in float32. With `.activations` the inputs of the layers are quantized, too,
by a static scale: of the largest input in as many windows of the rest of the text. With `.stale`
that scale is half as large, as if the inputs had doubled since the calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.probe_errors import error, own
from benchmarks.support.report import arguments, keep, show, silence_libraries
from services.inference.engines.probes import PROBE_TOKENS
from services.inference.engines.tensorrt_llm.weights.matrix_forms import (
    BLOCK,
    BlockForm,
    MatrixForm,
    PackedForm,
    TensorForm,
)

WINDOW = 512
PROBES = 16
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Layers = Mapping[str, torch.nn.Linear]
Rounding = Callable[[torch.Tensor, float], torch.Tensor]
"""Rounds inputs by the largest of a calibration."""


def windows(options: Any) -> torch.Tensor:
    """Tokens of the text, [windows, WINDOW]: the first half for the comparison."""
    text = "\n\n".join(file.read_text() for file in options.text)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    count = 2 if options.quick else 16
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    assert len(ids) >= count * WINDOW, f"the text has {len(ids)} tokens"
    found: torch.Tensor = ids[: count * WINDOW].view(count, WINDOW)
    return found


@torch.inference_mode()
def logprobs(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Log-probs of all tokens behind each but the last, [B, T - 1, V]."""
    return torch.cat([model(ids[None]).logits[:, :-1].float().log_softmax(-1) for ids in ids_BT])


def layers(model: Any) -> Layers:
    """Linear layers but the head, by name."""
    head = model.get_output_embeddings()
    return {
        name: one
        for name, one in model.named_modules()
        if isinstance(one, torch.nn.Linear) and one is not head
    }


def restored(parts: Mapping[str, torch.Tensor], form: MatrixForm) -> torch.Tensor:
    """A matrix from its quantized form, in float32."""
    matrix = parts[""]
    match form:
        case BlockForm(block=(high, wide)):
            scales = parts["_scale_inv"].repeat_interleave(high, 0).repeat_interleave(wide, 1)
            return matrix.float() * scales[: matrix.shape[0], : matrix.shape[1]]
        case PackedForm():
            codes = torch.stack([matrix & 15, matrix >> 4], -1).flatten(1).int()
            scales = parts["_scale"].float() * parts["_scale_2"]
            return torch.cat([_E2M1, -_E2M1])[codes] * scales.repeat_interleave(BLOCK, 1)
    return matrix.float() * parts["_scale"]


def quantize(model: Any, form: MatrixForm) -> None:
    """Quantize the layers that have the same input together, and restore them."""
    groups: dict[str, list[torch.nn.Linear]] = {}
    for name, one in layers(model).items():
        module, _, last = name.rpartition(".")
        shared = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "up_proj": "gate_proj"}
        groups.setdefault(f"{module}.{shared.get(last, last)}", []).append(one)
    for group in groups.values():
        for one, parts in zip(group, form.narrowed([one.weight for one in group]), strict=True):
            one.weight.data = restored(parts, form).to(one.weight.dtype)


def round_e4m3(inputs: torch.Tensor, largest: float) -> torch.Tensor:
    """Inputs in E4M3 by one scale."""
    scale = largest / 448
    narrow = (inputs.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (narrow.float() * scale).to(inputs.dtype)


def round_e2m1(inputs: torch.Tensor, largest: float) -> torch.Tensor:
    """Inputs in E2M1 by a scale of each 16, in E4M3 by one scale."""
    whole = largest / (6 * 448)
    blocks = inputs.float().reshape(*inputs.shape[:-1], -1, BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / (6 * whole)).clamp(2.0**-9, 448)
    scales = scales.to(torch.float8_e4m3fn).float() * whole
    numbers = (blocks / scales).clamp(-6, 6)
    steps = torch.where(numbers.abs() < 2, 0.5, torch.where(numbers.abs() < 4, 1.0, 2.0))
    narrow = (numbers / steps).round() * steps * scales
    return narrow.flatten(-2).to(inputs.dtype)


def rounded(
    rounding: Rounding, largest: Mapping[str, float], layer: str, inputs: torch.Tensor
) -> torch.Tensor:
    """The inputs of a layer by its calibration."""
    return rounding(inputs, largest[layer])


@contextmanager
def inputs_of(model: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace the inputs of all layers."""
    hooks = [
        one.register_forward_pre_hook(lambda _, args, name=name: (change(name, args[0]),))
        for name, one in layers(model).items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def calibrated(model: Any, ids_BT: torch.Tensor) -> dict[str, float]:
    """The largest input of each layer."""
    largest: dict[str, float] = {}

    def note(name: str, inputs: torch.Tensor) -> torch.Tensor:
        largest[name] = max(largest.get(name, 0.0), float(inputs.abs().max()))
        return inputs

    with inputs_of(model, note):
        logprobs(model, ids_BT)
    return largest


def compare(
    found_BTV: torch.Tensor, right_BTV: torch.Tensor, ids_BT: torch.Tensor
) -> dict[str, float]:
    """Gap and KL divergence."""
    next_BT1 = ids_BT[:, 1:, None]
    gaps_BT1 = found_BTV.gather(-1, next_BT1) - right_BTV.gather(-1, next_BT1)
    divergences = [
        float((found.exp() * (found - right)).sum(-1).mean())
        for found, right in zip(found_BTV, right_BTV, strict=True)
    ]
    return {"gap": float(gaps_BT1.abs().mean()), "kl": fmean(divergences)}


def probes(model: Any) -> list[list[float]]:
    """Log-probs of random tokens."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    drawn = (
        Random(PROBE_TOKENS + n).choices(range(vocabulary), k=PROBE_TOKENS) for n in range(PROBES)
    )
    return [own(model, tuple(ids)) for ids in drawn]


def main() -> None:
    parser = arguments(__doc__ or "", quick="2 windows in place of 16")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="*", default=sorted(Path("docs").glob("*.md")))
    options = parser.parse_args()
    ids, calibration = windows(options).chunk(2)
    source = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    right = logprobs(source, ids)
    exact = probes(deepcopy(source).float())
    largest = calibrated(source, calibration)
    numbers: dict[str, float] = {}

    def note(name: str, model: Any) -> None:
        keys = compare(logprobs(model, ids), right, ids)
        errors = list(map(error, probes(model), exact))
        keys |= {"probe": fmean(errors), "probe_largest": max(errors)}
        print(name, " ".join(f"{key} {one:.4f}" for key, one in keys.items()), flush=True)
        numbers.update({f"{name}.{key}": one for key, one in keys.items()})

    note("bfloat16", source)
    note("float32", deepcopy(source).float())
    forms: list[tuple[str, MatrixForm, Rounding | None]] = [
        ("block_scales", BlockForm(block=(128, 128), powers_of_two=False), None),
        ("fp8", TensorForm(scalar=()), round_e4m3),
        ("nvfp4", PackedForm(scalar=()), round_e2m1),
    ]
    for name, form, rounding in forms:
        model = deepcopy(source)
        quantize(model, form)
        note(name, model)
        if rounding is None:
            continue
        for kind, factor in (("activations", 1.0), ("stale", 0.5)):
            scaled = {layer: one * factor for layer, one in largest.items()}
            with inputs_of(model, partial(rounded, rounding, scaled)):
                note(f"{name}.{kind}", model)
    show("quantized beside bfloat16", numbers)
    keep(numbers, options.json)


if __name__ == "__main__":
    silence_libraries()
    main()
