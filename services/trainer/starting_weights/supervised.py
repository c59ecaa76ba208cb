"""Supervised warm start of any model:
`python -m services.trainer.starting_weights.supervised --help`.

Trains a model on conversations (JSON lines of `messages`, optionally `tools`) and writes a model
directory to start from. The loss is the mean negative log-probability of the assistant's tokens,
computed on prefix trees like in the trainer, so turns of a conversation share their history. A
held-out part of the conversations measures the effect.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from forge.core.errors import ForgeError, InvalidArgument
from forge.core.prefix_tree import Sample
from forge.core.token_columns import TOKEN_BYTES
from forge.rl.config import OPTIMIZERS, LearnerConfig, ObjectiveConfig, OptimizerConfig
from forge.rl.device import device_of
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.model.probe import check_policy
from forge.runtime.settings.arguments import COUNT, NATURAL, POSITIVE, SHARE, OneLineParser
from services.trainer.checkpoint.files import write_model
from services.trainer.model.full_weights import load_model, own_tensors
from services.trainer.model.placement import backbone_dtype, recompute
from services.trainer.starting_weights.demonstrations import lesson_samples, read_conversations
from services.trainer.starting_weights.fetch import complete_directory

Lessons = Sequence[Sequence[Sample]]
"""The samples of each conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonCourse:
    """Parameters of the training."""

    epochs: int
    batch_tokens: int
    """Approximate number of tokens in an update's conversations."""
    eval_every: int
    """Updates between evaluations; 0: only before and after training."""
    seed: int


def split(lessons: Lessons, *, share: float, seed: int) -> tuple[Lessons, Lessons]:
    """(taught, held out), the latter at most `share` of all; a function of the seed.

    Conversations with the same first prompt are on the same side, so no prompt is both taught and
    held out.
    """
    of_prompt: dict[bytes, list[int]] = {}
    for number, samples in enumerate(lessons):
        of_prompt.setdefault(_prompt(samples), []).append(number)
    prompts = list(of_prompt)
    Random(seed).shuffle(prompts)
    most = round(len(lessons) * share)
    held: set[int] = set()
    for prompt in prompts:
        if len(held) + len(of_prompt[prompt]) <= most:
            held.update(of_prompt[prompt])
    return (
        [samples for number, samples in enumerate(lessons) if number not in held],
        [lessons[number] for number in sorted(held)],
    )


def _prompt(samples: Sequence[Sample]) -> bytes:
    """Ids up to the first answer; empty without an answer."""
    first = next((each for each in samples if each.trained), None)
    return first.ids[: first.trained[0][0] * TOKEN_BYTES] if first else b""


def batches(lessons: Lessons, course: LessonCourse) -> Iterator[list[Sample]]:
    """Batches of every conversation once per epoch, in another order each time."""
    for epoch in range(course.epochs):
        order = list(lessons)
        Random(f"{course.seed}/{epoch}").shuffle(order)
        batch: list[Sample] = []
        for samples in order:
            batch += samples
            if sum(sample.tokens for sample in batch) >= course.batch_tokens:
                yield batch
                batch = []
        if batch:
            yield batch


@torch.no_grad()
def mean_loss(learner: Learner, lessons: Lessons) -> float:
    """Nats per token of the assistant; 0 without conversations."""
    total, tokens = 0.0, 0
    for samples in lessons:
        for tree in learner.plan(samples).trees:
            logprobs_T, _ = learner.policy.logprobs(tree.to(learner.policy.device))
            total -= float(logprobs_T.double().sum())
            tokens += tree.trained_tokens
    return total / max(1, tokens)


