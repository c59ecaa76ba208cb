"""Errors of a publication's probe for right weights and for another rotary base.

    python -m benchmarks.probe_errors [--device cuda:0] [--only FAMILY...] [--model DIRECTORY]
        [--probes N] [--part N/PARTS] [--quick] [--json FILE]

Small random models of all families that are served, or the model of a directory. The embedded
engine loads their weights in bfloat16. Its log-probs of 16 tokens are compared with those of the
model's own forward in float32, as `services.inference.engines.probes` does: by the mean error
without the two largest, in nats. A key is the largest of all probes.

    narrow      the engine's pass in bfloat16
    wide        its second pass, in float32; the reference has the values in bfloat16, too
    rotary      the same two of an engine whose rotary base is 10 % larger, the least of all
                probes; absent without one

The reference computes on the CPU, and beside a GPU also there (`.there`), as a trainer may.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.support.inference.model_families import QUICK, families
from benchmarks.support.report import arguments, keep, show, silence_libraries
from forge.rl.model.capabilities import one_line, stock_attention
from forge.rl.model.probe import randomize
from forge.rl.model.small_config import small_config
from forge.rl.numerics import without_tf32
from services.inference.engines.embedded.family_check import examine as examine_serving
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.probe import logprobs
from services.inference.engines.probes import PROBE_TOKENS
from services.inference.engines.tensor_bytes import to_named

LEFT_OUT = 2
"""Largest errors of a probe that do not count."""
State = dict[str, torch.Tensor]
Ways = list[tuple[str, Any, Callable[[Iterable[float]], float]]]


def models(options: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, configuration and model, in float32; families that are not served are said and left."""
    if options.model is not None:
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        yield options.model.name, AutoConfig.from_pretrained(options.model), model.eval()
        return
    names = options.only or (QUICK if options.quick else None)
    part, parts = map(int, options.part.split("/"))
    wanted = [one for one in families() if names is None or one.name in names]
    for family in wanted[part::parts]:
        torch.manual_seed(0)
        try:
            if refusal := examine_serving(family.config()).refusal:
                print(f"{family.name}: not served: {refusal}", flush=True)
                continue
            config = small_config(family.config())
            model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32).eval()
        except Exception as error:
            print(f"{family.name}: not built: {one_line(error)}", flush=True)
            continue
        model.requires_grad_(False)
        randomize(model)
        model.tie_weights()
        yield family.name, config, model


def turned(config: Any) -> Any:
    """The configuration with a rotary base 10 % larger; None without one."""
    changed = deepcopy(config)
    parameters = getattr(changed.get_text_config(decoder=True), "rope_parameters", None) or {}
    tables = [one for one in (parameters, *parameters.values()) if isinstance(one, dict)]
    tables = [one for one in tables if one.get("rope_theta")]
    for one in tables:
        one["rope_theta"] *= 1.1
    return changed if tables else None


def round_values(model: Any) -> State:
    """Give a model its values in bfloat16, and return them as a publication has them."""
    state: State = model.state_dict(keep_vars=True)
    for one in state.values():
        if one.is_floating_point():
            one.data = one.data.bfloat16().float()
    return {
        name: one.detach().bfloat16() if one.is_floating_point() else one.detach()
        for name, one in state.items()
    }


@torch.no_grad()
def own(model: Any, ids: tuple[int, ...]) -> list[float]:
    """Log-probs of all tokens but the first by the model's own forward, where it is."""
    model.set_attn_implementation(stock_attention(model.config))
    ids_1T = torch.tensor([ids], device=model.device)
    with without_tf32():
        logits_TV = model(ids_1T, use_cache=False).logits[0, :-1].float()
    found: list[float] = logits_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0].tolist()
    return found


@torch.inference_mode()
def passes(
    config: Any, state: State, probes: Sequence[tuple[int, ...]], device: str
) -> dict[str, list[list[float]]]:
    """The engine's log-probs of each probe, by pass."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        policy = Policy.build(folder, dtype="bfloat16", device=device)
    named = {name: to_named(name, one) for name, one in state.items()}
    policy.swap(policy.stage(named, version=1))
    narrow = [logprobs(policy, ids).tolist() for ids in probes]
    with policy.in_float32(), without_tf32():
        return {"narrow": narrow, "wide": [logprobs(policy, ids).tolist() for ids in probes]}


def error(found: Sequence[float], expected: Sequence[float]) -> float:
    """The mean, without the largest."""
    errors = sorted(abs(a - b) for a, b in zip(found, expected, strict=True))
    return fmean(errors[: len(errors) - LEFT_OUT])


def examine(config: Any, model: Any, *, probes: int, device: str) -> dict[str, float]:
    """The keys of one model."""
    vocabulary = config.get_text_config(decoder=True).vocab_size
    drawn = [
        tuple(Random(seed).choices(range(vocabulary), k=PROBE_TOKENS)) for seed in range(probes)
    ]
    exact = [own(model, ids) for ids in drawn]
    state = round_values(model)
    expected = {"": [own(model, ids) for ids in drawn]}
    if device != "cpu":
        model.to(device)
        expected[".there"] = [own(model, ids) for ids in drawn]
    numbers = {}
    ways: Ways = [("", config, max), ("rotary.", turned(config), min)]
    for prefix, served, of_all in ways:
        if served is None:
            continue
        found = passes(served, state, drawn, device)
        numbers[f"{prefix}narrow"] = of_all(map(error, found["narrow"], exact))
        for place, rounded in expected.items():
            numbers[f"{prefix}wide{place}"] = of_all(map(error, found["wide"], rounded))
    return numbers


def main() -> None:
    parser = arguments(__doc__ or "", quick="some families")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", help="families")
    parser.add_argument("--model", type=Path, help="a directory, in place of families")
    parser.add_argument("--probes", type=int, default=2)
    parser.add_argument("--part", default="0/1", help="each process of several takes its part")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers: dict[str, float] = {}
    for name, config, model in models(options):
        try:
            found = examine(config, model, probes=options.probes, device=options.device)
        except Exception as failure:
            print(f"{name}: not computed: {one_line(failure)}", flush=True)
            continue
        print(name, " ".join(f"{key} {one:.2e}" for key, one in found.items()), flush=True)
        numbers |= {f"{name}.{key}": one for key, one in found.items()}
    largest = {}
    for key in ("narrow", "wide", "wide.there"):
        right = [
            one
            for name, one in numbers.items()
            if name.endswith(f".{key}") and not name.endswith(f".rotary.{key}")
        ]
        if right:
            largest[f"largest.{key}"] = max(right)
    show("errors of right weights", largest)
    keep(numbers | largest, options.json)


if __name__ == "__main__":
    silence_libraries()
    main()
