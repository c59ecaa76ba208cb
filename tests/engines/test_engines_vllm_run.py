"""`forge run --engine vllm` on small models with sinks, and with recurrent layers.

Runs by `make test-engines`, in the environment of the services; the worker runs in vLLM's own.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

from forge.cli.local_run.models.models import tiny_directory
from tests.support.suite.forge_run import ForgeRun

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("FORGE_ENGINES") != "vllm" or find_spec("lmdb") is None,
        reason="runs by `make test-engines`, with all services",
    ),
    pytest.mark.timeout(1800),
]
SMALL = (
    *("--engine", "vllm", "--no-console"),
    *("--set", "scheduler.queue.concurrency=16", "--set", "scheduler.queue.batch_groups=4"),
)
OF_FAMILY: dict[str, tuple[str, ...]] = {
    # The trainer computes with the experts that vLLM chose.
    "gpt_oss": (
        *("--set", "gateway.record_experts=true"),
        *("--set", "trainer.routing_replay.enabled=true"),
    ),
    # vLLM's recurrent layers have no other type on a CPU; the run's trainer computes in float32.
    "qwen3_next": ("--set", "decode.dtype=bfloat16"),
}
MOST_GAP = {"gpt_oss": 1e-4, "qwen3_next": 0.02}
"""Mean difference of log-probs between engine and trainer: in float32, and in bfloat16."""


def new_model(family: str, shape: dict[str, Any]) -> Any:
    """Random weights: sinks, windows and experts; or recurrent layers, full attention, experts."""
    torch.manual_seed(0)
    if family == "gpt_oss":
        return GptOssForCausalLM(GptOssConfig(**shape, num_local_experts=4, sliding_window=128))
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **shape,
            num_experts=4,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            layer_types=["linear_attention", "full_attention"],
        )
    )


def save_starting_weights(family: str, root: Path) -> None:
    """In the tiny model's place, with its tokenizer, from a course so short that rewards differ."""
    from services.trainer.starting_weights import tiny

    tokenizer = tiny.make_tokenizer()
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    model = new_model(family, shape).float()
    course = tiny.Course(flawless_steps=150, imperfect_steps=60)
    with Progress(disable=True) as progress:
        tiny.teach(model, tiny.make_schedule(tokenizer, course, seed=0), course, progress)
    if family == "qwen3_next":
        model = model.to(torch.bfloat16)
        model.config.dtype = "bfloat16"
    directory = tiny_directory(root, seed=0)
    directory.parent.mkdir(parents=True)
    tiny.save(model, tokenizer, directory)


@pytest.mark.parametrize("family", MOST_GAP)
def test_run_trains_with_sinks_and_recurrent_layers(family: str, tmp_path: Path) -> None:
    """Each step changes the weights and vLLM serves them; on the first batch the trainer has the
    log-probs that vLLM sampled with, and with sinks the experts that vLLM chose, but for the last
    token of each answer."""
    save_starting_weights(family, tmp_path / "root")
    extra = (*SMALL, *OF_FAMILY[family])
    run = ForgeRun(tmp_path / "run", root=tmp_path / "root", steps=2, extra=extra)
    run.start()
    assert run.finish() == 0, run.explain()
    first, second = run.metrics()
    assert first["logprob_gap_mean"] < MOST_GAP[family]
    assert min(first["grad_norm"], second["grad_norm"]) > 0
    assert "digest equal to that of the weights served" in run.output()
    if family == "gpt_oss":
        for step in (first, second):
            assert step["replayed_tokens"] > 4 * step["unreplayed_tokens"], step
        # Its own router chooses the same ones, but for near ties.
        assert first["replay_changed_share"] < 0.01
