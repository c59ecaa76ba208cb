"""Tests: versions of a trainer reach checkpoints of ModelOpt, FP8 and NVFP4, in their form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from forge.core.named_tensor import NamedTensor
from services.inference.engines.base import Probe, UnfitWeights
from services.inference.engines.tensorrt_llm.arguments import Role
from services.inference.engines.tensorrt_llm.library.surface import Feature, surface_for
from services.inference.engines.tensorrt_llm.weights import buckets
from services.inference.engines.tensorrt_llm.weights.checkpoint import read_checkpoint
from services.inference.engines.tensorrt_llm.weights.matrix_forms import (
    BlockForm,
    MatrixForm,
    PackedForm,
    TensorForm,
)
from tests.contract.engines import prompt_ids, published, reference
from tests.support.inference.modelopt_checkpoints import (
    ALGORITHMS,
    fused_with,
    nearest_codes,
    quantized_names,
    restored,
    save_quantized,
    set_quantization,
)
from tests.support.inference.tensorrt_llm import both, core_of, started
from tests.support.inference.tensorrt_llm_fake.behaviour import Behaviour
from tests.support.inference.transformers_answers import greedy_of, logprobs_of
from tests.unit.inference.engines.tensorrt_llm.weights.test_trtllm_hub_names import model_of

NEW = frozenset({Feature.UPDATE_HOOKS})
LAYER = "model.layers.1"
DOWN = f"{LAYER}.mlp.down_proj"


def unlike(model: PreTrainedModel) -> PreTrainedModel:
    """The model with query, key and value of unlike ranges, and gate and up."""
    for name, weight in model.named_parameters():
        for part, factor in {"k_proj": 1 / 7, "v_proj": 9.0, "up_proj": 5.0}.items():
            if f"{part}.weight" in name:
                weight.mul_(factor)
        if name.endswith("gate_up_proj"):
            weight[:, weight.shape[1] // 2 :].mul_(5.0)
    return model


def model(family: str, *, seed: int) -> PreTrainedModel:
    return unlike(
        reference(family, seed=seed) if "qwen3" in family else model_of(family, seed=seed)
    )


def loaded(folder: Path, tensors: dict[str, NamedTensor]) -> dict[str, torch.Tensor]:
    """The tensors that the library gets, in torch's types."""
    found: dict[str, torch.Tensor] = {}
    for one in read_checkpoint(str(folder), NEW).fit(tensors, version=1).loaded():
        flat = torch.frombuffer(bytearray(one.data), dtype=torch.uint8)
        assert one.name not in found
        found[one.name] = flat.view(getattr(torch, one.dtype)).view(one.shape)
    return found


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same type, shape and bits."""
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*bits)


def plain_of(folder: Path, of: PreTrainedModel) -> dict[str, torch.Tensor]:
    of.save_pretrained(folder)
    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
async def test_update_equals_a_fresh_load(
    behaviour: Behaviour,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    algorithm: str,
) -> None:
    """All ranks have the bits of a checkpoint of the new version, also of experts. Its parts arrive
    in several buckets, and the engine answers like the restored model."""
    monkeypatch.setattr(buckets, "MIB", 1 << 12)
    new = model(family, seed=1)
    save_quantized(tmp_path / "old", model(family, seed=0), algorithm)
    fresh = load_file(save_quantized(tmp_path / "new", new, algorithm) / "model.safetensors")
    async with started(tmp_path / "old", Role.BOTH, tensor_parallel=2) as engine:
        await engine.load(published(new), version=1)
        for rank in core_of(engine).ranks:
            assert rank.stored.keys() == fresh.keys()
            assert [name for name in fresh if not equal(rank.stored[name], fresh[name])] == []
        ids = prompt_ids(20)
        served = type(new).from_pretrained(
            None, config=new.config, state_dict=restored(fresh), dtype=torch.float32
        )
        assert (await both(engine).sample(ids)).ids == greedy_of(served.eval(), ids, 16)


@pytest.mark.parametrize(
    ("algorithm", "right", "wrong"), [("FP8", 0.75, 0.85), ("NVFP4", 1.5, 1.7)]
)
async def test_probe_allows_for_what_quantization_changes(
    behaviour: Behaviour, tmp_path: Path, algorithm: str, right: float, wrong: float
) -> None:
    """The trainer's own log-probs are those of weights that are not quantized."""
    new = model("qwen3", seed=1)
    save_quantized(tmp_path / "old", model("qwen3", seed=0), algorithm)
    fresh = load_file(save_quantized(tmp_path / "new", new, algorithm) / "model.safetensors")
    served = type(new).from_pretrained(
        None, config=new.config, state_dict=restored(fresh), dtype=torch.float32
    )
    ids = prompt_ids(16, seed=3)
    own = logprobs_of(served.eval(), ids[:1], ids[1:])

    def beside(error: float) -> Probe:
        return Probe(ids=tuple(ids), logprobs=tuple((own - error).tolist()))

    async with started(tmp_path / "old", Role.BOTH) as engine:
        await engine.load(published(new), version=1, probe=beside(right))
        with pytest.raises(UnfitWeights, match="probe_error"):
            await engine.load(published(new), version=2, probe=beside(wrong))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_within_half_a_step(
    tmp_path: Path, family: str, algorithm: str, dtype: torch.dtype
) -> None:
    """E4M3 keeps four significant bits, and steps of 2^-9 near zero. The steps of E2M1 are 1/2
    below 2, 1 below 4, then 2; the scale of a block is rounded to E4M3, so its largest weight is
    between 6 * 16/17 and 6 * 17/16 of it."""
    source = model(family, seed=0).to(dtype)
    plain = plain_of(tmp_path / "plain", source)
    found = loaded(save_quantized(tmp_path / "quantized", source, algorithm), published(source))
    served = restored(found)
    assert served.keys() == plain.keys()
    quantized = quantized_names(plain)
    assert quantized
    for name in quantized:
        weight = plain[name].double()
        if algorithm == "FP8":
            half = weight.abs() / 16 + float(found[f"{name}_scale"]) * 2.0**-10
        else:
            scale = found[f"{name}_scale"].double() * found[f"{name}_scale_2"].double()
            scale = scale.repeat_interleave(16, 1)
            number = weight.abs() / scale
            half = scale * torch.where(number <= 2, 0.25, torch.where(number <= 4, 0.5, 1.0))
        assert bool(((served[name] - weight).abs() <= half * (1 + 1e-6)).all()), name
        largest = max(float(plain[one].abs().max()) for one in fused_with(name, plain))
        whole = found[name + ("_scale" if algorithm == "FP8" else "_scale_2")]
        assert float(whole) == pytest.approx(largest / (448 if algorithm == "FP8" else 2688))
    for name in plain.keys() - set(quantized):
        assert torch.equal(found[name], plain[name]), name


