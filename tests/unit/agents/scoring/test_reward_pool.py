"""Reward functions in processes of their own: what crosses, what limits them, how they fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from forge.agents.environments.base import Reward, Transcript
from forge.agents.rewards import RewardTask
from forge.agents.scoring.reward_pool import RewardError, RewardLimits, RewardPool
from forge.core.errors import ConfigError, ResourceExhausted
from tests.support.suite.forge_run import wait_for_death

MODULE = "tests.support.agents.reward_functions"
FUNCTIONS = (
    "right", "detailed", "waiting", "arguments", "evaluated", "fails", "leaves", "talks",
    "own_pid", "hangs", "hangs_with_company", "crashes", "killed", "spoils", "fragile", "greedy",
    "process_limit", "meddles",
)  # fmt: skip
TRANSCRIPT = Transcript(
    answer="four",
    turns=2,
    failed_calls=(1,),
    messages=({"role": "user", "content": "2 + 2? \udcff"},),
)


def make_pool(*, workers: int = 1, call_s: float = 30.0, memory_mb: int = 512) -> RewardPool:
    """Every function under a domain of its own name."""
    return RewardPool(
        {name: f"{MODULE}:{name}" for name in FUNCTIONS},
        limits=RewardLimits(call_s=call_s, memory_bytes=memory_mb << 20, processes=12345),
        workers=workers,
    )


async def score(pool: RewardPool, function: str, **payload: Any) -> list[Reward]:
    return await pool.score(TRANSCRIPT, RewardTask(task_id="t0", domain=function, payload=payload))


async def value(pool: RewardPool, function: str, **payload: Any) -> float:
    """The value of the one component it gave."""
    (reward,) = await score(pool, function, **payload)
    return reward.value


async def failure(pool: RewardPool, function: str, **payload: Any) -> str:
    """The error of a failed call: one line that begins with the function."""
    with pytest.raises(RewardError) as caught:
        await score(pool, function, **payload)
    prefix = f"reward function {MODULE}:{function}: "
    assert str(caught.value).startswith(prefix)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(prefix)


@pytest_asyncio.fixture(scope="module")
async def pool() -> AsyncIterator[RewardPool]:
    """One process for all tests that leave it in peace."""
    made = make_pool()
    yield made
    await made.close()


@pytest_asyncio.fixture
async def own_pool() -> AsyncIterator[RewardPool]:
    """A pool to spoil, one process at a time."""
    made = make_pool(memory_mb=256)
    yield made
    await made.close()


async def test_number_from_a_reward_function_is_the_outcome(pool: RewardPool) -> None:
    """The shortest reward function is a comparison; its name is the reward's."""
    (reward,) = await score(pool, "right", expected="four")
    assert reward == Reward(name="right", kind="outcome", value=1.0)
    assert await value(pool, "right", expected="five") == 0.0


