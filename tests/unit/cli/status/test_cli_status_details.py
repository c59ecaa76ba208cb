"""What `forge status` tells people of a worker's metadata."""

from __future__ import annotations

import io
import json

from rich.console import Console

from forge.cli.status.command import status_table
from forge.cli.status.system_state import Service, SystemState
from forge.core.errors import Unavailable

REFUSED = "version 3 is refused, version 2 stays in service: logits are not finite"


def worker(**metadata: str) -> SystemState:
    """A system of one decode worker with this metadata."""
    unread = Unavailable("not asked")
    service = Service(
        kind="decode",
        instance="decode-1",
        address="10.0.0.7:7400",
        role="",
        state="ready",
        version="1.0",
        metadata=metadata,
    )
    return SystemState(
        cluster="default",
        services=[service],
        scheduler=unread,
        inference=unread,
        trainer=unread,
        clock_problems=[],
    )


def test_details_are_for_people_and_json_has_everything() -> None:
    """The engine's name stands for the long list of its capabilities; empty values are left out."""
    capabilities = json.dumps({"engine": "vllm", "roles": ["both"]})
    state = worker(
        capabilities=capabilities, worker_stream="1", awaits_shards="", gpus="GPU 0: 97 %"
    )
    printed = io.StringIO()
    Console(file=printed, width=160).print(status_table(state))
    row = next(line for line in printed.getvalue().splitlines() if "decode-1" in line)
    assert row.split("│")[6].strip() == "engine=vllm gpus=GPU 0: 97 %"
    assert json.loads(state.as_json())["services"][0]["metadata"]["capabilities"] == capabilities


def test_a_worker_without_the_newest_weights_is_a_problem() -> None:
    """Worker and reason, and a remedy for a version that no worker accepts."""
    (problem,) = (
        one for one in worker(weights_error=REFUSED).problems() if one.startswith("decode ")
    )
    assert problem.startswith(f"decode decode-1 does not have the newest weights: {REFUSED}.")
    assert "forge weights rollback" in problem
    assert not [one for one in worker().problems() if one.startswith("decode ")]
