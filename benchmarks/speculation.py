"""Acceptance and decode speed of draft heads while the policy trains.

    python -m benchmarks.speculation [--quick] [--json FILE] [--model tiny|smollm2|DIRECTORY]
                                     [--steps N] [--root DIRECTORY] [--device cuda:0]
                                     [--dtype bfloat16] [--points N] [--state FILE]
                                     [--heads KIND ...]

Heads are trained on samples of the starting policy. Then the policy takes optimizer steps on
rewards of its own samples, drawn by the embedded engine, with draft heads of four kinds beside it:

    frozen     Top-K KL before, no update since
    online     Top-K KL before, and an update with each batch of the policy
    tv         total variation before, no update since
    tv_online  total variation before, and an update with each batch

None of them affects the policy: all follow the same one. At `--points` steps, the first and the
last among them, the engine answers held-out prompts, one at a time and at temperature 1, each
without drafts and then with them:

    acceptance       share of accepted first drafts
    tokens_per_step  tokens of an answer in one decode step, on average
    speedup          tokens per CPU second of decode steps over those without drafts, with as many
                     drafts as there are heads
    adaptive         the same with as many drafts as pay by the engine's own choice (not for larger
                     models on a CPU, whose answers take long)
    answer_speedup   as `speedup`, with all CPU time from the hand-off to the last token: tasks of
                     the event loop, messages, copies; the shorter the answers, the more of it

On a GPU, policy and engines are there, and times are those of the clock, steps until the device has
finished. Answers of larger models are longer: without examples of bare answers, they show their
work. `--dtype` is that of the engines; the policy computes in float32. With `--state` the run is
kept in a file every few steps, and a run that was ended continues from it. `--heads` trains and
measures these kinds alone.

Keys without a step are of the last step, those with `at_0` of the first one; `kept` is acceptance
at the end over that at the beginning.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import torch

from benchmarks.support.inference.drafting_policy import (
    HEADS,
    Engine,
    Policy,
    StepClock,
    Task,
    engine,
)
from benchmarks.support.report import arguments, keep, show
from forge.cli.local_run.models.models import ensure_model
from forge.core.prefix_tree import Sample
from forge.rl.config import MtpLoss
from forge.rl.mtp.training import MtpTraining
from services.inference.engines.embedded.metrics import ACCEPTED, DRAFTED

PLAIN, FIXED, ADAPTIVE = "plain", "fixed", "adaptive"
STEPS = StepClock()
LOSSES: dict[str, MtpLoss] = {
    "frozen": "topk_kl", "online": "topk_kl", "tv": "tv", "tv_online": "tv",
}  # fmt: skip
"""Of each kind of heads."""
COPIES = {"online": "frozen", "tv_online": "tv"}
"""Heads that start as copies of others: before the first step both have the same figures."""
KEPT_EVERY = 5
"""Steps, or a multiple of 4 of updates of the heads before the first, after which `--state` is
written."""
EAGER = 4
"""Answers that each engine gives at first, unmeasured, on a GPU: it compiles and captures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Amount of computation."""

    steps: int
    pretraining: int
    """Updates of the heads on samples of the starting policy."""
    tasks: int
    each: int
    """Rollouts of a task."""
    prompts: int
    """Held-out prompts of a measurement."""
    rounds: int
    tokens: int
    """Most tokens of an answer."""
    points: int
    """Measurements, the first before the first step."""
    learning_rate: float
    worked: bool = False
    """Whether answers show the work."""
    adaptive: bool = True
    """Whether to measure the engine's own choice of drafts."""
    update_tokens: int = 0
    """`mtp.update_tokens` of all heads."""


TINY = Size(
    steps=50, pretraining=200, tasks=6, each=6, prompts=20, rounds=2, tokens=40, points=2,
    learning_rate=5e-4,
)  # fmt: skip
LARGE = replace(
    TINY, pretraining=60, tasks=4, each=4, prompts=16, rounds=1, tokens=64, learning_rate=2e-5,
    worked=True, adaptive=False, update_tokens=256,
)  # fmt: skip
ON_GPU = replace(LARGE, pretraining=150, tasks=8, prompts=12, tokens=96, points=3, adaptive=True)


@dataclass(slots=True, kw_only=True)
class Measured:
    """Sums over answers."""

    tokens: int = 0
    spent_s: float = 0.0
    steps_s: float = 0.0
    answers: int = 0
    first_drafts: float = 0.0
    first_accepted: float = 0.0
    accepted: float = 0.0

    @property
    def speed(self) -> float:
        """Tokens per second of decode steps; prefill samples the first of an answer."""
        return (self.tokens - self.answers) / self.steps_s

    @property
    def answer_speed(self) -> float:
        """Tokens per second from the hand-off to the last token."""
        return (self.tokens - self.answers) / self.spent_s

    @property
    def tokens_per_step(self) -> float:
        """A step samples one token beside the accepted drafts; prefill samples the first one."""
        return (self.tokens - self.answers) / (self.tokens - self.answers - self.accepted)


