"""What `forge status` tells people of a worker's metadata."""

from __future__ import annotations

import io
import json

from rich.console import Console

from forge.cli.status.command import status_table
from forge.cli.status.system_state import Service, SystemState, without_old_terms
from forge.core.errors import Unavailable

REFUSED = "version 3 is refused, version 2 stays in service: logits are not finite"


def service(kind: str, *, role: str = "", **metadata: str) -> Service:
    """A ready service with this metadata."""
    return Service(
        kind=kind,
        instance=f"{kind}-1",
        address="10.0.0.7:7400",
        role=role,
        state="ready",
        version="1.0",
        metadata=metadata,
    )


def worker(**metadata: str) -> SystemState:
    """A system of one decode worker with this metadata."""
    return system(service("decode", **metadata))


def system(*services: Service) -> SystemState:
    """A system of these services, without further answers."""
    unread = Unavailable("not asked")
    return SystemState(
        cluster="default",
        services=[*services],
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


def test_shard_without_its_follower_is_a_problem() -> None:
    """The reason of the leader, the effect and the run-book; the table does not repeat it."""
    reason = "its follower is not connected, and replication.min_copies is 2"
    state = system(service("pool", shard="s0", copies="1", refuses_writes=reason))
    (problem,) = (one for one in state.problems() if one.startswith("pool "))
    assert problem.startswith("pool shard s0 refuses writes, so no rollout ends and no step is")
    assert reason in problem and "docs/runbooks/pool_host_lost.md" in problem
    printed = io.StringIO()
    Console(file=printed, width=200).print(status_table(state))
    assert "shard=s0 copies=1" in printed.getvalue() and reason not in printed.getvalue()
    joined = system(service("pool", shard="s0", copies="2", refuses_writes=""))
    assert not [one for one in joined.problems() if one.startswith("pool ")]


def test_shard_without_room_is_a_problem() -> None:
    """The cause and the page; the table does not repeat it."""
    reason = "its disk and map have room for less than store.disk_reserve_bytes = 67108864"
    state = system(service("pool", shard="s0", refuses_turns=reason))
    (problem,) = (one for one in state.problems() if one.startswith("pool "))
    assert problem.startswith("pool shard s0 refuses turns, so its rollouts wait: its disk and map")
    assert "docs/pool_retention.md" in problem
    printed = io.StringIO()
    Console(file=printed, width=200).print(status_table(state))
    assert "shard=s0" in printed.getvalue() and "refuses_turns" not in printed.getvalue()


def test_failed_term_is_shown_until_a_scheduler_leads() -> None:
    """Of the standby, whose term ended before that of the leader began."""
    failed = service("scheduler", role="standby", term_error="no pool", metrics="10.0.0.7:9221")
    assert without_old_terms([failed]) == [failed]
    *_, standby = without_old_terms([service("scheduler", role="leader"), failed])
    assert standby.metadata == {"metrics": "10.0.0.7:9221"}