async def test_no_secret_of_the_runner_reaches_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables pass by name only."""
    for name in ("AWS_SECRET_ACCESS_KEY", "FORGE_RUNNER_KEY_FILE", "JUDGE_API_KEY"):
        monkeypatch.setenv(name, "secret")
    limits = RewardLimits(call_s=30.0, memory_bytes=0, processes=0)
    functions = {"evaluated": f"{MODULE}:evaluated"}
    own_pool = RewardPool(functions, limits=limits, pass_environment=["JUDGE_API_KEY"])
    try:
        environ = "__import__('os').environ"
        secrets = f"float([k for k, v in {environ}.items() if v == 'secret'] == ['JUDGE_API_KEY'])"
        assert await value(own_pool, "evaluated", returns=secrets) == 1.0
        assert await value(own_pool, "evaluated", returns=f"float('PATH' in {environ})") == 1.0
    finally:
        await own_pool.close()


async def test_reward_components_arrive_unchanged(pool: RewardPool) -> None:
    """Name, kind, value and turn arrive; an `async def` is awaited."""
    assert await score(pool, "detailed", sum=4) == [
        Reward(name="own", kind="outcome", value=0.5),
        Reward(name="style", kind="process", value=0.25, turn_index=0),
    ]
    assert await value(pool, "waiting") == 0.5


async def test_reward_function_gets_the_submitted_arguments(pool: RewardPool) -> None:
    """Numbers of any size, any text, nested lists: the function gets the submitted values."""
    told = await failure(pool, "arguments", big=2**80, text="é\udcff")
    assert f"{{'big': {2**80}, 'text': 'é\\udcff'}}" in told
    assert "task_id='t0', domain='arguments'" in told
    assert "[{'role': 'user', 'content': '2 + 2? \\udcff'}] [1]" in told


@pytest.mark.parametrize(
    ("returns", "told"),
    [
        ("nan", "returned nan; must be a finite number"),
        ("-inf", "returned -inf; must be a finite number"),
        ("1e7", "returned 10000000.0; must be a finite number up to 1000000"),
        ("10**400", "returned 1000"),
        ("'0.5'", "returned '0.5'; must be a finite number, a Reward or a list of them"),
        ("None", "returned None; must be"),
        ("{'solved': 1.0}", "returned {'solved': 1.0}; must be"),
        ("[1.0]", "returned 1.0 in a list; must be"),
        ("Reward(name='a', kind='outcome', value=nan)", "reward 'a' has value nan; must be"),
        ("Reward(name='a', kind='outcome', value='high')", "reward 'a' has value 'high'; must"),
        ("Reward(name='a', kind='luck', value=1.0)", "reward 'a' has kind 'luck'; one of outcome"),
        ("Reward(name='', kind='outcome', value=1.0)", "a Reward with the name ''"),
        ("[Reward(name='a', kind='process', value=1, turn_index=1.5)]", "turn_index 1.5; must"),
    ],
)
async def test_invalid_reward_is_refused(pool: RewardPool, returns: str, told: str) -> None:
    """The error names the function and the returned value."""
    assert told in await failure(pool, "evaluated", returns=returns)


async def test_failed_reward_function_reports_its_line(pool: RewardPool) -> None:
    """Type, text, file and line; the process serves further calls, even after sys.exit."""
    before = await value(pool, "own_pid")
    told = await failure(pool, "fails")
    assert told.startswith("KeyError: 'expected' (reward_functions.py:")
    assert (await failure(pool, "leaves")).startswith("SystemExit: enough")
    assert await value(pool, "own_pid") == before


async def test_output_of_a_reward_function_goes_to_the_log(pool: RewardPool) -> None:
    """At most; its standard input is empty."""
    assert await value(pool, "talks") == 0.0
    assert await value(pool, "waiting") == 0.5


async def test_reward_processes_are_reused_and_bounded() -> None:
    """Any number of calls shares them; limits are set in each."""
    pool = make_pool(workers=2)
    pids = {await value(pool, "own_pid")}
    assert await value(pool, "own_pid") in pids
    pids |= set(await asyncio.gather(*(value(pool, "own_pid") for _ in range(16))))
    assert len(pids) == 2
    assert await value(pool, "process_limit") == 12345
    await pool.close()
    wait_for_death([int(pid) for pid in pids])


async def test_slow_reward_function_is_killed() -> None:
    """Also if it ignores signals: its process has ended before the error."""
    pool = make_pool(call_s=0.2)
    before = set(psutil.Process().children())
    await pool.check()
    (worker,) = set(psutil.Process().children()) - before
    assert await failure(pool, "hangs") == "took over 0.2 s"
    wait_for_death([worker.pid])
    await pool.close()


async def test_children_of_a_reward_function_are_killed_with_it(
    pool: RewardPool, tmp_path: Path
) -> None:
    """A cancelled call leaves no process behind."""
    os.mkfifo(tmp_path / "fifo")
    running = asyncio.create_task(score(pool, "hangs_with_company", fifo=str(tmp_path / "fifo")))
    told = await asyncio.to_thread((tmp_path / "fifo").read_text)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    worker, child = map(int, told.split())
    # The signal is sent; a killed grandchild ends when it is next scheduled.
    await asyncio.to_thread(wait_for_death, [worker, child])


async def test_crash_is_reported_with_the_last_output(own_pool: RewardPool) -> None:
    """A dead process is one line: the signal and the last output."""
    told = await failure(own_pool, "crashes")
    assert told == "its process was killed by SIGSEGV; it printed: about to fall"


async def test_reward_process_killed_by_the_host_is_an_infrastructure_failure(
    own_pool: RewardPool,
) -> None:
    """The kernel kills a process if memory runs out; the function has limits of its own."""
    with pytest.raises(ResourceExhausted, match="killed: its process was killed by SIGKILL"):
        await score(own_pool, "killed")


async def test_process_damaged_by_an_earlier_call_is_replaced(own_pool: RewardPool) -> None:
    """The later call is repeated, not failed."""
    assert await value(own_pool, "spoils") == 1.0
    assert await value(own_pool, "fragile") == 0.75


async def test_memory_is_limited(own_pool: RewardPool) -> None:
    """A function above the limit fails with this reason; the next call has the full memory."""
    told = await failure(own_pool, "greedy", bytes=512 << 20)
    assert told.startswith("MemoryError")
    assert await value(own_pool, "greedy", bytes=1 << 19) == 1 << 19


async def test_function_that_writes_to_the_pipe_fails_alone(own_pool: RewardPool) -> None:
    """Invalid bytes end the process; they never become a reward."""
    assert "sent an invalid answer" in await failure(own_pool, "meddles")
    assert await value(own_pool, "right", expected="four") == 1.0


async def test_trajectory_with_objects_is_refused(pool: RewardPool) -> None:
    """The error says that the messages contain objects."""
    odd = Transcript(answer="", turns=1, messages=({"role": "user", "content": object()},))
    with pytest.raises(RewardError, match="the trajectory is not plain data"):
        await pool.score(odd, RewardTask(task_id="t0", domain="right", payload={}))


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        (f"{MODULE}:nothing", "reward_functions has no nothing"),
        ("no.such.module:f", "cannot import no.such.module"),
        (f"{MODULE}:MODULE", "has no MODULE"),
        (f"{MODULE}:NUMBER", "is not a function: 7"),
    ],
)
async def test_wrong_function_reference_is_refused_at_start(reference: str, told: str) -> None:
    """The error names setting and reference."""
    pool = RewardPool(
        {"a": reference}, limits=RewardLimits(call_s=1.0, memory_bytes=0, processes=0), workers=1
    )
    with pytest.raises(ConfigError, match=told) as caught:
        await pool.check()
    await pool.close()
    assert str(caught.value).startswith(f"reward_functions: {reference}")
