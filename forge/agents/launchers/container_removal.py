"""Removes the containers of a runner: `python -I -S container_removal.py LABEL ENGINE ...`.

Owns the removal before the first container, of those that an earlier runner left, and after the
end of the runner, which it observes by its standard input: also after SIGKILL.
"""

from __future__ import annotations

import subprocess
import sys
import time

ROUNDS = 3
PAUSE_S = 1.0
"""Between rounds: the engine may be about to start one more."""


def main() -> None:
    """Removes, waits, removes."""
    label, *engine = sys.argv[1:]
    remove(label, engine)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    for number in range(ROUNDS):
        found = remove(label, engine)
        if number and not found:
            return
        time.sleep(PAUSE_S * bool(found))


def remove(label: str, engine: list[str]) -> bool:
    """Removes all containers with a label; returns whether there were any."""
    listing = [*engine, "ps", "--all", "--quiet", "--filter", f"label={label}"]
    found = subprocess.run(listing, capture_output=True, text=True).stdout.split()
    if found:
        subprocess.run([*engine, "rm", "--force", *found], capture_output=True)
    return bool(found)


if __name__ == "__main__":
    main()
