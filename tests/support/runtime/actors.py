"""Actors that tests drive, and the messages they know."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from forge.core.errors import NotFound
from forge.runtime.actors.actor import Actor, ThreadActor


@dataclass(frozen=True, slots=True)
class Double:
    number: int


@dataclass(frozen=True, slots=True)
class Refuse:
    pass


@dataclass(frozen=True, slots=True)
class Crash:
    pass


class Counting:
    """What both doublers know; counts, so that a test sees whether it is the same incarnation."""

    mailbox_size = 4

    def __init__(self) -> None:
        self.handled = 0

    def knows(self, message: Any) -> bool:
        self.handled += 1
        return isinstance(message, Double | Refuse | Crash) or message == "handled"

    def answer(self, message: Any) -> Any:
        match message:
            case Double(number):
                return 2 * number
            case Refuse():
                raise NotFound("no such thing")
            case Crash():
                raise KeyError("a bug")
        return self.handled


class Doubler(Counting, Actor):
    """On the event loop."""

    async def receive(self, message: Any) -> Any:
        return self.answer(message) if self.knows(message) else await super().receive(message)


class ThreadDoubler(Counting, ThreadActor):
    """The same on a thread."""

    def receive(self, message: Any) -> Any:
        return self.answer(message) if self.knows(message) else super().receive(message)


class Gate(Actor):
    """Handles a message only once its gate is open."""

    mailbox_size = 2

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.entered = asyncio.Event()
        self.seen: list[Any] = []

    async def receive(self, message: Any) -> Any:
        self.entered.set()
        await self.open.wait()
        self.seen.append(message)
        return message
