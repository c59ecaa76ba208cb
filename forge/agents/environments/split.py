"""Training tasks and held-out tasks of a domain: disjoint by construction.

    held out  <=>  blake2b(what the model reads first) mod 4 == 0

The side of a task follows from its prompt alone. No seed, position or process moves it, so a task
that is held out in one run is never trained on in any other, nor shown by a teacher.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from random import Random
from typing import Any, Final

from forge.agents.environments.base import Domain
from forge.core.errors import FailedPrecondition

HELD_OUT_ONE_IN: Final = 4
"""One prompt in so many is held out. Another number moves tasks between the sides: never resume a
run across it."""
_DRAWS: Final = 2000
"""Draws without a task of the wanted side, or without a new one, after which there is none left.
A prompt that one draw in 100 gives is then missed with a probability below 1e-8."""


def prompt_key(domain: Domain, payload: Mapping[str, Any]) -> str:
    """What makes two tasks the same task: the messages that an attempt begins with."""
    return json.dumps(domain.episode(payload).messages, sort_keys=True, separators=(",", ":"))


def is_held_out(key: str) -> bool:
    """Whether the prompt is on the held-out side."""
    digest = blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def training_payload(domain: Domain, rng: Random) -> dict[str, Any]:
    """The payload of a training task, a pure function of `rng`.

    Raises `FailedPrecondition` for a domain that has no training task.
    """
    for _ in range(_DRAWS):
        payload = domain.generate(rng)
        if not is_held_out(prompt_key(domain, payload)):
            return payload
    raise FailedPrecondition(f"domain {domain.name!r}: {_DRAWS} draws gave no training task")


def held_out_payloads(domain: Domain, rng: Random) -> Iterator[dict[str, Any]]:
    """Payloads of held-out tasks, each prompt once; ends when the domain has no more."""
    found: set[str] = set()
    draws_left = _DRAWS
    while draws_left:
        payload = domain.generate(rng)
        key = prompt_key(domain, payload)
        if is_held_out(key) and key not in found:
            found.add(key)
            draws_left = _DRAWS
            yield payload
        else:
            draws_left -= 1
