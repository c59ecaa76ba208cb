"""The estimate of a rank's memory, against what a small model takes."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from forge.core.errors import InvalidArgument
from forge.rl.config import MeshShape
from forge.rl.parallel.world import World
from services.trainer import plan
from services.trainer.memory_plan import MemorySettings, Weights, estimate, fitting, size_of
from services.trainer.model.lora import inject
from services.trainer.setting_tables import LoraSettings
from tests.support.rl.models import tiny_model
from tests.support.trainer.memory import SHAPE, TOKENS, measured_bytes

LORA = LoraSettings(rank=8)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("recompute", "frozen", "lora"),
    [(0, 0, None), (0.5, 0, None), (1, 0, None), (1, 2, None), (0, 0, LORA), (1, 0, LORA)],
)
def test_estimate_is_close_to_the_measured_peak(
    recompute: float, frozen: int, lora: LoraSettings | None
) -> None:
    """Of a whole step, in float32, with and without a reference, a teacher and adapters: between
    the peak and a third more."""
    adapt = partial(inject, settings=lora, model_path=Path()) if lora else None
    measured = measured_bytes(World(), recompute=recompute, frozen=frozen, adapt=adapt)
    size = size_of(Qwen3Config(**SHAPE), bfloat16=False, lora=lora)
    other = size_of(Qwen3Config(**SHAPE), bfloat16=False, frozen=True)
    run = MemorySettings(
        shape=MeshShape(),
        context=TOKENS,
        bfloat16=False,
        recompute=recompute,
        frozen=(other,) * frozen,
    )
    found = estimate(size, run)
    print(f"measured {measured}, estimated {found.total:.0f}")
    assert measured <= found.total <= measured * 1.33


@pytest.mark.matrix
def test_estimate_holds_for_training_by_sequence() -> None:
    """Its head computes in chunks, too; the model's own attention may keep less than a tree's."""
    measured = measured_bytes(World(), merged=False)
    size = size_of(Qwen3Config(**SHAPE), bfloat16=False)
    found = estimate(size, MemorySettings(shape=MeshShape(), context=TOKENS, bfloat16=False))
    print(f"measured {measured}, estimated {found.total:.0f}")
    assert measured <= found.total <= measured * 1.33


def test_adapters_leave_frozen_matrices_in_16_bits() -> None:
    """Where the model directory has them so; gradients and moments are of adapters alone, on shards
    too, and no layer's gradient is gathered."""
    whole = size_of(Qwen3Config(**SHAPE, dtype="bfloat16"), bfloat16=True)
    wide = size_of(Qwen3Config(**SHAPE, dtype="float32"), bfloat16=True, lora=LORA)
    size = size_of(Qwen3Config(**SHAPE, dtype="bfloat16"), bfloat16=True, lora=LORA)
    factors = 8 * sum(
        sum(shape) for shape in ((128, 128), (128, 64), (128, 64), (128, 128), *[(128, 384)] * 3)
    )
    assert size.in_layers.trained == SHAPE["num_hidden_layers"] * factors
    assert size.outside == Weights(all=whole.outside.all)
    assert size.activation_bytes < whole.activation_bytes
    matrices = whole.in_layers.all - SHAPE["num_hidden_layers"] * (2 * 128 + 2 * 32)
    assert size.in_layers.narrow == matrices and wide.in_layers.narrow == 0
    for shape in (MeshShape(), MeshShape(dp_shard=2)):
        run = MemorySettings(shape=shape, context=64)
        full, narrow, other = (estimate(one, run) for one in (whole, size, wide))
        assert narrow.weights < other.weights < full.weights * 1.2
        assert narrow.gradients * 2 == narrow.optimizer < full.optimizer / 5
        assert narrow.gathered < full.gathered


def test_shards_divide_what_they_hold() -> None:
    """Weights, gradients and optimizer fall with dp_shard times cp, activations with cp: the first
    range of a sequence, which attends least, has the most tokens."""
    size = size_of(Qwen3Config(**SHAPE), bfloat16=True)
    one = estimate(size, MemorySettings(shape=MeshShape(), context=4096))
    four = estimate(size, MemorySettings(shape=MeshShape(dp_shard=2, cp=2), context=4096))
    assert four.weights == one.weights / 4 and four.optimizer == one.optimizer / 4
    assert one.activations / 2 < four.activations < one.activations * 0.75
    shape = MeshShape(dp_shard=2, cp=2)
    teacher = estimate(size, MemorySettings(shape=shape, context=4096, frozen=(size,)))
    assert teacher.total - four.total == teacher.frozen > four.weights


