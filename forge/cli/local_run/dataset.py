"""The training tasks and held-out tasks of a run.

Task number i is a pure function of (seed, i). So a resumed run submits the same tasks, and the
scheduler ignores known ones. No training task has the prompt of a held-out one
(`forge.agents.environments.split`). Ids contain the version of the split, so a run of an earlier
version keeps its tasks and continues with new ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from random import Random
from typing import Any

from forge.agents.environments import get_domain
from forge.agents.environments.split import held_out_payloads, training_payload
from forge.v1 import common_pb2 as pb

_SPLIT = "s2"
"""Increment it with every change of the function (seed, i) -> task."""


def interleave(shares: Mapping[str, float]) -> Iterator[str]:
    """Yields names without end, in proportion to their shares, each prefix as balanced as
    possible."""
    credit = dict.fromkeys(shares, 0.0)
    while True:
        for name, share in shares.items():
            credit[name] += share
        chosen = max(credit, key=lambda name: credit[name])
        credit[chosen] -= 1.0
        yield chosen


def training_tasks(shares: Mapping[str, float], *, seed: int, group_size: int) -> Iterator[pb.Task]:
    """Yields training tasks without end, in queue order."""
    for index, name in enumerate(interleave(shares)):
        yield _task(
            name,
            training_payload(get_domain(name), Random(f"{seed}/train/{name}/{index}")),
            task_id=f"train-{_SPLIT}-{index:07d}",
            group_size=group_size,
            purpose=pb.PURPOSE_TRAIN,
            tag="train",
        )


def held_out_tasks(
    names: Iterable[str], *, seed: int, count: int, attempts: int, tag: str
) -> list[pb.Task]:
    """Returns up to `count` tasks per domain, the same ones for every tag."""
    payloads = {
        name: list(
            islice(held_out_payloads(get_domain(name), Random(f"{seed}/held-out/{name}")), count)
        )
        for name in names
    }
    return [
        _task(
            name,
            own[index],
            task_id=f"{tag}-{name}-{_SPLIT}-{index:04d}",
            group_size=attempts,
            purpose=pb.PURPOSE_EVAL,
            tag=tag,
        )
        for index in range(count)
        for name, own in payloads.items()
        if index < len(own)
    ]


def _task(name: str, payload: Mapping[str, Any], **fields: Any) -> pb.Task:
    """Returns a task of a domain with `fields`."""
    scaffold = get_domain(name).scaffold
    return pb.Task(domain=name, scaffold=scaffold, payload_json=json.dumps(payload), **fields)
