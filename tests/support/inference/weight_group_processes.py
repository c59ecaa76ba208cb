"""A trainer's publisher and workers' followers as processes that form groups by gloo.

Orders as `benchmarks.support.weights.stream`. Each has shared memory of its own, as on a host of
its own.
"""

from __future__ import annotations

import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.support.weights import stream
from forge.runtime.files import host_memory
from forge.runtime.weights import group_process


def publish(
    pipe: Connection, etcd: str, folder: str, silence_s: float, environment: dict[str, str]
) -> None:
    """Be the trainer's publisher."""
    _prepare(folder, silence_s, environment)
    stream.publish_weights(pipe, etcd, "groups", "group")


def follow(
    pipe: Connection, etcd: str, folder: str, silence_s: float, environment: dict[str, str]
) -> None:
    """Be a worker's follower; its name is that of the folder."""
    _prepare(folder, silence_s, environment)
    stream.follow_weights(pipe, etcd, "groups", Path(folder).name, folder, "group")


def _prepare(folder: str, silence_s: float, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    Path(folder).mkdir(exist_ok=True)
    host_memory.DIRECTORY = Path(folder)
    group_process._PROGRAM = "tests.support.inference.gated_broadcast"
    stream.LEASE_S = 10.0
    stream.GROUPS = replace(stream.GROUPS, silence_s=silence_s)
