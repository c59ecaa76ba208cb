"""A job for a coding agent: a bug to repair in a directory, and the reward for doing it.

Owns the directory and what the scripted model does there. The test imports it, and so do the
processes that a runner starts for its reward functions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forge.agents.environments.base import Transcript
from forge.agents.rewards import RewardTask
from tests.support.gateway.script import scripted

BROKEN = "def add(a, b):\n    return a - b\n"
REPAIRED = "def add(a, b):\n    return a + b\n"
CHECK = "from calc import add\n\nassert add(2, 3) == 5\nprint('add adds')\n"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""What ends mini-swe-agent's work."""


def prepare(folder: Path) -> None:
    """Puts the broken program there."""
    (folder / "calc.py").write_text(BROKEN)
    (folder / "check.py").write_text(CHECK)


def task(folder: Path) -> dict[str, Any]:
    """The payload: what to do, and what the model says, each turn one command."""
    commands = (
        f"cd {folder} && cat calc.py && python3 check.py",
        f"cd {folder} && sed -i 's/a - b/a + b/' calc.py",
        f"cd {folder} && python3 check.py > result.txt && cat result.txt",
        SUBMIT,
    )
    steps = [f"Next I will run this.\n{_bash(command)}" for command in commands]
    prompt = scripted(f"The program in {folder} subtracts. Make it add.", *steps)
    return {"prompt": prompt, "folder": str(folder)}


def _bash(command: str) -> str:
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call>"


def repaired(trajectory: Transcript, task: RewardTask) -> bool:
    """The reward function: whether the work was done, not whether it was said to be."""
    return Path(task.payload["folder"], "calc.py").read_text() == REPAIRED