def test_parts_divide_layers_and_their_activations() -> None:
    """Weights of layers, what a layer gathers, and activations of heads and inner channels fall
    with tp; norms, and the inputs of layers and products, are whole on each part."""
    shape = MeshShape(dp_shard=2, tp=2)
    for config in (Qwen3Config(**SHAPE), Qwen3MoeConfig(**SHAPE, num_experts=8)):
        whole, part = size_of(config, bfloat16=True), size_of(config, bfloat16=True, tp=2)
        assert part.weights == whole.weights and part.outside == whole.outside
        assert whole.in_layers.all / 2 < part.in_layers.all < whole.in_layers.all * 0.52
        assert whole.activation_bytes / 2 < part.activation_bytes < whole.activation_bytes * 0.75
        one = estimate(whole, MemorySettings(shape=MeshShape(dp_shard=2), context=4096))
        two = estimate(part, MemorySettings(shape=shape, context=4096))
        assert one.weights / 2 < two.weights < one.weights * 0.52
        assert two.optimizer == 2 * two.weights and two.gathered < one.gathered
    few = size_of(Qwen3MoeConfig(**SHAPE, num_experts=7), bfloat16=True, tp=2)
    assert (
        few.in_layers.all
        > 0.8 * size_of(Qwen3MoeConfig(**SHAPE, num_experts=7), bfloat16=True).in_layers.all
    )


def test_parts_of_recurrent_layers_are_refused() -> None:
    """As the trainer refuses them, with what to set."""
    config = tiny_model("falcon_h1", torch.float32).config
    with pytest.raises(InvalidArgument, match=r"mesh.tp = 2 .* recurrent; use mesh.dp_shard"):
        size_of(config, bfloat16=False, tp=2)


def test_nearest_settings_that_fit_are_found() -> None:
    """Shards first, then recomputed activations, then ranks of a tree; None if nothing fits."""
    size = size_of(Qwen3Config(**SHAPE), bfloat16=True)
    run = MemorySettings(shape=MeshShape(dp_shard=8), context=1 << 16)
    assert fitting(size, run, device_bytes=estimate(size, run).total) == run
    less = fitting(size, run, device_bytes=estimate(size, run).total * 0.6)
    assert less is not None and less.recompute and less.shape.cp == 1
    assert fitting(size, run, device_bytes=1.0) is None


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--world", "0", "a whole number of at least 1"),
        ("--context", "1k", "a whole number of at least 1"),
        ("--cp", "0", "a whole number of at least 1"),
        ("--device-gib", "0", "a number above 0"),
        ("--recompute-share", "nan", "a number from 0 to 1"),
    ],
)
def test_number_out_of_bounds_is_one_line_with_the_option(
    option: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything reads the model."""
    given = {"--model": "none", "--world": "2", "--context": "8192", "--device-gib": "4"}
    words = [word for pair in (given | {option: value}).items() for word in pair]
    with pytest.raises(SystemExit) as ended:
        plan.main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"forge trainer plan: {option} {value!r} is not allowed: {allowed}; "
        "see forge trainer plan --help\n"
    )


def test_command_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part, whether it fits, and what to change; a bad mesh is one line and exit code 2."""
    Qwen3Config(**SHAPE).save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--world", "2", "--context", "8192", "--device-gib"]
    assert plan.main([*arguments, "4"]) == 0
    fits = capsys.readouterr().out
    assert "fits: " in fits and "activations" in fits
    teacher = tmp_path / "teacher"
    Qwen3Config(**SHAPE | {"vocab_size": 1 << 18}).save_pretrained(teacher)
    assert re.search(r"frozen +0\.00", fits)
    assert plan.main([*arguments, "4", "--teacher", str(teacher)]) == 0
    # Half of its weights, and its embedding and head whole.
    assert re.search(r"frozen +0\.38", capsys.readouterr().out)
    # Not asked for at the hub, which may take half a minute.
    assert plan.main([*arguments, "4", "--reference", "none"]) == 2
    assert capsys.readouterr().err == (
        "forge trainer plan: --reference = 'none' is not a model directory: it has no config.json\n"
    )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "none"}')
    assert plan.main([*arguments, "4", "--reference", str(tmp_path / "broken")]) == 2
    problem = capsys.readouterr().err
    assert problem.startswith(f"forge trainer plan: --reference {tmp_path}/broken: ")
    assert problem.count("\n") == 1
    assert plan.main([*arguments, "0.2"]) == 0
    assert "change: 2 ranks, mesh.dp_shard = 2" in capsys.readouterr().out
    assert plan.main([*arguments, "4", "--lora-rank", "8", "--lora-targets", "q_proj,o_proj"]) == 0
    assert "0.02 million of them trained" in capsys.readouterr().out
    assert plan.main([*arguments, "4", "--lora-rank", "8", "--lora-targets", "w_proj"]) == 2
    assert "lora.targets = ['w_proj']" in capsys.readouterr().err
    assert plan.main([*arguments, "4", "--tp", "2"]) == 0
    assert "mesh.dp_shard = 1, mesh.cp = 1, mesh.tp = 2" in capsys.readouterr().out
    assert plan.main([*arguments[:2], "--world", "3", *arguments[4:], "4", "--tp", "3"]) == 2
    assert "mesh.tp = 3 is not allowed for Qwen3ForCausalLM: num_" in capsys.readouterr().err
    assert plan.main([*arguments, "4", "--dp-shard", "3"]) == 2
    assert "mesh.dp_shard = 3" in capsys.readouterr().err
