"""The stream of tasks a run trains on, and its held-out ones.

Task number i is a pure function of (seed, i), so that a resumed run submits the same ones again
and the scheduler, which knows them by id, ignores those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from random import Random

from forge.agents.environments import get_domain
from forge.v1 import common_pb2 as pb


def interleave(shares: Mapping[str, float]) -> Iterator[str]:
    """Names in proportion to their shares, forever, each prefix as balanced as can be."""
    credit = dict.fromkeys(shares, 0.0)
    while True:
        for name, share in shares.items():
            credit[name] += share
        chosen = max(credit, key=lambda name: credit[name])
        credit[chosen] -= 1.0
        yield chosen


def training_tasks(shares: Mapping[str, float], *, seed: int, group_size: int) -> Iterator[pb.Task]:
    """Training tasks in queue order, forever."""
    for index, name in enumerate(interleave(shares)):
        yield _task(
            name,
            Random(f"{seed}/train/{name}/{index}"),
            task_id=f"train-{index:07d}",
            group_size=group_size,
            purpose=pb.PURPOSE_TRAIN,
            tag="train",
        )


def held_out_tasks(
    names: Iterable[str], *, seed: int, count: int, attempts: int, tag: str
) -> list[pb.Task]:
    """`count` tasks per domain; the same ones under every tag."""
    return [
        _task(
            name,
            Random(f"{seed}/held-out/{name}/{index}"),
            task_id=f"{tag}-{name}-{index:04d}",
            group_size=attempts,
            purpose=pb.PURPOSE_EVAL,
            tag=tag,
        )
        for index in range(count)
        for name in names
    ]


def _task(
    name: str,
    rng: Random,
    *,
    task_id: str,
    group_size: int,
    purpose: pb.Purpose.ValueType,
    tag: str,
) -> pb.Task:
    domain = get_domain(name)
    return pb.Task(
        task_id=task_id,
        domain=name,
        scaffold=domain.scaffold,
        payload_json=json.dumps(domain.generate(rng)),
        group_size=group_size,
        purpose=purpose,
        tag=tag,
    )