def teach(learner: Learner, taught: Lessons, held: Lessons, course: LessonCourse) -> None:
    """Train, and print a line of JSON per update. Raises `InvalidArgument` when one fails."""
    _print(update=0, taught=len(taught), held_out=len(held), held_out_loss=mean_loss(learner, held))
    for update, batch in enumerate(batches(taught, course), 1):
        result = learner.step(learner.plan(batch), weight_version=0)
        if result.skipped:
            raise InvalidArgument(f"update {update}: {result.skipped}")
        line = {"update": update, "loss": result.loss, "tokens": result.plan.trained_tokens}
        if course.eval_every and update % course.eval_every == 0:
            line["held_out_loss"] = mean_loss(learner, held)
        _print(**line)
    _print(update=learner.steps, held_out_loss=mean_loss(learner, held))


def warm_start(options: argparse.Namespace) -> None:
    """Read, train, save. Raises `ForgeError`; `out` is then not created."""
    if options.out.exists():
        raise InvalidArgument(f"out = {str(options.out)!r} exists already")
    device = device_of(options.device)
    model = load_model(options.model, device=device)
    if options.recompute_activations:
        recompute(model)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    lessons = [
        lesson_samples(conversation, tokenizer, source=f"conversation {number}")
        for number, conversation in enumerate(read_conversations(options.data), 1)
    ]
    course = LessonCourse(
        epochs=options.epochs,
        batch_tokens=options.batch_tokens,
        eval_every=options.eval_every,
        seed=options.seed,
    )
    taught, held = split(lessons, share=options.held_out, seed=options.seed)
    updates = sum(1 for _ in batches(taught, course))
    if not updates:
        raise InvalidArgument(f"data = {str(options.data)!r} has no conversation to train on")
    torch.manual_seed(options.seed)
    policy = TreePolicy(model, autocast=backbone_dtype(options.autocast, device))
    check_policy(policy)
    learner = Learner(policy, _learner_config(options, updates))
    teach(learner, taught, held, course)
    with complete_directory(options.out) as directory:
        write_model(directory, own_tensors(model), options.model)


def _learner_config(options: argparse.Namespace, updates: int) -> LearnerConfig:
    # With advantages of 1, REINFORCE has the gradient of the negative log-likelihood.
    return LearnerConfig(
        optimizer=OptimizerConfig(
            name=options.optimizer,
            learning_rate=options.learning_rate,
            learning_rate_schedule="cosine",
            warmup_steps=max(1, updates // 30),
        ),
        total_updates=updates,
        objective=ObjectiveConfig(algorithm="reinforce"),
        token_budget=options.token_budget,
    )


def _print(**values: float) -> None:
    print(json.dumps(values), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="forge model warm-start", description=(__doc__ or "").split("\n\n")[1]
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model directory to start from")
    add("--data", type=Path, required=True, help="JSON lines of conversations")
    add("--out", type=Path, required=True, help="model directory to write; must not exist")
    add("--epochs", type=COUNT, default=1, help="times that each conversation is trained")
    rate = "rate after the warm-up; falls to a tenth"
    add("--learning-rate", type=POSITIVE, default=1e-5, help=rate)
    add("--batch-tokens", type=COUNT, default=65536, help="tokens of an update's conversations")
    add("--token-budget", type=COUNT, default=16384, help="most tokens in one forward pass")
    held_out = "share of conversations for evaluation only"
    add("--held-out", type=SHARE, default=0.05, help=held_out)
    interval = "updates between evaluations; 0: none"
    add("--eval-every", type=NATURAL, default=50, help=interval)
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="as trainer.optimizer.name")
    add("--seed", type=NATURAL, default=0, help="seed of the order of conversations")
    add("--device", default="cpu", help="torch device, e.g. cpu or cuda:0")
    types = ("none", "auto", "bfloat16")
    add("--autocast", choices=types, default="none", help="type of the backbone")
    add("--recompute-activations", action="store_true", help="less memory, slower")
    add("--threads", type=COUNT, default=1, help="threads of torch")
    return parser


def main(argv: Sequence[str]) -> int:
    """Parse, train, save. Returns the exit code."""
    options = _parser().parse_args(argv)
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    try:
        warm_start(options)
    except (ForgeError, OSError) as error:
        print(f"forge model warm-start: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
