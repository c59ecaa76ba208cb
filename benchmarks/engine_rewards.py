"""Held-out reward of each engine, without training: `python -m benchmarks.engine_rewards`.

    [--model smollm2|DIRECTORY] [--engines NAME...] [--tasks N] [--attempts N] [--seed N]
    [--root DIR] [--quick] [--json FILE]

The held-out tasks of `forge run --seed N`, answered N times each at temperature 1, and once
greedily, through a router and a worker in float32. The engine vllm runs in the environment of
`make engine-vllm`. The row transformers draws from the model's own forward. Keys of the JSON:

    <engine>.reward           mean of all attempts
    <engine>.reward_err       its standard error: the tasks are fixed, the attempts are random
    <engine>.greedy_equal     share of greedy answers that are those of transformers
    <engine>.logprob_gap      largest difference of a sampled token's log-prob from transformers'
    <engine>.surprise         mean of -log p of the sampled tokens less its expectation, in standard
                              errors: of standard normal distribution if tokens are drawn from p
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.support.inference.service import Answer, Service
from benchmarks.support.report import arguments, keep, show
from forge.agents.environments import get_domain
from forge.agents.environments.base import Transcript
from forge.cli.local_run.dataset import held_out_tasks
from forge.cli.local_run.models.models import ensure_model
from forge.cli.local_run.presets import preset_for
from forge.cli.local_run.run_options import RunOptions
from forge.cli.local_run.training_run import engine_python
from forge.core.conversation.messages import from_openai
from forge.core.token_columns import int32_array
from forge.v1.common_pb2 import SamplingParams
from services.gateway.model.chat_model import ChatModel

OWN = "transformers"
CACHE_MIB = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One held-out task."""

    ids: list[int]
    episode: Any
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Of one engine to one task."""

    greedy: list[int]
    sampled: list[Answer]


class Reference:
    """The model's own forward, in float32."""

    def __init__(self, path: Path, stop_ids: frozenset[int]) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._stop_ids = torch.tensor(sorted(stop_ids))
        self._random = torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def answer(self, task: Task, *, attempts: int) -> Answers:
        """Draw answers, and the greedy one."""
        past, last_V = self._read(task)
        rows = self._draw(past, last_V, 1 + attempts, task.max_tokens)
        found = [Answer(ids, [0.0] * len(ids)) for ids in rows]
        for answer, logprobs_NV in zip(found, self.logprobs(task, rows), strict=True):
            answer.logprobs = logprobs_NV.gather(1, torch.tensor(answer.ids)[:, None])[
                :, 0
            ].tolist()
        return Answers(greedy=rows[0], sampled=found[1:])

    @torch.inference_mode()
    def logprobs(self, task: Task, rows: Sequence[list[int]]) -> list[Tensor]:
        """Log-probs [tokens, vocabulary] at each token of the answers."""
        past, last_V = self._read(task)
        longest = max(map(len, rows))
        # Tokens attend to the left, so padding at the right changes nothing.
        ids_RN = torch.tensor([ids + [0] * (longest - len(ids)) for ids in rows])
        past.batch_repeat_interleave(len(rows))
        logits_RNV = self._model(input_ids=ids_RN, past_key_values=past).logits
        first_R1V = last_V.expand(len(rows), 1, -1)
        logprobs_RNV = torch.cat([first_R1V, logits_RNV[:, :-1]], 1).log_softmax(-1)
        return [row_NV[: len(ids)] for row_NV, ids in zip(logprobs_RNV, rows, strict=True)]

    def _read(self, task: Task) -> tuple[Any, Tensor]:
        found = self._model(input_ids=torch.tensor([task.ids]), use_cache=True)
        return found.past_key_values, found.logits[0, -1]

    def _draw(self, past: Any, last_V: Tensor, rows: int, most: int) -> list[list[int]]:
        """The first row is greedy."""
        past.batch_repeat_interleave(rows)
        logits_RV, drawn = last_V.expand(rows, -1), []
        ended_R = torch.zeros(rows, dtype=torch.bool)
        lengths_R = torch.zeros(rows, dtype=torch.long)
        for _ in range(most):
            ids_R1 = torch.multinomial(logits_RV.double().softmax(-1), 1, generator=self._random)
            ids_R1[0] = logits_RV[0].argmax()
            drawn.append(ids_R1)
            lengths_R += ~ended_R
            ended_R |= torch.isin(ids_R1[:, 0], self._stop_ids)
            if ended_R.all():
                break
            logits_RV = self._model(input_ids=ids_R1, past_key_values=past).logits[:, -1]
        ids_RN = torch.cat(drawn, 1).tolist()
        return [ids[:length] for ids, length in zip(ids_RN, lengths_R.tolist(), strict=True)]


