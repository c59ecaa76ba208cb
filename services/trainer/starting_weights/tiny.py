"""Creates the tiny policy's starting weights:
`python -m services.trainer.starting_weights.tiny --out DIR`.

A short supervised warm start on demonstrations of a flawless teacher, then of an imperfect one that
guesses, looks up wrong facts and forgets summaries. The result solves every task unreliably: a
starting point for reinforcement learning. The same seed gives the same weights on the same machine.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from forge.core.errors import FailedPrecondition
from services.trainer.starting_weights.fetch import complete_directory
from services.trainer.starting_weights.tiny_model.lessons import (
    Lesson,
    batches,
    lessons,
    padded,
    texts,
)
from services.trainer.starting_weights.tiny_model.policy import new_policy
from services.trainer.starting_weights.tiny_model.tokenizer import build_tokenizer, chat_template

VOCABULARY_ROUNDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Lengths and learning rate of the warm start."""

    flawless_steps: int = 900
    """Sums are learned late and suddenly: after 800 steps one seed in four had not learned them."""
    imperfect_steps: int = 220
    batch_tokens: int = 290
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    cooldown_share: float = 0.5
    """Share of the steps, at the end, over which the learning rate falls to a twentieth."""

    @property
    def steps(self) -> int:
        """All steps of the warm start."""
        return self.flawless_steps + self.imperfect_steps

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        rise = min(1.0, (step + 1) / self.warmup_steps)
        fall = min(1.0, (self.steps - step) / (self.steps * self.cooldown_share))
        return self.learning_rate * rise * max(0.05, fall)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer over the texts of the four domains; the same for every seed."""
    template = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer([]).backend_tokenizer)
    template.chat_template = chat_template()
    return build_tokenizer(texts(template, "vocabulary", VOCABULARY_ROUNDS, flawless=False))


def course_progress(console: Console) -> Progress:
    """The bar of a course: steps, the last loss, elapsed time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}  {task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def teach(
    policy: Qwen3ForCausalLM, schedule: Sequence[list[Lesson]], course: Course, progress: Progress
) -> None:
    """Supervised steps over the schedule, with loss on the teacher's tokens alone. Without a
    terminal it prints ten lines in place of the bar."""
    lines_every = 0 if progress.console.is_terminal else max(1, len(schedule) // 10)
    bar = progress.add_task("warm start", total=len(schedule), loss="")
    optimizer = torch.optim.AdamW(
        policy.parameters(), betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    policy.train()
    for step, batch in enumerate(schedule):
        for group in optimizer.param_groups:
            group["lr"] = course.rate(step)
        ids_BT, taught_BT = padded(batch, policy.config.pad_token_id)
        hidden_BTH = policy.model(input_ids=ids_BT[:, :-1]).last_hidden_state
        taught = taught_BT[:, 1:]
        loss = F.cross_entropy(policy.lm_head(hidden_BTH[taught]), ids_BT[:, 1:][taught])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.update(bar, advance=1, loss=f"loss {loss.item():.3f}")
        if lines_every and (step + 1) % lines_every == 0:
            line = f"warm start: step {step + 1} of {len(schedule)}, loss {loss.item():.3f}"
            progress.console.print(line, highlight=False)


def make_schedule(
    tokenizer: PreTrainedTokenizerFast, course: Course, *, seed: int
) -> list[list[Lesson]]:
    """Batches in the order of training."""
    rng = Random(seed)

    def phase(name: str, steps: int, *, flawless: bool) -> list[list[Lesson]]:
        chosen: list[list[Lesson]] = []
        part = 0
        while len(chosen) < steps:
            rows = lessons(tokenizer, f"{seed}/{name}/{part}", 100, flawless=flawless)
            chosen += batches(rows, course.batch_tokens, rng)
            part += 1
        return chosen[:steps]

    return [
        *phase("flawless", course.flawless_steps, flawless=True),
        *phase("imperfect", course.imperfect_steps, flawless=False),
    ]


def save(policy: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a complete transformers directory, in place of an earlier one."""
    policy.eval()
    with complete_directory(out) as directory:
        policy.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        GenerationConfig(
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        ).save_pretrained(directory)
        if out.exists():
            shutil.rmtree(out)


def warm_start(out: Path, *, seed: int, course: Course, console: Console) -> None:
    """Create the starting weights of `seed` and save them under `out`."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    console.print(f"Making the tiny model's starting weights (seed {seed}) ...", highlight=False)
    policy = new_policy(tokenizer, seed=seed)
    schedule = make_schedule(tokenizer, course, seed=seed)
    with course_progress(console) as progress:
        teach(policy, schedule, course, progress)
    save(policy, tokenizer, out)


def main(argv: Sequence[str]) -> int:
    """Parse, create, save. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m services.trainer.starting_weights.tiny",
        description=(__doc__ or "").split("\n\n")[1],
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and demonstrations")
    # At this size, several threads wait for each other longer than they compute.
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    options = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    try:
        warm_start(options.out, seed=options.seed, course=Course(), console=Console())
    except FailedPrecondition as error:
        print(f"warm start: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