def counts() -> tuple[float, float, float]:
    """First drafts, the accepted ones of them, and all accepted drafts so far."""
    taken = [ACCEPTED.labels(str(head + 1))._value.get() for head in range(HEADS)]
    return DRAFTED.labels("1")._value.get(), taken[0], sum(taken)


async def answer(policy: Policy, served: Engine, task: Task, seed: int, sums: Measured) -> None:
    """One request alone."""
    before, steps_s = counts(), STEPS.steps_s
    found = await served.sample(task.ids, replace(policy.sampling, seed=seed))
    sums.tokens += len(found.ids)
    sums.answers += 1
    sums.spent_s += found.decode_s
    sums.steps_s += STEPS.steps_s - steps_s
    first, taken, accepted = (now - then for now, then in zip(counts(), before, strict=True))
    sums.first_drafts += first
    sums.first_accepted += taken
    sums.accepted += accepted


async def measure(
    policy: Policy,
    kinds: Mapping[str, MtpTraining],
    engines: Mapping[str, Engine],
    tasks: list[Task],
    rounds: int,
) -> dict[str, float]:
    """The figures of every kind under the present weights."""
    found: dict[str, float] = {}
    await engines[PLAIN].load(policy.published(None))
    for kind, heads in kinds.items():
        drafting = [mode for mode in engines if mode != PLAIN]
        for mode in drafting:
            await engines[mode].load(policy.published(heads))
        if STEPS.device.type != "cpu":
            for seed in range(EAGER):
                for served in (engines[PLAIN], engines[FIXED]):
                    await answer(policy, served, tasks[0], seed, Measured())
        if ADAPTIVE in engines:
            for seed, task in enumerate(tasks):
                # Acceptance of other heads is to be forgotten.
                await answer(policy, engines[ADAPTIVE], task, seed, Measured())
        sums = {mode: Measured() for mode in engines}
        for _ in range(rounds):
            for seed, task in enumerate(tasks):
                # Engines in turn, request by request: other work on the machine changes all alike.
                for mode, served in engines.items():
                    await answer(policy, served, task, seed, sums[mode])
        plain, fixed = sums[PLAIN], sums[FIXED]
        found[f"{kind}.tokens_s"] = fixed.speed
        found[f"{kind}.acceptance"] = fixed.first_accepted / max(1.0, fixed.first_drafts)
        found[f"{kind}.tokens_per_step"] = fixed.tokens_per_step
        found[f"{kind}.speedup"] = fixed.speed / plain.speed
        if ADAPTIVE in sums:
            found[f"{kind}.adaptive"] = sums[ADAPTIVE].speed / plain.speed
        found[f"{kind}.answer_speedup"] = fixed.answer_speed / plain.answer_speed
    return found


class KeptRun:
    """A run's state after some steps, in a file; without a file, of this process alone."""

    def __init__(
        self, file: Path | None, policy: Policy, about: str, *, update_tokens: int
    ) -> None:
        """`about`: two runs with the same text do the same."""
        self.step = 0
        self.found: dict[str, float] = {}
        self.updates = 0
        """Updates of the heads before the first step."""
        self.kinds = {
            kind: policy.new_heads(loss, update_tokens=update_tokens)
            for kind, loss in LOSSES.items()
        }
        self.samples: list[Sample] = []
        """Of the starting policy."""
        self._file, self._policy, self._about = file, policy, about
        if file is None or not file.exists():
            return
        state = torch.load(file, weights_only=False)
        if state["about"] != about:
            raise SystemExit(f"--state {file} is of another run: {state['about']}, not {about}")
        self.step, self.found, self.updates = state["step"], state["found"], state["updates"]
        self.samples = state["samples"]
        policy.load_state_dict(state["policy"])
        for kind, heads in self.kinds.items():
            heads.load_state_dict(state["kinds"][kind])
        print(f"continues after {self.updates} updates and {self.step} steps", flush=True)

    def keep(self) -> None:
        """Write the file."""
        if self._file is None:
            return
        state = {
            "about": self._about,
            "step": self.step,
            "found": self.found,
            "updates": self.updates,
            "samples": self.samples,
            "policy": self._policy.state_dict(),
            "kinds": {kind: heads.state_dict() for kind, heads in self.kinds.items()},
        }
        unfinished = self._file.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.replace(self._file)

    def copy_heads(self) -> None:
        """Let the heads of `COPIES` begin as those that they are copies of."""
        for copy, original in COPIES.items():
            self.kinds[copy].load_state_dict(deepcopy(self.kinds[original].state_dict()))


