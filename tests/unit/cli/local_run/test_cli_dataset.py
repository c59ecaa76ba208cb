"""The tasks of `forge run`: training tasks and held-out tasks never share a prompt."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice

import pytest

from forge.agents.environments import DOMAINS, get_domain
from forge.cli.local_run.dataset import held_out_tasks, training_tasks
from forge.cli.local_run.presets import PRESETS
from forge.v1 import common_pb2 as pb

SEEDS = range(6)
every_domain = pytest.mark.parametrize("name", DOMAINS)


def prompts(tasks: Iterable[pb.Task]) -> list[str]:
    """What the model reads first of each task."""
    return [
        json.dumps(get_domain(task.domain).episode(json.loads(task.payload_json)).messages)
        for task in tasks
    ]


def trained(name: str, seed: int, count: int) -> list[str]:
    return prompts(islice(training_tasks({name: 1.0}, seed=seed, group_size=2), count))


def held_out(name: str, seed: int, count: int) -> list[str]:
    return prompts(held_out_tasks([name], seed=seed, count=count, attempts=1, tag="eval"))


@every_domain
def test_no_seed_trains_on_a_prompt_that_any_seed_holds_out(name: str) -> None:
    """The split is by content: neither seed nor position moves a task, and even the smallest domain
    has tasks on both sides."""
    seen = {prompt for seed in SEEDS for prompt in trained(name, seed, 150)}
    kept = {prompt for seed in SEEDS for prompt in held_out(name, seed, 24)}
    assert len(seen) > 50 and len(kept) > 15
    assert not seen & kept


@every_domain
def test_task_is_held_out_once(name: str) -> None:
    """A repeated task in the table would count as two independent measurements."""
    for seed in SEEDS:
        found = held_out(name, seed, 24)
        assert len(found) == len(set(found))


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_domains_are_disjoint(preset: str) -> None:
    """Together, as one run has them, with its number of held-out tasks."""
    own = PRESETS[preset]
    kept = prompts(
        held_out_tasks(own.domains, seed=0, count=own.eval_tasks, attempts=1, tag="eval")
    )
    seen = prompts(islice(training_tasks(own.domains, seed=0, group_size=2), 400))
    assert not set(seen) & set(kept)


def test_small_domain_gives_fewer_held_out_tasks() -> None:
    """No task is repeated to reach the number; a larger number only adds tasks at the end."""
    names = ["products", "gcd"]
    few = held_out_tasks(names, seed=0, count=5, attempts=1, tag="eval")
    many = held_out_tasks(names, seed=0, count=60, attempts=1, tag="eval")
    products = [task for task in many if task.domain == "products"]
    assert len(products) < 60 == len([task for task in many if task.domain == "gcd"])
    assert few == many[:10]
    assert len({task.task_id for task in many}) == len(many)
