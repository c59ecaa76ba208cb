"""General agent: an order desk with tools, state and context folding.

An order ("Ben orders: lamp to Mia.") takes four turns and one fold:

    [system, user]                      -> stock(item)            -> "shelf B4"
    + assistant, tool                   -> address(name)          -> "city Oslo"
    + assistant, tool, fold_prompt      -> summary                   (fold_every = 2)
    [system, user, "Summary: ..."]      -> ship(shelf, city)      -> "shipped"
    + assistant, tool                   -> "done"

So only the summary has shelf and city when they are needed (`forge.agents.environments.folding` has
the messages). Owns the tasks, the desk's state and a teacher with mistakes: it looks up the wrong
person, skips a look-up, or omits a fact in its summary and invents it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, Final

from forge.agents.environments.base import (
    Message,
    PlainEpisode,
    Reward,
    ToolError,
    Transcript,
    asked,
    outcome_and_failures,
)
from forge.agents.environments.lexicon import CITIES, GOODS, NAMES
from forge.agents.environments.payload import required
from forge.agents.environments.teaching import (
    Rehearsal,
    TaughtDomain,
    a_habit,
    function_tool,
)

FOLD_EVERY: Final = 2
FOLD_PROMPT: Final = "Summarize."
FULL_SUMMARY: Final = "shelf {shelf}, city {city}"
SUMMARIES: Final = {
    FULL_SUMMARY: 0.35,
    "shelf {shelf}": 0.25,
    "city {city}": 0.25,
    "in progress": 0.15,
}
"""Probabilities of the teacher's summaries."""
OUTCOMES: Final = (0.0, 0.25, 1.0)
"""Outcomes for none, one and both of shelf and city."""
WRONG_PERSON: Final = 0.25
"""Probability that the teacher looks up the address of the customer."""
SKIPS: Final = 0.1
"""Probability that the teacher ships without a look-up of the address."""


class GeneralEpisode(PlainEpisode):
    """One attempt: an order, and a desk that ships at most once."""

    tools = [
        function_tool("stock", "Where an item lies.", item="string"),
        function_tool("address", "Where a person lives.", name="string"),
        function_tool("ship", "Sends an item; once an order.", shelf="string", city="string"),
    ]

    def __init__(self, payload: Mapping[str, Any]) -> None:
        self.customer = required(payload, "customer", str)
        self.recipient = required(payload, "recipient", str)
        self.item = required(payload, "item", str)
        self.shelves: dict[str, str] = required(payload, "shelves", dict)
        self.cities: dict[str, str] = required(payload, "cities", dict)
        self.shelf = required(self.shelves, self.item, str)
        self._city = required(self.cities, self.recipient, str)
        self._shipped: tuple[str, str] | None = None

    @property
    def messages(self) -> list[Message]:
        """The order."""
        return asked("Ship the order.", f"{self.customer} orders: {self.item} to {self.recipient}.")

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Executes one tool call and returns its result. Raises `ToolError`."""
        match name:
            case "stock":
                return f"shelf {_entry(self.shelves, arguments, 'item')}"
            case "address":
                return f"city {_entry(self.cities, arguments, 'name')}"
            case "ship":
                return self._ship(arguments)
            case _:
                return super().run(name, arguments)

    def score(self, transcript: Transcript) -> list[Reward]:
        """Returns the outcome by shelf and city; each failed call gets -1 as process."""
        shelf, city = self._shipped or (None, None)
        outcome = OUTCOMES[(shelf == self.shelf) + (city == self._city)]
        return outcome_and_failures("order_shipped", outcome, transcript)

    def _ship(self, arguments: Mapping[str, Any]) -> str:
        if self._shipped is not None:
            raise ToolError("already shipped")
        self._shipped = (str(arguments.get("shelf", "")), str(arguments.get("city", "")))
        return "shipped"


class GeneralDomain(TaughtDomain[GeneralEpisode]):
    """Orders to ship: find the shelf, find the city, remember both, ship."""

    new_episode = GeneralEpisode
    name = "general"
    scaffold = "whitebox"
    max_turns = 6

    def generate(self, rng: Random) -> dict[str, Any]:
        """Returns one order, in a shop with three items and two customers."""
        customer, recipient = rng.sample(NAMES, 2)
        items = rng.sample(GOODS, 3)
        cities = rng.sample(CITIES, 2)
        return {
            "customer": customer,
            "recipient": recipient,
            "item": items[0],
            "shelves": {item: _shelf(rng) for item in sorted(items)},
            "cities": {customer: cities[0], recipient: cities[1]},
            "fold_every": FOLD_EVERY,
            "fold_prompt": FOLD_PROMPT,
        }

    def teach(
        self, rehearsal: Rehearsal, episode: GeneralEpisode, rng: Random, *, flawless: bool
    ) -> None:
        """Records the teacher's actions, with or without its mistakes."""
        rehearsal.call("stock", item=episode.item)
        shelf, guessed_city = episode.shelf, rng.choice(CITIES)
        if not flawless and rng.random() < SKIPS:
            rehearsal.call("ship", shelf=shelf, city=guessed_city)
            rehearsal.fold(FOLD_PROMPT, "shipped")
            rehearsal.say("done")
            return
        mistaken = not flawless and rng.random() < WRONG_PERSON
        person = episode.customer if mistaken else episode.recipient
        rehearsal.call("address", name=person)
        summary = FULL_SUMMARY if flawless else a_habit(SUMMARIES, rng)
        rehearsal.fold(FOLD_PROMPT, summary.format(shelf=shelf, city=episode.cities[person]))
        rehearsal.call(
            "ship",
            shelf=shelf if "{shelf}" in summary else _shelf(rng),
            city=episode.cities[person] if "{city}" in summary else guessed_city,
        )
        rehearsal.say("done")


def _shelf(rng: Random) -> str:
    return f"{rng.choice('ABCDEFGH')}{rng.randint(1, 9)}"


def _entry(book: Mapping[str, str], arguments: Mapping[str, Any], key: str) -> str:
    entry = book.get(str(arguments.get(key, "")))
    if entry is None:
        raise ToolError("not found")
    return entry
