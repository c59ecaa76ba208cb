"""The probe accepts right weights of each kind of model, and refuses planted faults.

docs/benchmarks/numerics.md has the errors of more families. With FORGE_ENGINES_DEVICE=cuda:0 the
engine is on that device (`make test-gpu-engine`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from benchmarks.probe_errors import examine
from benchmarks.support.inference.model_families import families
from forge.rl.model.probe import randomize
from forge.rl.model.small_config import small_config
from services.inference.engines.base import Probe, UnfitWeights
from services.inference.engines.embedded.model import packed_linears
from services.inference.engines.embedded.model.policy import Policy
from services.inference.engines.embedded.model.probe import adopt, logprobs
from services.inference.engines.probes import PROBE_TOKENS
from services.inference.engines.tensor_bytes import DTYPES, to_named
from tests.support.suite.matrix import usual

FAMILIES = ("gemma2", "gpt_oss", "jamba", "llama", "mixtral", "qwen3", "qwen3_moe", "qwen3_next")
DEVICE = os.environ.get("FORGE_ENGINES_DEVICE", "cpu")
State = dict[str, torch.Tensor]


def swapped_heads(state: State, heads: int) -> State:
    """Two heads of keys and values of one layer, in place of each other."""
    last = [name for name in state if name.endswith("v_proj.weight")][-1].removesuffix(
        "v_proj.weight"
    )
    return state | {
        name: exchanged(state[name].unflatten(0, (heads, -1))).flatten(0, 1)
        for name in (f"{last}k_proj.weight", f"{last}v_proj.weight")
    }


def permuted_head(state: State, heads: int) -> State:
    """The channels of one head of values in another order."""
    name = [name for name in state if name.endswith("v_proj.weight")][-1]
    by_head = state[name].unflatten(0, (heads, -1)).clone()
    by_head[0] = by_head[0].roll(1, 0)
    return state | {name: by_head.flatten(0, 1)}


def scaled_norm(state: State, heads: int) -> State:
    """One norm a quarter larger."""
    name = next(name for name in state if "norm" in name and "layers.1" in name)
    return state | {name: 1.25 * state[name] + 0.25 * (state[name].abs() < 0.5)}


def swapped_experts(state: State, heads: int) -> State:
    """Two experts of one layer, in place of each other."""
    stacked = [name for name in state if "experts" in name and state[name].dim() == 3]
    layer = stacked[0].partition("experts")[0]
    return state | {name: exchanged(state[name]) for name in stacked if name.startswith(layer)}


def exchanged(values: torch.Tensor) -> torch.Tensor:
    return values[[1, 0, *range(2, len(values))]]


def random_model(family: str) -> tuple[Any, Any]:
    """A configuration and a model whose distributions are not certain."""
    torch.manual_seed(0)
    config = small_config(next(one for one in families() if one.name == family).config())
    model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32).eval()
    model.requires_grad_(False)
    randomize(model)
    model.tie_weights()
    return config, model


def probe_of(model: Any) -> Probe:
    """What a trainer publishes."""
    ids = Random(PROBE_TOKENS).choices(range(model.config.vocab_size), k=PROBE_TOKENS)
    logprobs = model(torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)
    found = logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return Probe(ids=tuple(ids), logprobs=tuple(found.tolist()))


def rounded(model: Any) -> Any:
    """A copy whose parameters have their values in bfloat16."""
    copy = deepcopy(model)
    for one in copy.parameters():
        one.data = one.data.bfloat16().float()
    return copy


def serve(policy: Policy, state: Mapping[str, torch.Tensor], dtype: str, probe: Probe) -> None:
    named = {name: to_named(name, one.to(DTYPES[dtype])) for name, one in state.items()}
    adopt(policy, policy.stage(named, version=policy.version + 1), probe)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", usual(FAMILIES, "qwen3", "qwen3_moe", "qwen3_next"))
def test_probe_separates_right_weights_from_planted_faults(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """Heads swapped or permuted, and experts swapped; the version before stays. In 16 bits some
    faults of one layer are as small as rounding, but not two swapped heads."""
    config, model = random_model(family)
    config.save_pretrained(tmp_path)
    policy = Policy.build(str(tmp_path), dtype=dtype, device=DEVICE)
    state, probe = dict(model.state_dict()), probe_of(model)
    serve(policy, state, dtype, probe)
    faults = [swapped_heads]
    if dtype == "float32":
        faults.append(permuted_head)
    if dtype == "float32" and any(
        "experts" in name and one.dim() == 3 for name, one in state.items()
    ):
        faults.append(swapped_experts)
    for fault in faults:
        with pytest.raises(UnfitWeights):
            serve(policy, fault(state, config.num_key_value_heads), dtype, probe)
        assert policy.version == 1


@pytest.mark.parametrize("least", [1, 1 << 40])
@pytest.mark.parametrize("family", usual(FAMILIES, "llama", "qwen3_moe", "qwen3_next"))
def test_log_probs_of_published_values_show_small_faults_in_16_bits(
    family: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One norm times 1.25, a permuted head, swapped experts, with packed matrices and plain ones;
    afterwards the engine computes in 16 bits as before."""
    monkeypatch.setattr(packed_linears, "_LEAST_NARROW", least)
    config, model = random_model(family)
    config.save_pretrained(tmp_path)
    policy = Policy.build(str(tmp_path), dtype="bfloat16", device=DEVICE)
    state = dict(model.state_dict())
    probe = replace(probe_of(model), published=probe_of(rounded(model)).logprobs)
    serve(policy, state, "bfloat16", probe)
    before = logprobs(policy, probe.ids)
    faults = [scaled_norm, permuted_head]
    if any("experts" in name and one.dim() == 3 for name, one in state.items()):
        faults.append(swapped_experts)
    for fault in faults:
        with pytest.raises(UnfitWeights):
            serve(policy, fault(state, config.num_key_value_heads), "bfloat16", probe)
    assert policy.version == 1
    assert torch.equal(logprobs(policy, probe.ids), before)


