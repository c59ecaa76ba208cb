"""One leased rollout from start to end: sealed when it went well, abandoned when not."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from forge.agents import attempts, conversation
from forge.agents.environments.base import Reward, Transcript
from forge.core.errors import ResourceExhausted
from forge.v1 import common_pb2
from forge.v1 import scheduler_pb2 as pb
from tests.support.agents.attempt_bench import Bench, started_bench
from tests.support.agents.scripted_gateway import (
    Message,
    calls,
    replay,
    text,
)
from tests.support.agents.tasks import SumDomain, SumEpisode, lease


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    async with started_bench() as made:
        yield made


async def test_a_rollout_is_sealed_with_its_rewards(bench: Bench) -> None:
    """Outcome and process arrive as reward events; the outcome reports no error."""
    bench.gateway.script = replay(calls(("nonsense", "{}")), text("4"))
    outcome = await bench.run(lease())
    session = bench.session()
    assert (outcome.error, outcome.trajectory_id) == ("", "t0:0:0")
    assert session.state == "sealed"
    assert session.reward("right") == 1.0
    assert session.reward("failed_call") == -1.0
    kinds = {event.name: event.kind for event in session.rewards.values()}
    assert kinds["right"] == common_pb2.REWARD_KIND_OUTCOME
    assert common_pb2.REWARD_KIND_SPEED not in kinds.values()


async def test_lease_of_an_earlier_scheduler_costs_no_attempt_of_the_task(bench: Bench) -> None:
    """Without a grader token the gateway refuses the rewards: a fault of the infrastructure."""
    earlier = lease()
    earlier.grader_token = ""
    result = await bench.run(earlier)
    assert result.kind == pb.FAILURE_KIND_INFRASTRUCTURE
    assert "a session token sets no rewards" in result.error
    assert bench.session().state == "abandoned"


async def test_scoring_time_is_reported_apart(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close has the time since the agent's end: scoring is no part of the completion time."""
    clock: Any = SimpleNamespace(monotonic=lambda: clock.now_s, now_s=100.0)
    monkeypatch.setattr(attempts, "time", clock)

    class SlowToScore(SumEpisode):
        def score(self, transcript: Transcript) -> list[Reward]:
            clock.now_s += 40.0
            return super().score(transcript)

    class Slow(SumDomain):
        def episode(self, payload: Mapping[str, Any]) -> SumEpisode:
            return SlowToScore(payload["sum"])

    await bench.run(lease(), domain=Slow())
    assert bench.session().after_agent_s == 40.0