@pytest.mark.parametrize("form", [TensorForm(scalar=()), PackedForm(scalar=())], ids=str)
def test_zeros_tiny_and_huge_numbers_stay_finite(form: MatrixForm) -> None:
    """One matrix has zeros alone, or numbers below the range of a scale."""
    huge = torch.zeros(3, 32)
    huge[0, 0], huge[1, 17], huge[2, 31] = 3e38, -1e30, 1e-44
    for matrix in (torch.zeros(2, 16), torch.full((2, 16), 1e-44), huge, huge.double()):
        (parts,) = form.narrowed([matrix])
        parts = {f"m{suffix}": part for suffix, part in parts.items()}
        assert all(bool(part.float().isfinite().all()) for part in parts.values())
        assert all(bool((part.float() > 0).all()) for name, part in parts.items() if name != "m")
        found = restored(parts)["m"]
        torch.testing.assert_close(
            found, matrix.float(), rtol=0.04, atol=float(matrix.abs().max()) / 2688 / 64 + 1e-38
        )


def test_packed_numbers_round_to_the_nearest_and_ties_to_the_even_code() -> None:
    """The left one of two is in the low bits; larger numbers become the largest. A second block
    has a scale of its own."""
    matrix = torch.zeros(1, 32)
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    matrix[0, :7], matrix[0, 7], matrix[0, 8:15], matrix[0, 15] = bounds, 6.0, -bounds, -1e-9
    matrix[0, 16:] = 448 * 6.0
    (parts,) = PackedForm(scalar=()).narrowed([matrix])
    assert parts["_scale"].float().tolist() == [[1.0, 448.0]]
    assert float(parts["_scale_2"]) == 1.0
    codes = torch.stack([parts[""] & 15, parts[""] >> 4], -1).flatten()
    assert codes[:16].tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 8]
    assert codes[16:].tolist() == [7] * 16
    around = torch.cat([bounds, bounds.nextafter(torch.zeros(7)), bounds.nextafter(bounds + 1)])
    numbers = torch.cat([around, -around, torch.linspace(-6, 6, 21 + 64)])[:96]
    blocks = torch.cat([numbers.view(-1, 12), torch.full((8, 4), 6.0)], 1)
    whole = torch.cat([blocks, torch.full((8, 16), 448 * 6.0)], 1)
    (parts,) = PackedForm(scalar=()).narrowed([whole])
    codes = torch.stack([parts[""] & 15, parts[""] >> 4], -1).flatten(1)
    assert torch.equal(codes[:, :16], nearest_codes(blocks))