@pytest.mark.parametrize("family", usual(("gemma2", "llama", "qwen3"), "qwen3"))
def test_log_probs_of_published_values_show_another_rotary_base(
    family: str, tmp_path: Path
) -> None:
    """By a tenth, in 16 bits."""
    config, model = random_model(family)
    probe = replace(probe_of(model), published=probe_of(rounded(model)).logprobs)
    config.rope_parameters["rope_theta"] *= 1.1
    config.save_pretrained(tmp_path)
    policy = Policy.build(str(tmp_path), dtype="bfloat16", device=DEVICE)
    with pytest.raises(UnfitWeights):
        serve(policy, model.state_dict(), "bfloat16", probe)
    serve(policy, model.state_dict(), "bfloat16", replace(probe, published=()))


class _NamedGpu(str):
    """The CPU, under the type of a GPU."""

    type = "cuda"


def test_log_probs_of_published_values_are_compared_on_a_gpu(tmp_path: Path) -> None:
    """The pass in float32 does not depend on the type of the device."""
    config, model = random_model("qwen3")
    probe = replace(probe_of(model), published=probe_of(rounded(model)).logprobs)
    config.rope_parameters["rope_theta"] *= 1.1
    config.save_pretrained(tmp_path)
    policy = Policy.build(str(tmp_path), dtype="float32", device="cpu")
    policy.device = _NamedGpu("cpu")  # type: ignore[assignment]
    with pytest.raises(UnfitWeights):
        serve(policy, model.state_dict(), "bfloat16", probe)


@pytest.fixture
def tf32() -> Iterator[None]:
    """A process that allows TF32, as in NVIDIA's containers."""
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("tf32")
def test_float32_probe_computes_without_tf32(tmp_path: Path) -> None:
    """Right weights would exceed its limit otherwise; afterwards the process has its own
    setting."""
    config, model = random_model("qwen3")
    config.save_pretrained(tmp_path)
    policy = Policy.build(str(tmp_path), dtype="bfloat16", device=DEVICE)
    probe = replace(probe_of(model), published=probe_of(rounded(model)).logprobs)
    found: dict[torch.dtype, str] = {}

    def note(module: Any, given: Any) -> None:
        found[policy._computed_type] = torch.get_float32_matmul_precision()

    policy.module.register_forward_pre_hook(note)
    serve(policy, model.state_dict(), "bfloat16", probe)
    assert found == {torch.bfloat16: "high", torch.float32: "highest"}
    assert torch.get_float32_matmul_precision() == "high"


def test_benchmark_compares_with_a_forward_that_caps_scores() -> None:
    """transformers before 5.18 give Gemma 2 an attention without the cap."""
    config, model = random_model("gemma2")
    model.config._attn_implementation_internal = "sdpa"
    assert examine(config, model, probes=1, device=DEVICE)["wide"] < 2e-5


@pytest.mark.parametrize("failure", [RuntimeError("no kernel"), MemoryError()])
def test_model_that_cannot_compute_in_float32_is_served_without_that_check(
    failure: Exception, tmp_path: Path
) -> None:
    """The log has the reason."""
    config, model = random_model("qwen3")
    config.save_pretrained(tmp_path)
    policy = Policy.build(str(tmp_path), dtype="bfloat16", device=DEVICE)
    probe = replace(probe_of(model), published=probe_of(rounded(model)).logprobs)

    def check(module: Any, given: Any) -> None:
        if policy._computed_type is torch.float32:
            raise failure

    policy.module.register_forward_pre_hook(check)
    with capture_logs() as logged:
        serve(policy, model.state_dict(), "bfloat16", probe)
    assert policy.version == 1
    assert "float32_probe_not_computed" in [line["event"] for line in logged]
    assert policy._computed_type is torch.bfloat16


@pytest.mark.parametrize("family", usual(("gemma2", "llama", "qwen3"), "qwen3"))
def test_float32_probe_refuses_another_rotary_base(family: str, tmp_path: Path) -> None:
    """By a tenth: rounding to 16 bits would hide it."""
    config, model = random_model(family)
    config.rope_parameters["rope_theta"] *= 1.1
    config.save_pretrained(tmp_path)
    policy = Policy.build(str(tmp_path), dtype="float32", device=DEVICE)
    with pytest.raises(UnfitWeights):
        serve(policy, model.state_dict(), "float32", probe_of(model))