async def pretrain(
    policy: Policy, served: Engine, size: Size, kept: KeptRun, heads: Sequence[MtpTraining]
) -> None:
    """Train these heads on samples of the starting policy."""
    first = kept.updates
    for update in range(first, size.pretraining):
        if update % 20 == 0:
            # The policy stays: batches are drawn again from many samples.
            kept.samples += (await policy.rollouts(served, policy.tasks(2 * size.tasks), each=4))[0]
        batch = Random(update).sample(kept.samples, min(len(kept.samples), 2 * size.tasks))
        policy.train_heads(heads, policy.learner.plan(batch))
        kept.updates = update + 1
        if kept.updates % (4 * KEPT_EVERY) == 0:
            kept.keep()
    if first < size.pretraining:
        print(f"{size.pretraining} updates of the heads", flush=True)
        kept.copy_heads()
        kept.keep()


def _of_copies(figures: Mapping[str, float]) -> dict[str, float]:
    """Figures of heads that were copied, before their first update."""
    return {
        f"{copy}.{key.partition('.')[2]}": value
        for copy, original in COPIES.items()
        for key, value in figures.items()
        if key.startswith(f"{original}.")
    }


async def run(
    path: Path, size: Size, dtype: str, state: Path | None, chosen: Sequence[str]
) -> dict[str, float]:
    """All figures of the chosen kinds of heads."""
    policy = Policy(
        path, learning_rate=size.learning_rate, head_rate=2e-3, tokens=size.tokens,
        device=STEPS.device, worked=size.worked,
    )  # fmt: skip
    start = partial(engine, path, clock=STEPS, dtype=dtype)
    held_out = policy.tasks(size.prompts, Random("held out"))
    about = f"{path.name} {dtype} {size} {chosen}"
    kept = KeptRun(state, policy, about, update_tokens=size.update_tokens)
    kinds, found = {kind: kept.kinds[kind] for kind in chosen}, kept.found
    originals = {COPIES.get(kind, kind) for kind in chosen}
    first = {kind: heads for kind, heads in kept.kinds.items() if kind in originals}
    async with AsyncExitStack() as stack:
        engines = {
            mode: await stack.enter_async_context(
                start(drafts=0 if mode == PLAIN else HEADS, adaptive=mode == ADAPTIVE)
            )
            for mode in ((PLAIN, FIXED, ADAPTIVE) if size.adaptive else (PLAIN, FIXED))
        }
        sampler = await stack.enter_async_context(start(drafts=0, adaptive=False))
        await sampler.load(policy.published(None))
        await pretrain(policy, sampler, size, kept, [*first.values()])
        measured_at = {round(size.steps * n / (size.points - 1)) for n in range(size.points)}
        while True:
            step = kept.step
            if step in measured_at and f"{chosen[0]}.speedup.at_{step}" not in found:
                torch.set_num_threads(1)
                measured = kinds if step else first
                figures = await measure(policy, measured, engines, held_out, size.rounds)
                if not step:
                    figures |= _of_copies(figures)
                show(f"after {step} steps", figures)
                found |= figures | {f"{key}.at_{step}": value for key, value in figures.items()}
                kept.keep()
            if step == size.steps:
                break
            samples, reward = await policy.rollouts(
                sampler, policy.tasks(size.tasks), each=size.each
            )
            found.setdefault("reward.at_0", reward)
            found["reward"] = reward
            plan = policy.learner.plan(samples)
            policy.train_heads([one for kind, one in kinds.items() if kind in COPIES], plan)
            policy.learner.step(plan, weight_version=1)
            await sampler.load(policy.published(None))
            kept.step += 1
            if kept.step % KEPT_EVERY == 0:
                kept.keep()
            if kept.step % 10 == 0:
                print(f"{kept.step} steps, reward {reward:.3f}", flush=True)
    for kind in kinds:
        found[f"{kind}.kept"] = found[f"{kind}.acceptance"] / found[f"{kind}.acceptance.at_0"]
    return found


def main() -> None:
    parser = arguments(__doc__ or "", quick="the tiny model, 4 steps, few prompts")
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or a directory")
    parser.add_argument("--steps", type=int, help="optimizer steps of the policy")
    parser.add_argument("--points", type=int, help="measurements, at least 2")
    parser.add_argument("--root", type=Path, default=Path(".forge"), help="models are kept here")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of the engines")
    parser.add_argument("--heads", nargs="+", choices=LOSSES, default=[*LOSSES])
    parser.add_argument("--state", type=Path, help="keep the run here, and continue from it")
    options: argparse.Namespace = parser.parse_args()
    STEPS.device = torch.device(options.device)
    path = asyncio.run(ensure_model(options.model, seed=0, root=options.root))
    large = LARGE if STEPS.device.type == "cpu" else ON_GPU
    size = TINY if options.model == "tiny" else large
    if options.quick:
        size = replace(TINY, steps=4, pretraining=40, prompts=4, rounds=1, points=2)
    if options.steps is not None:
        size = replace(size, steps=options.steps)
    if options.points is not None:
        size = replace(size, points=max(2, options.points))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with STEPS.running():
        found = asyncio.run(run(path, size, options.dtype, options.state, options.heads))
    show(f"draft heads beside {options.model}, {size.steps} steps", found)
    keep(found, options.json)


if __name__ == "__main__":
    main()