def test_blocks_far_below_the_largest_weight_keep_a_scale() -> None:
    """Without a least scale they would be divided by zero."""
    matrix = torch.ones(1, 48)
    matrix[0, 16:32], matrix[0, 32:] = 2e-6, 0.0
    (parts,) = PackedForm(scalar=()).narrowed([matrix])
    assert parts["_scale"].float().tolist() == [[448.0, 2.0**-9, 1.0]]
    found = restored({f"m{suffix}": part for suffix, part in parts.items()})["m"]
    assert float(found[0, 16]) == pytest.approx(2e-6, rel=0.3)
    assert float(found[0, 32:].abs().max()) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_second_rounding_of_the_library_changes_no_number_of_a_shared_scale(
    dtype: torch.dtype,
) -> None:
    """It multiplies the parts of a fused layer by their own scale, and divides them by the largest,
    in the type of the model."""
    torch.manual_seed(0)
    matrices = [torch.randn(64, 64) * factor for factor in (0.02, 0.3, 1e-3)]
    for parts in TensorForm(scalar=()).narrowed(matrices):
        again = parts[""].to(dtype).mul_(parts["_scale"]).div_(parts["_scale"])
        assert equal(again.to(torch.float8_e4m3fn), parts[""])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_published_checkpoint_itself_passes_unchanged(tmp_path: Path, algorithm: str) -> None:
    """Frozen weights: a fleet without a trainer. Their own calibration counts."""
    folder = save_quantized(tmp_path, model("qwen3", seed=0), algorithm)
    own = load_file(folder / "model.safetensors")
    own |= {name: one * 2 for name, one in own.items() if name.endswith(".input_scale")}
    checkpoint = read_checkpoint(str(folder), NEW)
    tensors = {
        name: NamedTensor(
            name=name,
            dtype=checkpoint.types[name],
            shape=tuple(one.shape),
            data=one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, one in own.items()
    }
    found = loaded(folder, tensors)
    assert found.keys() == own.keys()
    assert [name for name in own if not equal(found[name], own[name])] == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_version_may_have_its_tensors_in_any_order(tmp_path: Path, algorithm: str) -> None:
    """Parts of a fused layer far from each other, and scales of one number in an array."""
    source = model("qwen3", seed=0)
    folder = save_quantized(tmp_path, source, algorithm, scalar=(1,))
    fresh = load_file(folder / "model.safetensors")
    tensors = published(source)
    for names in (sorted(tensors), sorted(tensors, key=lambda name: name[::-1], reverse=True)):
        found = loaded(folder, {name: tensors[name] for name in names})
        assert found.keys() == fresh.keys()
        assert [name for name in fresh if not equal(found[name], fresh[name])] == []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_layers_that_draft_may_be_absent(tmp_path: Path, algorithm: str) -> None:
    """With their scales: the library keeps its own."""
    folder = save_quantized(tmp_path, model("qwen3", seed=0), algorithm)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = published(model("qwen3", seed=0))
    found = loaded(folder, {name: one for name, one in tensors.items() if ".layers.2." not in name})
    assert found
    assert not any(".layers.2." in name for name in found)


@pytest.mark.parametrize(
    ("quantization", "shown"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
        ({"quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "FP8_PER_CHANNEL_PER_TOKEN"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_algo": "NVFP4"}, r"NVFP4: no matrix has one scale for the whole tensor"),
    ],
    ids=str,
)
def test_other_quantizations_are_refused_by_name(
    tmp_path: Path, quantization: dict[str, Any], shown: str
) -> None:
    """The tensors are those of FP8."""
    folder = save_quantized(tmp_path, model("qwen3", seed=0), "FP8")
    set_quantization(folder, quantization)
    refuses(folder, rf"quantized \({shown}\), and nothing quantizes")


def test_older_library_is_refused(tmp_path: Path) -> None:
    """1.2.1 loads no parts of a quantized layer."""
    folder = save_quantized(tmp_path, model("qwen3", seed=0), "FP8")
    refuses(folder, r"\(FP8\)", features=surface_for("1.2.1").features())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({f"{DOWN}.input_scale": None}, r"down_proj\.input_scale is missing, or not in float32"),
        (
            {f"{DOWN}.input_scale": torch.ones((), dtype=torch.bfloat16)},
            r"down_proj\.input_scale is missing, or not in float32",
        ),
        ({f"{DOWN}.weight_scale": torch.ones(64)}, r"down_proj\.weight has another form"),
        ({f"{DOWN}.weight": torch.zeros(64, 16, 2).to(torch.uint8)}, "weight has another form"),
        ({"extra": torch.zeros(64, 16).to(torch.float8_e4m3fn)}, "extra has another form"),
        (
            {f"{LAYER}.self_attn.k_scale": torch.ones(())},
            r"self_attn\.k_scale belongs to no matrix: there is no \S*self_attn\.weight",
        ),
        (
            {f"{LAYER}.self_attn.v_proj.v_scale": torch.ones((), dtype=torch.bfloat16)},
            r"v_proj\.v_scale is in bfloat16, not in float32",
        ),
    ],
    ids=["lacks", "rounded", "rows", "stacked", "unknown", "no matrix", "rounded scale"],
)
def test_checkpoint_in_another_form_is_refused(
    tmp_path: Path, algorithm: str, changed: dict[str, torch.Tensor | None], shown: str
) -> None:
    """In one line, with the tensor: the library would compute garbage, or cast the weights."""
    folder = save_quantized(tmp_path, model("qwen3", seed=0), algorithm)
    found = load_file(folder / "model.safetensors")
    for name, tensor in changed.items():
        found.pop(name, None)
        if tensor is not None:
            found[name] = tensor
    save_file(found, folder / "model.safetensors")
    refuses(folder, rf"\({algorithm}: \S*{shown}\), and nothing quantizes")


