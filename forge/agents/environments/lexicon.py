"""The words of the tasks, shared by all domains to keep the vocabulary small.

Owns lists of words only. Each word is plain ASCII and one token of the tiny policy.
"""

from __future__ import annotations

from typing import Final

NAMES: Final = (
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Leo",
    "Mia", "Ned", "Ola", "Pia", "Ravi", "Sara", "Tom", "Uma", "Vera", "Wim", "Yan", "Zoe",
)  # fmt: skip
CITIES: Final = ("Bern", "Cairo", "Delhi", "Lima", "Oslo", "Paris", "Quito", "Rome", "Seoul", "Tunis")  # fmt: skip  # noqa: E501
PETS: Final = ("cat", "dog", "fish", "goat", "horse", "mouse", "owl", "pony", "rabbit", "swan")
JOBS: Final = ("baker", "cook", "driver", "farmer", "guard", "nurse", "painter", "pilot", "singer", "tailor")  # fmt: skip  # noqa: E501
DRINKS: Final = ("beer", "cider", "cocoa", "coffee", "juice", "milk", "soda", "tea", "water", "wine")  # fmt: skip  # noqa: E501
COLORS: Final = ("black", "blue", "brown", "gold", "green", "grey", "pink", "red", "white", "yellow")  # fmt: skip  # noqa: E501
FRUIT: Final = ("apples", "dates", "figs", "limes", "nuts", "pears", "plums", "grapes")
GOODS: Final = ("bell", "book", "chair", "clock", "drum", "flute", "globe", "kite", "lamp", "mirror", "rug", "vase")  # fmt: skip  # noqa: E501
DAYS: Final = ("Mon", "Tue", "Wed", "Thu")
