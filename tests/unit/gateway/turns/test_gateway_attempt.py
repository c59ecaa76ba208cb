"""How the pieces of a turn are had from routers that fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge.core.errors import Unavailable
from forge.v1 import inference_pb2
from services.gateway.errors import RouterLost
from services.gateway.turns import attempt as attempt_module
from services.gateway.turns.attempt import Samples

GONE = Unavailable("the router is gone")


class Call:
    """A `SampleCall` whose attempts answer by a script: responses, errors, None at the end."""

    call_id = "call"
    aborted = False

    def __init__(self, *attempts: list[Any]) -> None:
        self._attempts = list(attempts)
        self._now: list[Any] = []
        self.asked: list[str] = []
        self.ended = 0

    async def begin(self, request: inference_pb2.SampleRequest, *, wait_s: float) -> None:
        self.asked.append(request.request_id)
        self._now = self._attempts.pop(0)

    async def read(self) -> Any:
        said = self._now.pop(0)
        if isinstance(said, Exception):
            raise said
        return said

    def end(self) -> None:
        self.ended += 1


class Attempt:
    """What `Samples` uses of an attempt: the answer "end" completes it, "stop" stops it."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self.reader = SimpleNamespace(stopped=False)
        self.restarts = 0
        self.complete = self.passed_on = False

    def take(self, said: str, prompt_tokens: int) -> str:
        self.reader.stopped = said == "stop"
        self.complete = said in ("end", "stop")
        self.passed_on = self._stream
        return said

    def restart(self) -> None:
        self.restarts += 1


def samples(call: Call, *, stream: bool = False, retry_for_s: float = 60.0) -> Any:
    request = inference_pb2.SampleRequest(request_id=call.call_id)
    attempt = cast(Any, Attempt(stream=stream))
    return Samples(
        cast(Any, call), attempt, request, prompt_tokens=1, retry_for_s=retry_for_s
    ), attempt


async def all_of(source: Any) -> list[str]:
    pieces = []
    while (piece := await source.next()) is not None:
        pieces.append(piece)
    return pieces


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_module, "FIRST_BACKOFF_S", 0.0)


async def test_an_answer_that_breaks_off_is_begun_anew_while_nobody_saw_it() -> None:
    """Lost or ended without a finish, it is asked for again by another id, from the start."""
    call = Call(["a", GONE], ["b", None], ["a", "end", None])
    source, attempt = samples(call)
    assert await all_of(source) == ["a", "b", "a", "end"]
    assert attempt.restarts == 2
    assert len(set(call.asked)) == 3


async def test_an_answer_that_was_passed_on_is_not_begun_anew() -> None:
    """The agent has seen a part of it: another beginning would not fit."""
    source, _ = samples(Call(["a", GONE]), stream=True)
    assert await source.next() == "a"
    with pytest.raises(Unavailable, match="gone"):
        await source.next()


async def test_a_router_that_dies_behind_the_last_piece_is_not_missed() -> None:
    """The answer is whole by then."""
    source, _ = samples(Call(["a", "end", GONE]), stream=True)
    assert await all_of(source) == ["a", "end"]


async def test_a_stopped_answer_ends_its_call() -> None:
    """Nothing is read behind a stop string, and the router is told."""
    call = Call(["a", "stop", "more"])
    source, _ = samples(call, stream=True)
    assert await all_of(source) == ["a", "stop"]
    assert call.ended == 1


async def test_attempts_end_with_the_time_for_them() -> None:
    """The last error is raised."""
    source, _ = samples(Call([GONE]), retry_for_s=0.0)
    with pytest.raises(Unavailable, match="gone"):
        await source.next()


LOST = RouterLost("the stream to the router was lost")


@pytest.mark.parametrize(
    ("error", "sampled_for_s", "again"),
    [(LOST, 600.0, True), (LOST, 5.0, True), (LOST, 0.0, True), (GONE, 600.0, False)],
)
async def test_a_long_answer_is_begun_anew_as_well(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sampled_for_s: float, again: bool
) -> None:
    """The time for another router begins when the first is lost, however long it had sampled; not
    where a router says that it has waited long enough."""
    now_s = 0.0
    monkeypatch.setattr(attempt_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    call = Call(["a", error], ["b", "end", None])
    source, _ = samples(call, retry_for_s=30.0)
    assert await source.next() == "a"
    now_s = sampled_for_s
    if again:
        assert await all_of(source) == ["b", "end"]
    else:
        with pytest.raises(Unavailable, match="gone"):
            await source.next()


async def test_routers_that_are_not_there_are_not_asked_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt ends as lost, too, in less time than any that had a router."""
    now_s = 0.0
    monkeypatch.setattr(attempt_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    class Dead(Call):
        async def read(self) -> Any:
            nonlocal now_s
            now_s += 5.0
            raise LOST

    call = Dead(*[[] for _ in range(100)])
    source, _ = samples(call, retry_for_s=30.0)
    with pytest.raises(Unavailable, match="lost"):
        await source.next()
    assert len(call.asked) == 6
