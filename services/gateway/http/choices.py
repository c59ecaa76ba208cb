"""The choices of one answer: complete, or as events in the order of their arrival."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from services.gateway.conversation.turn_request import TurnRequest
from services.gateway.http.edge import Ending
from services.gateway.sessions import Session
from services.gateway.turns.run import Turns
from services.gateway.turns.types import Turn

MAX_QUEUED_EVENTS = 64


@dataclass(slots=True)
class Choice(ABC):
    """One streamed choice."""

    turn: Turn | None = field(default=None, init=False)
    """The finished turn, after the last event."""

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """Yields the events of the choice."""


async def finish_all(turns: Turns, session: Session, requests: Sequence[TurnRequest]) -> list[Turn]:
    """Runs the turns of all choices; the first error ends all of them."""
    if len(requests) == 1:
        # A failed TaskGroup and its error keep the request until the next garbage collection.
        return [await turns.finish_turn(session, requests[0])]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(turns.finish_turn(session, one)) for one in requests]
    return [task.result() for task in tasks]


async def merged(
    choices: Sequence[Choice], *, end: Callable[[list[Turn]], bytes]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of all choices, then `end` of their turns as an `Ending`; the first error
    ends all choices."""
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(maxsize=MAX_QUEUED_EVENTS)

    async def drain(choice: Choice) -> None:
        try:
            async with aclosing(choice.events()) as events:
                async for event in events:
                    await queue.put(event)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(drain(choice)) for choice in choices]
    try:
        left = len(tasks)
        while left:
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                left -= 1
            else:
                yield event
        yield Ending(end([choice.turn for choice in choices if choice.turn is not None]))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
