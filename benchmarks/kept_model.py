"""Skill of the model that a run keeps: `python -m benchmarks.kept_model RUN...`.

    [--quick] [--json FILE]

For the last checkpoint of each run directory of `forge run`, which must be finished: the exact
probability, at temperature 1, of the right answer and the token that ends it, mean over the
held-out prompts that the run stored after training. Ways to compute it:

    master           the float32 master weights in float32: once what a checkpoint kept
    master_autocast  the same under bfloat16 autocast, embeddings, norms and head unrounded: once
                     the trainer's forward pass
    kept_autocast    the kept model likewise: the trainer's forward pass now
    kept_fp32        the kept model, loaded by transformers from the checkpoint, in float32
    kept_bf16        the same in bfloat16, as inference serves it
    kept_fp16        the same in float16

`gap.<way>` is the mean absolute difference of answer tokens' log-probs from kept_bf16, in nats.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.support.report import arguments, keep
from benchmarks.support.training.held_out_answers import (
    answer_logprobs,
    by_domain,
    read_held_out,
)
from services.trainer.checkpoint.reading import master_weights

QUICK_PROMPTS = 8
KEPT = {
    "kept_fp32": torch.float32,
    "kept_bf16": torch.bfloat16,
    "kept_fp16": torch.float16,
}
WAYS = ("master", "master_autocast", "kept_autocast", *KEPT)


def ways(checkpoint: Path) -> Iterator[tuple[str, Any, torch.dtype | None]]:
    """Name, model and autocast type of each way; one model in memory at a time."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    yield "kept_autocast", model, torch.bfloat16
    with torch.no_grad():
        state = model.state_dict()
        for name, tensor in master_weights(checkpoint, adapters=False).read().items():
            state[name].copy_(tensor)
    yield "master", model, None
    yield "master_autocast", model, torch.bfloat16
    del model, state
    for way, dtype in KEPT.items():
        yield way, AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval(), None


def measure(run: Path, *, per_domain: int) -> dict[str, float]:
    """`<domain>.<way>` probabilities, `all` among the domains, and `<way>.gap`."""
    tasks = read_held_out(run, per_domain=per_domain)
    checkpoint = run / "checkpoints" / "latest"
    logprobs: dict[str, list[Tensor]] = {}
    numbers: dict[str, float] = {}
    for way, model, autocast in ways(checkpoint):
        logprobs[way] = answer_logprobs(model, tasks, autocast=autocast)
        probabilities = [float(each.sum().exp()) for each in logprobs[way]]
        for domain, mean in by_domain(tasks, probabilities).items():
            numbers[f"{domain}.{way}"] = mean
    for way, found in logprobs.items():
        pairs = zip(found, logprobs["kept_bf16"], strict=True)
        gaps = torch.cat([(one - other).abs() for one, other in pairs])
        numbers[f"gap.{way}"] = float(gaps.mean())
    return numbers


def show(title: str, numbers: Mapping[str, float]) -> None:
    """A row for each domain, a column for each way."""
    table = Table(title=f"Probability of the right answer: {title}", title_justify="left")
    table.add_column("domain", no_wrap=True)
    for way in WAYS:
        table.add_column(way, justify="right")
    for row in dict.fromkeys(name.rsplit(".", 1)[0] for name in numbers):
        table.add_row(row, *(f"{numbers[f'{row}.{way}']:.3f}" for way in WAYS))
    Console().print(table)


def main() -> None:
    parser = arguments(__doc__, quick=f"{QUICK_PROMPTS} prompts of each domain")
    parser.add_argument("runs", type=Path, nargs="+", help="directories of finished runs")
    options = parser.parse_args()
    disable_progress_bar()
    per_domain = QUICK_PROMPTS if options.quick else 1 << 30
    found: dict[str, float] = {}
    every: list[dict[str, float]] = []
    for run in options.runs:
        every.append(measure(run, per_domain=per_domain))
        show(str(run), every[-1])
        found |= {f"{run.name}.{name}": value for name, value in every[-1].items()}
    if len(every) > 1:
        shared = [name for name in every[0] if all(name in one for one in every)]
        means = {name: statistics.mean(one[name] for one in every) for name in shared}
        show(f"mean of {len(every)} runs", means)
        found |= {f"mean.{name}": value for name, value in means.items()}
    keep(found, options.json)


if __name__ == "__main__":
    main()
