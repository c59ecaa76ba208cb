"""What the client programs share: a tool to use, and the report that a test reads.

Owns no way to a model: each program uses its client as that client's own manual says, and finds
base URL and key in the environment as it would anywhere else.
"""

import json
import sys
from importlib.metadata import version

MODEL = "policy"
ROOM = {"shelf": "a red book", "box": "a brass key", "door": "it is locked"}
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "string", "description": "shelf, box or door"}},
    "required": ["at"],
}


def look(at: str) -> str:
    """Look somewhere in the room.

    Args:
        at: shelf, box or door
    """
    return ROOM[at]


def task() -> str:
    return sys.argv[1]


def wants(word: str) -> bool:
    """Whether the test asked for this variant."""
    return word in sys.argv[2:]


def report(package: str, answer: object, pieces: int = 0) -> None:
    """What the test reads: `pieces` is how many parts the last answer came in."""
    said = {"version": version(package), "answer": str(answer), "pieces": pieces}
    # On a line of its own, whatever a framework did to its terminal.
    print(f"\n{json.dumps(said)}")
