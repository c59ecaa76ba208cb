"""A policy that trains in this process, sampled by the embedded engine, with several sets of draft
heads that never affect it.

Owns the loop of sampling, rewards and optimizer steps, and the training of the heads on the same
batches, each before the policy's step. Not here: what is measured.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.agents.environments.base import (
    Episode,
    Message,
    PlainEpisode,
    Reward,
    Transcript,
)
from forge.agents.environments.gym import GYM_DOMAINS, GymDomain
from forge.agents.environments.reasoning import ReasoningDomain
from forge.core.prefix_tree import Sample
from forge.core.token_columns import float32_bytes, int32_bytes
from forge.rl.config import LearnerConfig, MtpConfig, MtpLoss, OptimizerConfig
from forge.rl.learner.batch_plan import BatchPlan
from forge.rl.learner.learner import Learner
from forge.rl.model.policy import TreePolicy
from forge.rl.mtp.training import MtpTraining
from forge.runtime.actors.actor_system import ActorSystem
from services.gateway.model.chat_model import ChatModel
from services.inference.engines.base import (
    KvSpan,
    Prompt,
    Sampling,
)
from services.inference.engines.embedded.decode import DecodeActor
from services.inference.engines.embedded.engine import EmbeddedDecode, EmbeddedPrefill
from services.inference.engines.provider import EngineOptions
from services.inference.engines.tensor_bytes import to_named

HEADS = 3
_numbers = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt and its episode."""

    ids: list[int]
    episode: Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A sampled answer."""

    ids: list[int]
    logprobs: list[float]
    decode_s: float
    """From the hand-off to the last token: CPU seconds of this process, or of the clock with a
    GPU."""


class StepClock:
    """Time of all decode steps in this process: CPU seconds; with a GPU seconds of the clock, until
    the device has finished."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.steps_s = 0.0

    def process_s(self) -> float:
        """The time of this process so far."""
        return time.process_time() if self.device.type == "cpu" else time.perf_counter()

    def _thread_s(self) -> float:
        if self.device.type == "cpu":
            return time.thread_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure within."""
        work = DecodeActor.work

        def timed(actor: DecodeActor) -> bool:
            began_s = self._thread_s()
            try:
                return work(actor)
            finally:
                self.steps_s += self._thread_s() - began_s

        with patch.object(DecodeActor, "work", timed):
            yield


class Engine:
    """Both roles of the embedded engine, joined as the service joins them."""

    def __init__(self, prefill: EmbeddedPrefill, decode: EmbeddedDecode, clock: StepClock) -> None:
        self._prefill, self._decode = prefill, decode
        self._clock = clock
        self._version = 0

    async def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Serve these weights."""
        self._version += 1
        named = {name: to_named(name, one) for name, one in tensors.items()}
        for engine in (self._prefill, self._decode):
            await engine.load(named, version=self._version)

    async def sample(self, ids: Sequence[int], sampling: Sampling) -> Answer:
        """One answer."""
        data = array("i", ids).tobytes()
        prompt = Prompt(request_id=str(next(_numbers)), ids=data, sampling=sampling)
        read = await self._prefill.prefill(prompt, hold_s=600)

        async def fetch(from_token: int) -> KvSpan:
            span = await self._prefill.fetch_kv(prompt.request_id, from_token=from_token)
            self._prefill.release(prompt.request_id)
            return span

        ids, logprobs = [*read.first.ids], [*read.first.logprobs]
        began_s = self._clock.process_s()
        async for piece in self._decode.decode(prompt, read.first, fetch, stream=False):
            ids += piece.tokens.ids
            logprobs += piece.tokens.logprobs
        took_s = self._clock.process_s() - began_s
        return Answer(ids=ids, logprobs=logprobs, decode_s=took_s)


@asynccontextmanager
async def engine(
    path: Path, *, drafts: int, adaptive: bool, clock: StepClock, dtype: str = "float32"
) -> AsyncIterator[Engine]:
    """An engine without weights, on the clock's device."""
    options = EngineOptions(
        model_path=str(path),
        dtype=dtype,
        device=str(clock.device),
        request_timeout_s=3600.0,
        draft_tokens=drafts,
        adaptive_drafts=adaptive,
    )
    systems = ActorSystem("prefill"), ActorSystem("decode")
    try:
        prefill = await EmbeddedPrefill.start(systems[0], options)
        yield Engine(prefill, await EmbeddedDecode.start(systems[1], options), clock)
    finally:
        for system in systems:
            await system.stop()


class WorkedDomain:
    """Tasks of a domain with numbers as results. Without examples of bare answers a model shows its
    work, so answers are long; the last number of one is its result."""

    def __init__(self, domain: GymDomain) -> None:
        self._domain = domain

    def generate(self, rng: Random) -> dict[str, Any]:
        """Returns a payload; see `GymDomain`."""
        return self._domain.generate(rng)

    def episode(self, payload: Mapping[str, Any]) -> WorkedEpisode:
        """Returns an attempt."""
        return WorkedEpisode(payload["question"], payload["answer"])


