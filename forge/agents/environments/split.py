"""Training tasks and held-out tasks of a domain: disjoint by construction.

    held out  <=>  blake2b(first messages) mod 4 == 0

The side of a task depends on its prompt only, not on a seed, position or process. So a task that is
held out in one run is not trained in any run, nor shown by a teacher.
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
"""One prompt of this many is held out. A change moves tasks between the sides: never resume an
older run after it."""
_DRAWS: Final = 2000
"""Number of draws without a new task of the required side after which a domain counts as exhausted.
The probability to miss a prompt with a share of 1 % is then below 1e-8."""


def prompt_key(domain: Domain, payload: Mapping[str, Any]) -> str:
    """Returns the identity of a task: the first messages of an attempt."""
    return json.dumps(domain.episode(payload).messages, sort_keys=True, separators=(",", ":"))


def is_held_out(key: str) -> bool:
    """Returns True if the prompt is on the held-out side."""
    digest = blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def training_payload(domain: Domain, rng: Random) -> dict[str, Any]:
    """Returns the payload of a training task, a pure function of `rng`.

    Raises `FailedPrecondition` for a domain without training tasks.
    """
    for _ in range(_DRAWS):
        payload = domain.generate(rng)
        if not is_held_out(prompt_key(domain, payload)):
            return payload
    raise FailedPrecondition(f"domain {domain.name!r}: {_DRAWS} draws gave no training task")


def held_out_payloads(domain: Domain, rng: Random) -> Iterator[dict[str, Any]]:
    """Yields payloads of held-out tasks, each prompt once, until the domain has no more."""
    yielded: set[str] = set()
    draws_left = _DRAWS
    while draws_left:
        payload = domain.generate(rng)
        key = prompt_key(domain, payload)
        if is_held_out(key) and key not in yielded:
            yielded.add(key)
            draws_left = _DRAWS
            yield payload
        else:
            draws_left -= 1
