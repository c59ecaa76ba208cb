"""Memory of one tree of 200,000 tokens: `python -m benchmarks.long_tree [--quick] [--json FILE]`.

Measures the peak of a whole gradient (forward, loss, backward) on a small model, with activations
recomputed and the tree relayed in passes of `--token-budget`, and sets beside it what the formula
in `estimate` gives for that model. The same formula then says what models of 1 and 4 billion
weights would take: an upper bound, without fragmentation.

On a GPU, `--device cuda --shape 1.7b`, the model is a Qwen 3 of that size with a bf16 backbone; the
weights are part of both figures then.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from benchmarks.support.report import arguments, keep
from benchmarks.support.training.device_numbers import device_clock
from benchmarks.support.training.tree_workloads import turns
from benchmarks.support.training.ways import SHAPES as MEASURED
from benchmarks.support.training.ways import Bench
from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.model.capabilities import layer_elements
from forge.rl.model.head_logprobs import kept_elements, table_rows
from forge.rl.model.recomputation import recompute_activations
from forge.rl.tree.kv_relay import shared_tokens

GB = 1e9
BYTES_PER_WEIGHT = {"adamw": 4 + 4 + 2 + 8, "adamw_8bit": 4 + 4 + 2 + 2, "LoRA": 4 + 2}
"""Master weight, gradient, bf16 copy, moments; adapters themselves are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense transformer."""

    name: str
    weights: float
    layers: int
    channels: int
    inner: int
    """Inner channels of the feed-forward layer."""
    queries: int
    """Heads times head size."""
    keys: int
    """Key/value heads times head size."""
    vocabulary: int


SHAPES = (
    Shape(name="1B (Llama 3.2)", weights=1.24e9, layers=16, channels=2048, inner=8192, queries=2048,
          keys=512, vocabulary=128256),
    Shape(name="4B (Qwen 3)", weights=4.02e9, layers=36, channels=2560, inner=9728, queries=4096,
          keys=1024, vocabulary=151936),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Properties of a relayed tree that determine its memory."""

    tokens: int
    """Tokens of the largest pass."""
    attended: int
    """Tokens whose keys, values and gradients are held between passes."""
    reach: int
    """Most keys of one pass, its prefix included."""


def passes_of(plan: BatchPlan) -> Passes:
    """Passes of a batch that is one tree."""
    (tree,) = plan.trees
    return Passes(
        tokens=tree.pass_tokens,
        attended=len(shared_tokens([part.prefix_P for part in tree.parts])),
        reach=max(part.tokens + len(part.prefix_P) for part in tree.parts),
    )


def estimate(shape: Shape, passes: Passes, *, key_bytes: int) -> float:
    """Bytes of activations, relayed keys and head, with activations recomputed layer by layer.

    Everything in fp32 but keys and values, of `key_bytes` an element; weights, their gradients and
    the optimizer are apart.
    """
    inputs = 4 * shape.layers * shape.channels
    # Three tables as wide as the layer's widest are those of the way back.
    layer = 4 * layer_elements(shape.channels, shape.inner, queries=shape.queries, keys=shape.keys)
    relayed = shape.layers * 2 * shape.keys * (key_bytes + 4)
    reached = 2 * shape.keys * (key_bytes + 4 + 4)
    states = passes.tokens * shape.channels
    rows = table_rows(states, (shape.vocabulary, shape.channels))
    tables = kept_elements(states) + 2 * rows * shape.vocabulary
    head = max(0, 4 * tables - layer * passes.tokens)  # before the layers go back, not beside them
    return (
        passes.tokens * (inputs + layer) + passes.attended * relayed + passes.reach * reached + head
    )


def measure(
    rollouts: int, budget: int, *, shape: str = "", device: str = "cpu"
) -> tuple[dict[str, float], Passes]:
    """The keys of the gradient, and its passes."""
    on_device = device != "cpu"
    bench = Bench(
        hidden=64, layers=2, shape=shape, device=device,
        autocast=torch.bfloat16 if on_device else None,
    )  # fmt: skip
    recompute_activations(bench.model)
    samples = turns("long", groups=rollouts, turn_count=12, system=8192, per_turn=250).samples
    _, plan = bench.tree(samples[:12], budget=budget)  # first calls choose kernels
    clock = device_clock if on_device else time.process_time
    began = clock()
    peak = bench.peak_bytes(lambda: bench.tree(samples, budget=budget))
    took = clock() - began
    plan = bench.learner.plan(samples)
    passes = passes_of(plan)
    measured = shape_of(bench)
    # Weights and gradients in fp32; peaks do not count what was there before.
    peak += int(4 * measured.weights) if on_device else 0
    weights = (8 if on_device else 4) * measured.weights
    estimated = estimate(measured, passes, key_bytes=2 if on_device else 4) + weights
    found = {
        "tokens": float(plan.tree_tokens),
        "sample_tokens": float(plan.sample_tokens),
        "passes": float(len(plan.trees[0].parts)),
        "pass_tokens": float(passes.tokens),
        "attended_tokens": float(passes.attended),
        "step_s": took,
        "peak_gb": peak / GB,
        "estimated_gb": estimated / GB,
        "peak_bytes_per_token": peak / plan.tree_tokens,
        "estimated_bytes_per_token": estimated / plan.tree_tokens,
    }
    return found, passes


def shape_of(bench: Bench) -> Shape:
    """The shape of the model that is measured."""
    config = bench.model.config
    return Shape(
        name="measured", weights=sum(one.numel() for one in bench.model.parameters()),
        layers=config.num_hidden_layers, channels=config.hidden_size,
        inner=config.intermediate_size, queries=config.num_attention_heads * config.head_dim,
        keys=config.num_key_value_heads * config.head_dim, vocabulary=config.vocab_size,
    )  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, quick="a tenth of the tokens")
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=sorted(MEASURED), default="", help="sizes of a Qwen 3")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found, passes = measure(
        6 if options.quick else 64,
        options.token_budget,
        shape=options.shape,
        device=options.device,
    )
    for name, value in found.items():
        print(f"{name:<28}{value:>14,.1f}")
    chain = Passes(tokens=options.token_budget, attended=200_000, reach=200_000)
    print(f"\n{'estimate, GB':<18}{'optimizer':>14}{'this tree':>12}{'one chain of 200,000':>22}")
    for shape in SHAPES:
        for optimizer, per_weight in BYTES_PER_WEIGHT.items():
            fixed = shape.weights * per_weight
            totals = [(fixed + estimate(shape, one, key_bytes=2)) / GB for one in (passes, chain)]
            print(f"{shape.name:<18}{optimizer:>14}{totals[0]:>12.0f}{totals[1]:>22.0f}")
            key = f"{shape.name.split()[0]}.{optimizer}"
            found |= {f"{key}.tree_gb": totals[0], f"{key}.chain_gb": totals[1]}
    keep(found, options.json)


if __name__ == "__main__":
    main()