async def test_parallel_tools_count_once_for_a_reward_function(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transcript has the time of the tools that the scaffold ran."""
    clock: Any = SimpleNamespace(perf_counter=lambda: clock.now_s, now_s=0.0)
    monkeypatch.setattr(conversation, "time", clock)
    seen: list[Transcript] = []

    class Episode(SumEpisode):
        async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
            clock.now_s = 3.0
            return await super().call(name, arguments)

        def score(self, transcript: Transcript) -> list[Reward]:
            seen.append(transcript)
            return super().score(transcript)

    class Timed(SumDomain):
        def episode(self, payload: Mapping[str, Any]) -> SumEpisode:
            return Episode(payload["sum"])

    add = ("add", '{"a": 1, "b": 3}')
    bench.gateway.script = replay(calls(add, add), text("4"))
    await bench.run(lease(), domain=Timed())
    assert [transcript.tool_s for transcript in seen] == [3.0]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"scaffold": "telepathy"}, "unknown scaffold 'telepathy'"),
        ({"domain": "alchemy"}, "no domain 'alchemy'"),
        ({"payload": {}}, "payload lacks 'sum'"),
        ({"payload": {"sum": "4"}}, "payload 'sum' must be a whole number, is '4'"),
        ({"payload": [4]}, "payload_json must be an object"),
        ({"payload": {"sum": 4, "max_tokens": 0}}, "'max_tokens'"),
    ],
)
async def test_invalid_task_is_a_permanent_failure(
    bench: Bench, task: dict[str, Any], said: str
) -> None:
    """A wrong task fails permanently; the report names the problem."""
    outcome = await bench.run(lease(**task))
    assert outcome.permanent
    assert said in outcome.error


async def test_payload_that_is_no_json_is_a_permanent_failure(bench: Bench) -> None:
    """An invalid payload ends its task, not the runner."""
    claim = lease()
    claim.task.payload_json = "{"
    outcome = await bench.run(claim)
    assert outcome.permanent
    assert "payload_json is not JSON" in outcome.error


async def test_hung_agent_is_abandoned(bench: Bench) -> None:
    """At its time limit; the trajectory is never trained."""

    async def hang(token: str, messages: list[Message]) -> Message:
        await asyncio.Event().wait()
        return text("never")

    bench.gateway.script = hang
    outcome = await bench.run(lease(), rollout_s=0.2)
    assert outcome.error == "no end within 0.2 s of the agent's own time"
    assert (outcome.kind, outcome.permanent) == (pb.FAILURE_KIND_TASK, False)
    assert (bench.session().state, bench.session().reason) == ("abandoned", outcome.error)


async def test_crashed_agent_is_abandoned(bench: Bench) -> None:
    """Any exception of foreign code ends one rollout, which is attempted again. The reason has its
    place."""

    class Broken(SumDomain):
        def episode(self, payload: Any) -> Any:
            raise ZeroDivisionError("division by zero")

    outcome = await bench.run(lease(), domain=Broken())
    said = r"ZeroDivisionError: division by zero \(test_runner_attempts.py:\d+\)"
    assert re.fullmatch(said, outcome.error) and not outcome.permanent
    assert bench.session().state == "abandoned"


async def test_episode_is_closed_after_success_and_failure(bench: Bench) -> None:
    """Its environment is freed."""
    episodes: list[Any] = []

    class Watched(SumDomain):
        def episode(self, payload: Any) -> Any:
            episodes.append(super().episode(payload))
            return episodes[-1]

    async def refuse(token: str, messages: list[Message]) -> Message:
        raise ResourceExhausted("too many calls wait")

    await bench.run(lease(0), domain=Watched())
    bench.gateway.script = refuse
    await bench.run(lease(1), domain=Watched(), rollout_s=0.2)
    assert [episode.closed for episode in episodes] == [True, True]


async def test_stopped_rollout_stores_its_abandon_first(bench: Bench) -> None:
    """After a cancel, for example for a lost lease."""
    stopped = await bench.stopped(lease())
    assert stopped.cancelled()
    assert bench.session().state == "abandoned"


async def test_rollout_with_lost_turns_is_not_sealed(bench: Bench) -> None:
    """A gateway that forgot a turn it had answered refuses the seal: the rollout is repeated."""

    async def forgetful(token: str, messages: list[Message]) -> Message:
        bench.session().requests.clear()
        return text("4")

    bench.gateway.script = forgetful
    outcome = await bench.run(lease())
    assert "turns are recorded" in outcome.error
    assert bench.session().state == "abandoned"


async def test_reward_function_adds_components_and_may_replace_the_outcome(bench: Bench) -> None:
    """Its outcome takes the place of the domain's; everything else is added."""
    outcome = await bench.run(lease(), reward="detailed")
    assert outcome.error == ""
    assert (bench.session().reward("own"), bench.session().reward("style")) == (0.5, 0.25)
    assert "right" not in {event.name for event in bench.session().rewards.values()}


async def test_reward_function_defines_a_domain_of_prompts(bench: Bench) -> None:
    """A domain without an environment needs a reward function only."""
    claim = lease(domain="mine", payload={"prompt": "Say 4.", "expected": "4"})
    outcome = await bench.run(claim, reward="right")
    assert outcome.error == ""
    assert bench.session().requests[0] == [{"role": "user", "content": "Say 4."}]
    assert bench.session().reward("right") == 1.0


@pytest.mark.parametrize(
    ("rewards", "said"),
    [
        ([], "domain sums gave 0 outcome rewards"),
        (None, "domain sums: its score returned None; must be a finite number, a Reward or a list"),
        ([0.5], "domain sums: its score returned 0.5 in a list; must be a finite number"),
        ([Reward(name="a", kind="outcome", value=math.nan)], "reward 'a' has value nan"),
        ([Reward(name="a", kind="outcome", value=1.0, turn_index=1)], "credits turn 1 of 1"),
        ([Reward(name=n, kind="outcome", value=1.0) for n in "ab"], "2 outcome rewards"),
    ],
)
async def test_invalid_score_is_refused_by_the_runner(
    bench: Bench, rewards: Any, said: str
) -> None:
    """No outcome or two, no number, or an unknown turn."""

    class Scoring(SumEpisode):
        def score(self, transcript: Any) -> Any:
            return rewards

    class Domain(SumDomain):
        def episode(self, payload: Any) -> Any:
            return Scoring(4)

    outcome = await bench.run(lease(), domain=Domain())
    assert said in outcome.error
    assert bench.session().state == "abandoned"


async def test_score_may_be_a_generator_with_numbers_of_numpy(bench: Bench) -> None:
    """A domain may compute its rewards with arrays."""
    value: Any = np.float32(0.5)
    turn: Any = np.int64(0)

    class Scoring(SumEpisode):
        def score(self, transcript: Any) -> Any:
            yield Reward(name="a", kind="outcome", value=value)
            yield Reward(name="b", kind="process", value=0.25, turn_index=turn)

    class Domain(SumDomain):
        def episode(self, payload: Any) -> Any:
            return Scoring(4)

    outcome = await bench.run(lease(), domain=Domain())
    assert outcome.error == ""
    assert (bench.session().reward("a"), bench.session().reward("b")) == (0.5, 0.25)


async def test_failed_reward_function_costs_an_attempt(bench: Bench) -> None:
    """The trajectory is abandoned with the reason."""
    outcome = await bench.run(lease(), reward="hangs", reward_s=0.1)
    assert outcome.error.endswith("reward_functions:hangs: took over 0.1 s")
    assert not outcome.permanent
    assert (bench.session().state, bench.session().reason) == ("abandoned", outcome.error)
