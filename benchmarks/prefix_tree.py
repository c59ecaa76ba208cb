"""Training cost of merged prefix trees: `python -m benchmarks.prefix_tree [--quick] [--json FILE]`.

One forward and backward of CISPO over the same samples, three ways, interleaved in one process:

    per_request  one sample at a time through the model's stock attention
    varlen       samples packed into one sequence, each attending itself alone
    tree         merged

Every way computes logits for the trained tokens alone. `flop_bound` is the ratio of operations,
per request over tree: what merging could gain at equal speed per operation. Per-request *is* how a
trainer without merging sees multi-turn agents: one sample per LLM call.

With one thread, times are CPU seconds, which a shared machine disturbs less than the wall clock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from forge.core.packing import Node, Sample, TreePlan
from forge.rl.batch_plan import BatchPlan
from forge.rl.learner import Learner, LearnerConfig
from forge.rl.losses import ObjectiveConfig, cispo_loss
from forge.rl.policy import TreePolicy
from forge.rl.tree_attention import TREE_ATTENTION
from forge.rl.tree_batch import build_tree_batch

VOCABULARY = 4096
RATIO_CAP = 5.0
UNSPLIT = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Samples as an agent's trajectories would give them."""

    name: str
    describe: str
    samples: list[Sample]


def make_workloads(scale: int) -> list[Workload]:
    """All of them; `scale` divides lengths."""
    return [
        turns("g4", groups=4, turn_count=16, system=1024 // scale, per_turn=62 // scale),
        turns("g8", groups=8, turn_count=16, system=1024 // scale, per_turn=62 // scale),
        turns("forty", groups=16, turn_count=50, system=256 // scale, per_turn=16 // scale),
        forked("forked", groups=4, turn_count=12, system=1024 // scale, per_turn=96 // scale),
        single("trajectory", groups=8, prompt=1024 // scale, answer=1024 // scale),
    ]


def turns(name: str, *, groups: int, turn_count: int, system: int, per_turn: int) -> Workload:
    """A group of linear trajectories; one sample per turn, half of each turn was sampled."""
    rng = Random(name)
    prompt = ids(rng, system)
    samples = []
    for _ in range(groups):
        history = prompt
        for _ in range(turn_count):
            history = history + ids(rng, per_turn)
            samples.append(sample(rng, history, sampled=per_turn // 2))
    shape = f"{groups} x {turn_count} turns of {per_turn}, system prompt {system}"
    return Workload(name=name, describe=shape, samples=samples)


def forked(name: str, *, groups: int, turn_count: int, system: int, per_turn: int) -> Workload:
    """Thinking is stripped from the history, and the history is folded once on the way."""
    rng = Random(name)
    prompt = ids(rng, system)
    samples = []
    for _ in range(groups):
        history = prompt
        for turn in range(turn_count):
            answer = ids(rng, per_turn // 4)
            spoken = ids(rng, per_turn // 2) + answer
            samples.append(sample(rng, history + spoken, sampled=len(spoken)))
            history = history + answer + ids(rng, per_turn // 4)
            if turn == turn_count // 2:
                history = prompt + ids(rng, per_turn)
    shape = f"{groups} x {turn_count} turns of {per_turn}, thoughts stripped, folded once"
    return Workload(name=name, describe=shape, samples=samples)


def single(name: str, *, groups: int, prompt: int, answer: int) -> Workload:
    """One answer per rollout: what prefix sharing gains at the least."""
    rng = Random(name)
    shared = ids(rng, prompt)
    samples = [sample(rng, shared + ids(rng, answer), sampled=answer) for _ in range(groups)]
    shape = f"{groups} x {answer} tokens on a prompt of {prompt}"
    return Workload(name=name, describe=shape, samples=samples)


def ids(rng: Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def sample(rng: Random, tokens: Sequence[int], *, sampled: int) -> Sample:
    return Sample(
        ids=array("i", tokens).tobytes(),
        trained=((len(tokens) - sampled, len(tokens)),),
        behavior_logprobs=array("f", [rng.uniform(-9, -8) for _ in range(sampled)]).tobytes(),
        weight_versions=bytes(4 * sampled),
        advantages=array("f", [rng.uniform(-1, 1)] * sampled).tobytes(),
    )


class Bench:
    """One model, and the ways to get its gradient."""

    def __init__(self, *, hidden: int, layers: int) -> None:
        torch.manual_seed(0)
        self.model: Any = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=VOCABULARY,
                hidden_size=hidden,
                intermediate_size=3 * hidden,
                num_hidden_layers=layers,
                num_attention_heads=hidden // 64,
                num_key_value_heads=max(1, hidden // 128),
                head_dim=64,
                tie_word_embeddings=True,
            )
        )
        self.learner = Learner(
            TreePolicy(self.model),
            LearnerConfig(objective=ObjectiveConfig(ratio_cap=RATIO_CAP), token_budget=UNSPLIT),
        )

    def tree(self, samples: Sequence[Sample]) -> tuple[float, BatchPlan]:
        """Merged."""
        plan = self.learner.plan(samples)
        loss, _ = self.learner.accumulate(plan)
        return loss, plan

    def varlen(self, samples: Sequence[Sample], budget: int) -> float:
        """Packed without merging, in passes of at most `budget` tokens."""
        packs: list[list[Sample]] = [[]]
        for one in samples:
            if packs[-1] and sum(each.tokens for each in packs[-1]) + one.tokens > budget:
                packs.append([])
            packs[-1].append(one)
        channels = self.learner.policy.channels
        trees = tuple(build_tree_batch(unmerged(pack), pack, channels=channels) for pack in packs)
        return self.learner.accumulate(BatchPlan(trees=trees, plan_s=0.0))[0]

    def per_request(self, samples: Sequence[Sample]) -> float:
        """One at a time, as transformers does it."""
        normalizer = sum(one.trained_tokens for one in samples)
        self.model.zero_grad()
        self.model.set_attn_implementation("sdpa")
        total = 0.0
        for one in samples:
            tokens_L = torch.frombuffer(bytearray(one.ids), dtype=torch.int32).long()
            ((start, end),) = one.trained
            rows = torch.arange(start - 1, end - 1)
            logits_TV = self.model(
                input_ids=tokens_L[None], logits_to_keep=rows, use_cache=False
            ).logits[0]
            logprobs_T = logits_TV.log_softmax(-1).gather(-1, tokens_L[start:end, None])[:, 0]
            behavior_T = torch.frombuffer(bytearray(one.behavior_logprobs), dtype=torch.float32)
            advantages_T = torch.frombuffer(bytearray(one.advantages), dtype=torch.float32)
            loss = cispo_loss(logprobs_T, behavior_T, advantages_T, ratio_cap=RATIO_CAP)
            loss = loss.sum() / normalizer
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self.model.set_attn_implementation(TREE_ATTENTION)
        return total

    def gradients(self) -> torch.Tensor:
        """All of them in one vector."""
        return torch.cat(
            [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        ).clone()

    def flops(self, tokens: int, pairs: int, rows: int) -> float:
        """Forward and backward: 6 per weight and token, 12 per pair and channel, the head's."""
        config = self.model.config
        trunk = sum(p.numel() for p in self.model.model.layers.parameters())
        head = 6 * rows * VOCABULARY * config.hidden_size
        attention = 12 * pairs * self.learner.policy.channels * config.num_hidden_layers
        return float(6 * trunk * tokens + attention + head)


def unmerged(samples: Sequence[Sample]) -> TreePlan:
    """A plan in which every sample is a root of its own."""
    nodes, trained = [], []
    start = 0
    for one in samples:
        end = start + one.tokens
        nodes.append(Node(start, end, end, 0, -1))
        trained.append(tuple((start + low, start + high) for low, high in one.trained))
        start = end
    return TreePlan(
        ids=b"".join(one.ids for one in samples),
        nodes=tuple(nodes),
        samples=tuple(range(len(samples))),
        trained=tuple(trained),
    )


def measure(
    bench: Bench, workload: Workload, *, rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """The keys of one workload, medians over rounds."""
    samples = workload.samples
    loss, plan = bench.tree(samples)
    merged = bench.gradients()
    budget = max(plan.tree_tokens, max(one.tokens for one in samples))
    ways: dict[str, Callable[[], object]] = {
        "tree": lambda: bench.tree(samples),
        "varlen": lambda: bench.varlen(samples, budget),
        "per_request": lambda: bench.per_request(samples),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    expected = 0.0
    for _ in range(rounds):
        for way, run in ways.items():
            began = clock()
            outcome = run()
            seconds[way].append(clock() - began)
            if way == "per_request":
                expected = float(outcome)  # type: ignore[arg-type]
    reference = bench.gradients()
    time_s = {way: statistics.median(values) for way, values in seconds.items()}
    bound = bound_of(bench, samples, plan)
    speedup = time_s["per_request"] / time_s["tree"]
    return {
        "tree_tokens": plan.tree_tokens,
        "sample_tokens": plan.sample_tokens,
        "tree_s": time_s["tree"],
        "varlen_s": time_s["varlen"],
        "per_request_s": time_s["per_request"],
        "plan_s": plan.plan_s,
        "speedup_vs_per_request": speedup,
        "speedup_vs_varlen": time_s["varlen"] / time_s["tree"],
        "flop_bound": bound,
        "efficiency": speedup / bound,
        "loss_err": abs(loss - expected) / abs(expected),
        "grad_err": float((merged - reference).norm() / reference.norm()),
    }


def bound_of(bench: Bench, samples: Sequence[Sample], plan: BatchPlan) -> float:
    """Operations of per-request training over those of the tree."""

    def causal(count: int) -> int:
        return count * (count + 1) // 2

    apart = bench.flops(
        sum(one.tokens for one in samples),
        sum(causal(one.tokens) for one in samples),
        plan.trained_tokens,
    )
    (tree,) = plan.trees
    pairs = int((tree.positions_L + 1).sum())
    return apart / bench.flops(tree.tokens, pairs, len(tree.head.places_R))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="smaller model, shorter sequences, one round"
    )
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="workloads to run")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    bench = Bench(hidden=128, layers=2) if options.quick else Bench(hidden=256, layers=4)
    bench.tree(make_workloads(16)[0].samples)  # first calls allocate and choose kernels
    columns = ("speedup_vs_per_request", "speedup_vs_varlen", "flop_bound", "efficiency")
    print(f"{'workload':<12}{'tokens':>18}" + "".join(f"{name:>24}" for name in columns))
    numbers: dict[str, float] = {}
    for workload in make_workloads(4 if options.quick else 1):
        if options.only and workload.name not in options.only:
            continue
        found = measure(bench, workload, rounds=1 if options.quick else 3, clock=clock)
        numbers |= {f"{workload.name}.{key}": value for key, value in found.items()}
        tokens = f"{found['sample_tokens']:.0f} > {found['tree_tokens']:.0f}"
        print(
            f"{workload.name:<12}{tokens:>18}"
            + "".join(f"{found[name]:>24.2f}" for name in columns)
            + f"   {workload.describe}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