def refuses(folder: Path, text: str, *, features: frozenset[Feature] = NEW) -> None:
    """A trainer's version, in one line."""
    checkpoint = read_checkpoint(str(folder), features)
    with pytest.raises(UnfitWeights, match=text) as refused:
        checkpoint.fit(published(reference("qwen3")), version=1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("columns", [8, 95, 97, 192, 48])
def test_matrix_of_other_columns_is_refused(tmp_path: Path, algorithm: str, columns: int) -> None:
    """The checkpoint has 96, so 48 bytes of packed numbers."""
    source = model("qwen3", seed=0)
    folder = save_quantized(tmp_path, source, algorithm)
    name = f"{DOWN}.weight"
    wide = NamedTensor(name=name, dtype="float32", shape=(64, columns), data=bytes(256 * columns))
    with pytest.raises(UnfitWeights, match=rf"{name}.* is \["):
        loaded(folder, published(source) | {name: wide})


def test_integers_are_not_quantized(tmp_path: Path) -> None:
    """They would be other numbers."""
    source = model("qwen3", seed=0)
    folder = save_quantized(tmp_path, source, "NVFP4")
    tensors = published(source)
    name = f"{DOWN}.weight"
    integers = replace(tensors[name], dtype="int32")
    with pytest.raises(UnfitWeights, match=rf"{name} is int32, .* has uint8"):
        loaded(folder, tensors | {name: integers})


def test_configuration_may_be_a_file_of_its_own(tmp_path: Path) -> None:
    """As ModelOpt wrote it first."""
    source = model("qwen3", seed=0)
    folder = save_quantized(tmp_path, source, "NVFP4")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    text = json.dumps({"quantization": {"quant_algo": "NVFP4", "group_size": 16}})
    (folder / "hf_quant_config.json").write_text(text)
    assert loaded(folder, published(source)).keys() == read_checkpoint(str(folder)).types.keys()


def test_block_form_shares_no_scale() -> None:
    """Each block has its own."""
    form = BlockForm(block=(2, 2), powers_of_two=False)
    scales = [
        float(parts["_scale_inv"]) for parts in form.narrowed([torch.ones(2, 2), torch.eye(2) * 4])
    ]
    assert scales == pytest.approx([1 / 448, 4 / 448])
