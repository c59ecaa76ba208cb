"""Samples whose merged tree has a shape named."""

from __future__ import annotations

from random import Random

from forge.core.prefix_tree import Sample
from tests.support.rl.models import VOCABULARY, make_sample

KINDS = (
    "linear",
    "forked",
    "think_stripped",
    "compacted",
    "one_node",
    "duplicate",
    "prefix",
    "single_token",
    "temperatures",
    "roots",
)


def random_forest(rng: Random) -> list[Sample]:
    """Up to a dozen samples over three tokens, so that they share prefixes of every length."""
    samples = []
    for _ in range(rng.randrange(1, 13)):
        ids = [rng.randrange(3) for _ in range(rng.randrange(2, 16))]
        start = rng.randrange(1, len(ids))
        samples.append(make_sample(ids, (start, rng.randrange(start, len(ids)) + 1), rng=rng))
    return samples


def forest(kind: str) -> list[Sample]:
    """Samples whose tree has the shape named."""
    rng = Random(7)

    def ids(count: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(count)]

    system, task, other = ids(9), ids(5), ids(4)
    if kind == "linear":  # every turn extends the last one
        turns = [system + task]
        for _ in range(3):
            turns.append(turns[-1] + ids(6))
        return [make_sample(one, (len(one) - 3, len(one)), rng=rng) for one in turns[1:]]
    if kind == "forked":  # a group, of which one member rewrites its history
        leaves = [system + task + ids(count) for count in (4, 7, 1, 5)]
        leaves += [system + other + ids(6), leaves[0][:16] + ids(8)]
        return [make_sample(one, (len(one) - 1, len(one)), rng=rng) for one in leaves]
    if kind == "think_stripped":  # what was sampled is trained, then dropped from the context
        history, samples = system + task, []
        for _ in range(4):
            thought, answer = ids(5), ids(3)
            turn = history + thought + answer
            samples.append(make_sample(turn, (len(history), len(turn)), rng=rng))
            history = history + answer + ids(2)
        return samples
    if kind == "compacted":  # half-way, the history is folded into a summary
        history, samples = system + task, []
        for number in range(4):
            answer = history + ids(4)
            samples.append(make_sample(answer, (len(history), len(answer)), rng=rng))
            history = system + ids(3) if number == 1 else answer + ids(2)
        return samples
    if kind == "one_node":
        return [make_sample(system + task + other, (4, 9), (11, 17), rng=rng)]
    if kind == "duplicate":  # the same tokens with different advantages
        one = system + task + ids(4)
        return [make_sample(one, (14, 18), rng=rng) for _ in range(3)]
    if kind == "prefix":  # samples that end inside another one's chain
        one = system + task + ids(6)
        return [make_sample(one[:end], (end - 2, end), rng=rng) for end in (12, 15, 20)]
    if kind == "single_token":  # one-token answers under one prompt, and a two-token sample
        samples = [make_sample([*system, token], (9, 10), rng=rng) for token in range(6)]
        return [*samples, make_sample([1, 2], (1, 2), rng=rng)]
    if kind == "temperatures":  # one edge, sampled at two temperatures
        one = system + task
        return [make_sample(one, (10, 14), rng=rng, temperature=heat) for heat in (1.0, 0.5, 0.5)]
    assert kind == "roots"  # nothing shared at all
    return [make_sample([token, *ids(7)], (1, 4), (6, 8), rng=rng) for token in range(VOCABULARY)]
