"""Samples as agents' trajectories would give them, for benchmarks of training."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from forge.core.prefix_tree import Sample

VOCABULARY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Samples as an agent's trajectories would give them."""

    name: str
    describe: str
    rollouts: list[list[Sample]]
    """Per trajectory, a sample per turn."""

    @property
    def samples(self) -> list[Sample]:
        """All of them."""
        return [one for rollout in self.rollouts for one in rollout]


def make_workloads(scale: int) -> list[Workload]:
    """All of them; `scale` divides lengths."""
    return [
        turns("g4", groups=4, turn_count=16, system=1024 // scale, per_turn=62 // scale),
        turns("g8", groups=8, turn_count=16, system=1024 // scale, per_turn=62 // scale),
        turns("forty", groups=8, turn_count=100, system=128 // scale, per_turn=16 // scale),
        forked("forked", groups=4, turn_count=12, system=1024 // scale, per_turn=96 // scale),
        compacted("compacted", groups=4, turn_count=18, system=1024 // scale, per_turn=96 // scale),
        single("trajectory", groups=8, prompt=1024 // scale, answer=1024 // scale),
    ]


def device_workloads(scale: int) -> list[Workload]:
    """Workloads large enough for a GPU; `scale` divides lengths."""
    return [
        turns("agents", groups=4, turn_count=4, system=1024 // scale, per_turn=512 // scale),
        single("answers", groups=8, prompt=2048 // scale, answer=1024 // scale),
    ]


def turns(name: str, *, groups: int, turn_count: int, system: int, per_turn: int) -> Workload:
    """A group of linear trajectories; one sample per turn, half of each turn was sampled."""
    rng = Random(name)
    prompt = ids(rng, system)
    rollouts = []
    for _ in range(groups):
        history, samples = prompt, []
        for _ in range(turn_count):
            history = history + ids(rng, per_turn)
            samples.append(sample(rng, history, sampled=per_turn // 2))
        rollouts.append(samples)
    shape = f"{groups} x {turn_count} turns of {per_turn}, system prompt {system}"
    return Workload(name=name, describe=shape, rollouts=rollouts)


def forked(name: str, *, groups: int, turn_count: int, system: int, per_turn: int) -> Workload:
    """Thinking is stripped from the history, and the history is folded once on the way."""
    rng = Random(name)
    prompt = ids(rng, system)
    rollouts = []
    for _ in range(groups):
        history, samples = prompt, []
        for turn in range(turn_count):
            answer = ids(rng, per_turn // 4)
            spoken = ids(rng, per_turn // 2) + answer
            samples.append(sample(rng, history + spoken, sampled=len(spoken)))
            history = history + answer + ids(rng, per_turn // 4)
            if turn == turn_count // 2:
                history = prompt + ids(rng, per_turn)
        rollouts.append(samples)
    shape = f"{groups} x {turn_count} turns of {per_turn}, thoughts stripped, folded once"
    return Workload(name=name, describe=shape, rollouts=rollouts)


def compacted(name: str, *, groups: int, turn_count: int, system: int, per_turn: int) -> Workload:
    """The history is folded into a summary of a turn's length every six turns."""
    rng = Random(name)
    prompt = ids(rng, system)
    rollouts = []
    for _ in range(groups):
        history, samples = prompt, []
        for turn in range(turn_count):
            if turn and turn % 6 == 0:
                history = prompt + ids(rng, per_turn)
            history = history + ids(rng, per_turn)
            samples.append(sample(rng, history, sampled=per_turn // 2))
        rollouts.append(samples)
    shape = f"{groups} x {turn_count} turns of {per_turn}, folded every 6"
    return Workload(name=name, describe=shape, rollouts=rollouts)


def single(name: str, *, groups: int, prompt: int, answer: int) -> Workload:
    """One answer per rollout: what prefix sharing gains at the least."""
    rng = Random(name)
    shared = ids(rng, prompt)
    rollouts = [[sample(rng, shared + ids(rng, answer), sampled=answer)] for _ in range(groups)]
    shape = f"{groups} x {answer} tokens on a prompt of {prompt}"
    return Workload(name=name, describe=shape, rollouts=rollouts)


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
