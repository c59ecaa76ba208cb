"""The cause of an end of vLLM's process, from its output."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from services.inference.engines.vllm.engine_output import EngineOutput, end_of, last_error

TRACEBACK = """\
(EngineCore pid=7894) ERROR 11-26 16:41:21 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=7894) ERROR 11-26 16:41:21 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=7894) ERROR 11-26 16:41:21 [core.py:1512]   File "core.py", line 1, in run
(EngineCore pid=7894) ERROR 11-26 16:41:21 [core.py:1512]     raise RuntimeError("no: nothing")
(EngineCore pid=7894) ERROR 11-26 16:41:21 [core.py:1512] RuntimeError: Unexpected size, 32
nanobind: leaked 4 instances!
Process EngineCore:
"""


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (TRACEBACK, "RuntimeError: Unexpected size, 32"),
        ("KeyError: 'a'\nDuring handling:\nvllm.errors.SomeError: b\n", "vllm.errors.SomeError: b"),
        ("\x1b[1;36m(EngineCore pid=1)\x1b[0;0m AssertionError\n", "AssertionError"),
        ("(Worker_TP0 pid=12) ValueError: of a rank", "ValueError: of a rank"),
        ("terminate called after ...\n  what():  out of memory\n", "what():  out of memory"),
        (
            "Fatal Python error: Segmentation fault\n\nThread 1:",
            "Fatal Python error: Segmentation fault",
        ),
        ("WARNING 11-26 16:41:21 [a.py:1] an Error: in a sentence\nloaded\n", ""),
        ("", ""),
    ],
)
def test_last_error_is_that_of_the_last_traceback(output: str, error: str) -> None:
    """Of Python, of C++, or of a crash; without the logger's prefix and its colours."""
    assert last_error(output.splitlines()) == error


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, ""),
        (1, ""),
        (0, "exit code 0"),
        (-11, "SIGSEGV"),
        (-99, "signal 99"),
    ],
)
def test_an_end_has_words_where_no_exception_explains_it(code: int | None, words: str) -> None:
    """An exception of Python gives exit code 1."""
    assert end_of(code) == words


def ended(argv: Sequence[str], capfd: Any) -> tuple[str, str]:
    """The cause of the end of a process, and what it wrote to this process's standard error."""
    output = EngineOutput()
    with output.inherited():
        process = subprocess.Popen(argv)
    code = process.wait()
    return output.cause([code]), capfd.readouterr().err


def test_output_of_a_process_is_passed_on_and_kept(capfd: Any) -> None:
    """Whole, also if the process ends at once, and more than a pipe holds."""
    script = "seq 30000 >&2; echo 'RuntimeError: x' >&2; exit 1"
    cause, written = ended(["sh", "-c", script], capfd)
    assert cause == "RuntimeError: x"
    assert written.splitlines() == [*map(str, range(1, 30001)), "RuntimeError: x"]


def test_a_signal_is_named_beside_the_last_error(capfd: Any) -> None:
    """The error may be older than the signal."""
    killed = "kill -SEGV $$"
    assert ended(["sh", "-c", killed], capfd)[0] == "SIGSEGV"
    cause, _ = ended(["sh", "-c", f"echo 'OSError: old' >&2; {killed}"], capfd)
    assert cause == "SIGSEGV; last error of its output: OSError: old"
