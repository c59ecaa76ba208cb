"""The worker process of reward functions: `python -m forge.agents.scoring.reward_worker`.

Owns the calls, one after the other: loads functions, converts their arguments from JSON and their
rewards to JSON. It leads a process group, which `forge.agents.scoring.reward_pool` kills.

Frames on stdin and stdout: four bytes of length, big-endian, then a JSON object.

    {"call": 1, "function": "module:name"}                              request: load
    {"call": 2, "function": ..., "trajectory": {...}, "task": {...}}    request: call
    {"call": 2, "rewards": [...]}                                       answer: success
    {"call": 2, "error": "one line", "cause": "..."}                    answer: failure

The output of a function is redirected to standard error.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from forge.agents.environments.base import Transcript
from forge.agents.plugins import load_attribute
from forge.agents.rewards import NoReward, RewardFunction, RewardTask, components
from forge.core.errors import ConfigError
from forge.core.extras import place_of

PR_SET_PDEATHSIG = 1
LENGTH_BYTES = 4
ERROR_CHARS = 300


def main() -> None:
    """Serves until standard input ends."""
    memory_bytes, processes, parent, user = map(int, sys.argv[1:])
    _contain(memory_bytes=memory_bytes, processes=processes, parent=parent)
    if user and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    requests, answers = _take_pipes()
    while frame := read_frame(requests):
        request = json.loads(frame)
        answer = {"call": request["call"]} | _answer(request)
        answers.write(framed(json.dumps(answer, allow_nan=False).encode()))
        answers.flush()


def framed(body: bytes) -> bytes:
    """Returns the frame of a body."""
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def read_frame(stream: BinaryIO) -> bytes:
    """Returns the body of the next frame; b"" at the end."""
    length = int.from_bytes(stream.read(LENGTH_BYTES), "big")
    return stream.read(length)


def _contain(*, memory_bytes: int, processes: int, parent: int) -> None:
    """Applies the limits; the kernel ends this process with the runner."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the runner is gone")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for kind, limit in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_NPROC, processes)):
        if limit:
            resource.setrlimit(kind, (limit, limit))


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns the pipes of requests and answers, which functions cannot reach by print or input."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rewards of a call, or one line about its failure."""
    reference = request["function"]
    try:
        function = _load(reference)
        if "task" not in request:
            return {"rewards": []}
        returned = _call(function, request)
        rewards = components(returned, function=reference.rpartition(":")[2])
        return {
            "rewards": [
                {"name": r.name, "kind": r.kind, "value": r.value, "turn_index": r.turn_index}
                for r in rewards
            ]
        }
    except ConfigError as error:
        return _failure("setting", str(error))
    except NoReward as error:
        return _failure("value", str(error))
    except MemoryError:
        return _failure("memory", "MemoryError: it exceeded the memory limit of its process")
    # A function that ends the interpreter has failed too; the process stays usable.
    except (Exception, SystemExit) as error:
        return _failure("raised", f"{type(error).__name__}: {error}{place_of(error)}")


@cache
def _load(reference: str) -> RewardFunction:
    """Raises `ConfigError`."""
    function: RewardFunction = load_attribute(reference)
    if not callable(function):
        raise ConfigError(f"{reference} is not a function: {function!r:.80}")
    return function


def _call(function: RewardFunction, request: Mapping[str, Any]) -> object:
    returned = function(Transcript(**request["trajectory"]), RewardTask(**request["task"]))
    if inspect.isawaitable(returned):
        return asyncio.run(_awaited(returned))
    return returned


async def _awaited(returned: Awaitable[object]) -> object:
    return await returned


def _failure(cause: str, text: str) -> dict[str, Any]:
    return {"error": " ".join(text.split())[:ERROR_CHARS], "cause": cause}


if __name__ == "__main__":
    main()
