"""examples/submit.py: ids of its tasks, and its refusals."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from examples import submit
from forge.client.operator import Operator
from forge.runtime.security.tokens import Keyring


def run_folder(folder: Path) -> Path:
    """The files of a run that the example reads."""
    Keyring.generate(folder / "key")
    (folder / "etcd.endpoints").write_text("127.0.0.1:1")
    return folder


async def test_two_calls_submit_different_tasks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also within one second: the scheduler refuses an id with other content."""
    operator: Any = AsyncMock()
    monkeypatch.setattr(Operator, "connect", AsyncMock(return_value=operator))
    folder = run_folder(tmp_path)
    options = Namespace(directory=folder, domain="qa", tasks=3, rollouts=2, train=True)
    await submit.main(options)
    await submit.main(options)
    ids = [task.task_id for call in operator.submit.await_args_list for task in call.args[0]]
    assert len(set(ids)) == 6


def test_unknown_domain_is_one_line(tmp_path: Path) -> None:
    """No traceback: the line names the domains."""
    words = ["-m", "examples.submit", str(run_folder(tmp_path)), "--domain", "dice"]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(
        "submit.py: error: no domain 'dice'; known domains: reasoning, qa"
    )