class WorkedEpisode(PlainEpisode):
    """One question, and its result."""

    def __init__(self, question: str, answer: str) -> None:
        self._question, self._answer = question, answer

    @property
    def messages(self) -> list[Message]:
        """The question."""
        text = f"{self._question}\nExplain each step. End with the result."
        return [{"role": "user", "content": text}]

    def score(self, transcript: Transcript) -> list[Reward]:
        """Returns outcome 1 if the last number is the result."""
        numbers = re.findall(r"-?\d+", transcript.answer)
        right = numbers[-1:] == [self._answer]
        return [Reward(name="last_number", kind="outcome", value=float(right))]


class Policy:
    """The model, its learner, its tasks and its sets of heads."""

    def __init__(
        self, path: Path, *, learning_rate: float, head_rate: float, tokens: int,
        device: torch.device, worked: bool,
    ) -> None:  # fmt: skip
        """`worked`: answers to the tasks show the work, unless the model is tiny."""
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
        optimizer = OptimizerConfig(learning_rate=learning_rate)
        self.learner = Learner(TreePolicy(model.eval()), LearnerConfig(optimizer=optimizer))
        self.sampling = Sampling(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_tokens=tokens,
            stop_ids=ChatModel.load(str(path)).stop_ids,
            seed=0,
        )
        self._optimizer = optimizer
        self._head_rate = head_rate
        # Words of the tiny model's tasks are in its tokenizer; other models get harder ones.
        self._domains: list[Any] = [*GYM_DOMAINS]
        if self.learner.policy.vocabulary < 4096:
            self._domains = [ReasoningDomain()]
        elif worked:
            self._domains = [WorkedDomain(one) for one in GYM_DOMAINS]
        self._rng = Random(0)

    def new_heads(self, loss: MtpLoss, *, update_tokens: int) -> MtpTraining:
        """Heads with the same random start for each loss."""
        config = MtpConfig(
            heads=HEADS, loss=loss, learning_rate=self._head_rate, update_tokens=update_tokens
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return MtpTraining(self.learner.policy, config, self._optimizer)

    def tasks(self, number: int, rng: Random | None = None) -> list[Task]:
        """New tasks, in the order of the random numbers."""
        rng = rng or self._rng
        return [self._task(rng) for _ in range(number)]

    def _task(self, rng: Random) -> Task:
        domain = rng.choice(self._domains)
        episode = domain.episode(domain.generate(rng))
        rendered = self.tokenizer.apply_chat_template(
            episode.messages, tokenize=False, add_generation_prompt=True
        )
        return Task(ids=self.tokenizer.encode(rendered, add_special_tokens=False), episode=episode)

    async def rollouts(
        self, engine: Engine, tasks: Iterable[Task], *, each: int
    ) -> tuple[list[Sample], float]:
        """Samples with advantages, those of a task side by side; and the mean reward."""
        asked = [task for task in tasks for _ in range(each)]
        answers = await asyncio.gather(
            *(
                engine.sample(task.ids, replace(self.sampling, seed=self._rng.getrandbits(32)))
                for task in asked
            )
        )
        rewards = [self._reward(task, answer) for task, answer in zip(asked, answers, strict=True)]
        samples = []
        for number, (task, answer) in enumerate(zip(asked, answers, strict=True)):
            first = number - number % each
            advantage = rewards[number] - fmean(rewards[first : first + each])
            samples.append(_sample(task, answer, advantage))
        return samples, fmean(rewards)

    def _reward(self, task: Task, answer: Answer) -> float:
        text = self.tokenizer.decode(answer.ids, skip_special_tokens=True)
        found = task.episode.score(Transcript(answer=text, turns=1))
        return next(one.value for one in found if one.kind == "outcome")

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps depend on, except the heads."""
        return {
            "model": self.learner.policy.model.state_dict(),
            "learner": self.learner.state_dict(),
            "rng": self._rng.getstate(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a policy of the same model."""
        self.learner.policy.model.load_state_dict(state["model"])
        self.learner.load_state_dict(state["learner"])
        self._rng.setstate(state["rng"])

    def train_heads(self, heads: Sequence[MtpTraining], plan: BatchPlan) -> None:
        """One update of each set on a batch, under the present weights."""
        for one in heads:
            one.begin(1.0)
        for tree in plan.trees:
            with torch.no_grad():
                self.learner.policy.logprobs(tree)
            for one in heads:
                one.accumulate(tree, tokens=plan.trained_tokens)
        for one in heads:
            one.step()

    def published(self, heads: MtpTraining | None) -> dict[str, torch.Tensor]:
        """The weights, with heads or without; tied ones once."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in self.learner.policy.model.state_dict().items():
            found.setdefault(tensor.data_ptr(), (name, tensor))
        own = heads.heads.named_tensors() if heads is not None else {}
        return dict(found.values()) | own


def _sample(task: Task, answer: Answer, advantage: float) -> Sample:
    tokens = len(answer.ids)
    return Sample(
        ids=int32_bytes([*task.ids, *answer.ids]),
        trained=((len(task.ids), len(task.ids) + tokens),),
        behavior_logprobs=float32_bytes(answer.logprobs),
        weight_versions=int32_bytes([1] * tokens),
        advantages=float32_bytes([advantage] * tokens),
    )