async def served(
    service: Service, task: Task, *, attempts: int, stop_ids: frozenset[int]
) -> Answers:
    """Answers of an engine."""
    sampling = SamplingParams(
        temperature=1.0, max_tokens=task.max_tokens, stop_token_ids=sorted(stop_ids)
    )
    greedy = copy.deepcopy(sampling)
    greedy.temperature = 0.0
    first = await service.sample(task.ids, greedy)
    sampled = await asyncio.gather(*(service.sample(task.ids, sampling) for _ in range(attempts)))
    return Answers(greedy=first.ids, sampled=sampled)


def figures(
    tasks: Sequence[Task],
    answers: Sequence[Answers],
    own: Sequence[Answers],
    *,
    decode: Callable[[list[int]], str],
    reference: Reference,
) -> dict[str, float]:
    """Of one engine."""
    means, variances, gaps = [], [], []
    surprise = variance = 0.0
    for task, found in zip(tasks, answers, strict=True):
        rewards = [_reward(task, decode(one.ids)) for one in found.sampled]
        means.append(fmean(rewards))
        variances.append(means[-1] * (1 - means[-1]) / (len(rewards) - 1))
        rows = [one.ids for one in found.sampled]
        for one, logprobs_NV in zip(found.sampled, reference.logprobs(task, rows), strict=True):
            logprobs_NV = logprobs_NV.double()
            drawn_N = logprobs_NV.gather(1, torch.tensor(one.ids)[:, None])[:, 0]
            gaps.append(float((drawn_N - torch.tensor(one.logprobs)).abs().max()))
            probs_NV = logprobs_NV.exp()
            mean_N = (probs_NV * logprobs_NV).sum(-1)
            surprise += float((mean_N - drawn_N).sum())
            variance += float((probs_NV * (logprobs_NV - mean_N[:, None]) ** 2).sum())
    same = [mine.greedy == one.greedy for mine, one in zip(answers, own, strict=True)]
    return {
        "reward": fmean(means),
        "reward_err": sum(variances) ** 0.5 / len(tasks),
        "greedy_equal": fmean(map(float, same)),
        "logprob_gap": max(gaps),
        "surprise": surprise / variance**0.5,
    }


def _reward(task: Task, text: str) -> float:
    found = task.episode.score(Transcript(answer=text, turns=1))
    return next(float(one.value) for one in found if one.kind == "outcome")


def tasks_of(model: str, chat: ChatModel, *, seed: int, count: int) -> list[Task]:
    """Held-out tasks of a run, with the prompts that its gateway makes."""
    found = []
    domains = preset_for(model).domains
    for one in held_out_tasks(domains, seed=seed, count=count, attempts=1, tag="eval"):
        payload = json.loads(one.payload_json)
        episode = get_domain(one.domain).episode(payload)
        messages = [from_openai(message) for message in episode.messages]
        text = chat.template.rendered(messages, None, generation_prompt=True)
        ids = list(int32_array(chat.encode(text)))
        found.append(Task(ids=ids, episode=episode, max_tokens=payload["max_tokens"]))
    return found


async def measured(options: argparse.Namespace) -> dict[str, float]:
    """All figures."""
    path = await ensure_model(options.model, seed=options.seed, root=options.root)
    chat = ChatModel.load(str(path))
    reference = Reference(path, chat.stop_ids)
    tasks = tasks_of(options.model, chat, seed=options.seed, count=options.tasks)

    async def own(task: Task) -> Answers:
        return reference.answer(task, attempts=options.attempts)

    async def all_answers(name: str, answer: Callable[[Task], Awaitable[Answers]]) -> list[Answers]:
        console = Console(stderr=True)
        return [await answer(task) for task in track(tasks, name, console=console)]

    by_engine = {OWN: await all_answers(OWN, own)}
    for engine in options.engines:
        python = engine_python(RunOptions(engine=engine))
        service = Service(
            path, "float32", roles=("both",), cache_mib=CACHE_MIB, engine=engine, python=python
        )
        await service.start()

        async def ask(task: Task, service: Service = service) -> Answers:
            return await served(service, task, attempts=options.attempts, stop_ids=chat.stop_ids)

        by_engine[engine] = await all_answers(engine, ask)
        await service.stop()
    return {
        f"{engine}.{key}": value
        for engine, answers in by_engine.items()
        for key, value in figures(
            tasks, answers, by_engine[OWN], decode=chat.decode, reference=reference
        ).items()
    }


def main() -> None:
    """Prints the table."""
    parser = arguments(__doc__ or "", quick="2 tasks per domain, 4 attempts")
    parser.add_argument("--model", default="smollm2", help="smollm2 or a directory")
    parser.add_argument("--engines", nargs="+", default=["embedded", "vllm"])
    parser.add_argument("--tasks", type=int, default=24, help="held-out tasks per domain")
    parser.add_argument("--attempts", type=int, default=16, help="answers to each task; at least 2")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks")
    parser.add_argument("--root", type=Path, default=Path(".forge"), help="models are kept here")
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.attempts = 2, 4
    torch.set_num_threads(1)
    found = asyncio.run(measured(options))
    show(f"held-out reward of {options.model}, {options.attempts} attempts", found)
    keep(found, options.json)


if __name__ == "__main__":
    main()
