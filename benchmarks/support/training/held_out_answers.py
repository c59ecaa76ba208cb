"""Held-out prompts of a finished run with their right answers, and how likely a model finds them.

Reads a copy of the run's pool, so the run's files are left alone. Only tasks whose payload names
the answer count, which are those of reasoning-gym.

Shapes: N prompts of a domain, L tokens after their common prefix, A answer tokens, C channels.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from forge.core.errors import NotFound
from forge.core.token_columns import int32_array
from forge.core.trajectory import parse_trajectory_id
from forge.v1 import common_pb2
from services.gateway.model.chat_model import ChatModel
from services.pool.store import PoolStore

_TAG = "eval-after"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One held-out task as the run sampled it."""

    domain: str
    prompt: tuple[int, ...]
    """Token ids as stored."""
    answer: tuple[int, ...]
    """The right answer."""
    ends: tuple[int, ...]
    """Tokens that may end it."""


def read_held_out(run: Path, *, per_domain: int) -> list[HeldOut]:
    """Up to `per_domain` tasks of each domain. Raises `NotFound` when the run stored none."""
    checkpoint = run / "checkpoints" / "latest"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ends = tuple(sorted(ChatModel.load(str(checkpoint)).stop_ids))
    counts: dict[str, int] = {}
    found = []
    for domain, prompt, answer in _stored(run):
        counts[domain] = counts.get(domain, 0) + 1
        if counts[domain] <= per_domain:
            ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
            found.append(HeldOut(domain=domain, prompt=prompt, answer=tuple(ids), ends=ends))
    if not found:
        raise NotFound(f"{run} has no held-out tasks with an answer in its pool")
    return found


def _stored(run: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Domain, prompt ids and answer of each attempt after training."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(run / "pool" / "0", Path(folder) / "pool")
        store = PoolStore(copy)
        try:
            scan = store.scan()
            while (page := scan.next_page()) is not None:
                for one in page:
                    yield from _attempts(store, one.group.task, one.trajectories)
        finally:
            store.close()


def _attempts(
    store: PoolStore, task: common_pb2.Task, summaries: Sequence[common_pb2.TrajectorySummary]
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    answer = json.loads(task.payload_json or "{}").get("answer")
    names = [parse_trajectory_id(one.trajectory_id) for one in summaries if one.turns]
    if task.tag != _TAG or not answer:
        return
    for name in names:
        (data,) = store.trajectories([name])
        turn = common_pb2.Trajectory.FromString(data).turns[0]
        yield task.domain, tuple(int32_array(turn.prompt_ids)), answer


@torch.no_grad()
def answer_logprobs(
    model: Any, tasks: Sequence[HeldOut], *, autocast: torch.dtype | None = None
) -> list[Tensor]:
    """Log-probs [A + 1] of each task's answer tokens, then of its end by any token, at temperature
    1, softmax in float64.

    The backbone computes in `autocast`, None for the weights' own type; the head always in its own.
    """
    found: list[Tensor] = [torch.empty(0)] * len(tasks)
    for domain in {task.domain for task in tasks}:
        places = [index for index, task in enumerate(tasks) if task.domain == domain]
        rows = _domain_logprobs(model, [tasks[index] for index in places], autocast)
        for index, row in zip(places, rows, strict=True):
            found[index] = row
    return found


def _domain_logprobs(
    model: Any, tasks: Sequence[HeldOut], autocast: torch.dtype | None
) -> list[Tensor]:
    shared = _common_prefix([task.prompt[:-1] for task in tasks])
    rows = [(*task.prompt, *task.answer)[shared:] for task in tasks]
    longest = max(map(len, rows))
    # Padding comes after everything that is looked at.
    ids_NL = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    rounding = torch.autocast("cpu", dtype=autocast) if autocast else nullcontext()
    with rounding:
        prefix_1L = torch.tensor([tasks[0].prompt[:shared]])
        cache = model.base_model(input_ids=prefix_1L, use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(tasks))
        states_NLC = model.base_model(
            input_ids=ids_NL, past_key_values=cache, use_cache=True
        ).last_hidden_state
    found = []
    for task, row, states_LC in zip(tasks, rows, states_NLC, strict=True):
        states_AC = states_LC[len(row) - len(task.answer) - 1 : len(row)]
        head = model.get_output_embeddings()
        logprobs_AV = head(states_AC.to(head.weight.dtype)).double().log_softmax(-1)
        answer = logprobs_AV[range(len(task.answer)), list(task.answer)]
        end = logprobs_AV[-1, list(task.ends)].logsumexp(-1, keepdim=True)
        found.append(torch.cat([answer, end]))
    return found


def _common_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """Number of tokens with which all begin."""
    low, high = min(prompts), max(prompts)
    shared = 0
    for one, other in zip(low, high, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def by_domain(tasks: Sequence[HeldOut], values: Sequence[float]) -> Mapping[str, float]:
    """Mean of each domain, and `all`."""
    names = sorted({task.domain for task in tasks})
    means = {
        name: _mean([v for task, v in zip(tasks, values, strict=True) if task.domain == name])
        for name in names
    }
    return {**means, "all": _mean(values)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
