"""The settings of sessions that tests run without a gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from forge.runtime.security.tokens import Claims
from forge.v1 import common_pb2
from services.gateway.actors.session import SessionSettings
from services.gateway.model.encode_threads import EncodeThreads
from tests.support.gateway.chat_templates import make_model


async def none_stored(_: Claims) -> None:
    """As `SessionSettings.fetch`."""


async def no_turns(_: Claims) -> int:
    """As `SessionSettings.stored`."""
    return 0


def session_settings(
    writer: Any,
    *,
    fetch: Callable[[Claims], Awaitable[common_pb2.Trajectory | None]] = none_stored,
    stored: Callable[[Claims], Awaitable[int]] = no_turns,
    set_size: Callable[[str, int], None] = lambda *_: None,
    clock: Callable[[], float] = lambda: 0.0,
    model: Any = None,
    threads: EncodeThreads | None = None,
) -> SessionSettings:
    """A small context, a clock that stands and one thread, unless a test names others. `writer`
    stands in for the shard writer."""
    return SessionSettings(
        model=model or make_model("chatml", context_tokens=64),
        fetch=fetch,
        stored=stored,
        writer=writer,
        set_size=set_size,
        clock=clock,
        threads=threads or EncodeThreads(1),
    )
