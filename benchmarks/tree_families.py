"""Merged trees of unlike models: `python -m benchmarks.tree_families [--quick] [--json FILE]`.

One forward and backward of CISPO over the same samples of an agent's trajectories, interleaved in
one process with one thread, in CPU seconds:

    tree          merged
    sequences     by sequence: each longest sample once, as a model is trained that cannot merge
    requests      one sample at a time

The models differ in what their layers do beside plain attention: `MODELS` names it. Each way's
gradient is compared with the others' before it is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.support.report import arguments, keep, show
from benchmarks.support.training.tree_workloads import VOCABULARY, turns
from forge.rl.config import LearnerConfig, ObjectiveConfig
from forge.rl.learner.learner import Learner
from forge.rl.model.capabilities import Way
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import gradients_of, relative_error

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "pad_token_id": None,
}
HALF = ["linear_attention", "full_attention"] * 2
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {}),
    "softcap": ("gemma2", {}),
    "sinks": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "narrow_values": (
        "deepseek_v3",
        {
            **EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 128,
            "kv_lora_rank": 64,
            "qk_rope_head_dim": 32,
            "head_dim": 32,
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
    ),
    "gated_delta": (
        "qwen3_next",
        {
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 128,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": HALF,
        },
    ),
    "mamba2": (
        "falcon_h1",
        {"mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 64},
    ),
}
WAYS = ("tree", "sequences", "requests")
LARGEST_ERROR = 1e-3
"""Largest relative error of gradients in fp32."""


def measure(name: str, *, rounds: int, scale: int) -> dict[str, float]:
    """The keys of one model: medians over rounds; single requests, which take long, run once."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SHAPE | settings))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    work = turns("g4", groups=4, turn_count=16, system=1024 // scale, per_turn=62 // scale)
    ways = {
        "tree": Way(),
        "sequences": Way(unmerged="for comparison"),
        "requests": Way(unmerged="for comparison", separate=True),
    }
    policy = TreePolicy(model)
    if policy.unmerged:
        raise SystemExit(f"{name}: {policy.unmerged}")
    objective = ObjectiveConfig(ratio_cap=1.5)
    learner = Learner(policy, LearnerConfig(objective=objective, token_budget=1 << 30))
    plan = learner.plan(work.samples)

    def compute(way: Way) -> Callable[[], object]:
        def gradient() -> None:
            policy.attention.use(way)
            model.zero_grad()
            learner.accumulate(plan)

        return gradient

    runs = {way: compute(ways[way]) for way in WAYS}
    found, first_s = {}, {}
    for way, run in runs.items():
        first_s[way] = timed(run)
        found[way] = gradients_of(model)
    errors = [relative_error(found[way], found["requests"]) for way in WAYS[:-1]]
    if max(errors) > LARGEST_ERROR:
        raise SystemExit(f"{name}: gradients differ by {max(errors):.2g}")
    tree_s, over = [], []
    for _ in range(rounds):
        tree_s.append(timed(runs["tree"]))
        over.append(timed(runs["sequences"]) / tree_s[-1])
    return {
        f"{name}.tree_s": statistics.median(tree_s),
        f"{name}.over_sequences": statistics.median(over),
        f"{name}.over_requests": first_s["requests"] / statistics.median(tree_s),
        f"{name}.gradient_error": max(errors),
        f"{name}.merge_factor": plan.sample_tokens / plan.tree_tokens,
    }


def timed(run: Callable[[], object]) -> float:
    """CPU seconds."""
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    """Measure all models, one after the other."""
    parser = arguments(__doc__, quick="half of the lengths, one round")
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers: dict[str, float] = {}
    for name in options.models.split(","):
        if name not in MODELS:
            parser.error(f"--models: {name!r} is none of {', '.join(MODELS)}")
        one = measure(name, rounds=1 if options.quick else 5, scale=4 if options.quick else 2)
        show(name, one)
        numbers |= one
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
