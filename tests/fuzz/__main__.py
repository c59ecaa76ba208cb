"""Runs each fuzz target on new random inputs.

    python -m tests.fuzz --inputs 100000

A target is a test of this folder. Random bytes choose its input (`fuzz_one_input` of hypothesis).
A failing input is saved in `.hypothesis/examples`; the printed command repeats and shrinks it.
"""

from __future__ import annotations

import importlib
import logging
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from hypothesis import is_hypothesis_test, settings
from rich.console import Console
from rich.progress import Progress

FOLDER = Path(__file__).parent
MAX_BYTES = 2048
"""Most random bytes of one input."""


@dataclass(kw_only=True)
class Target:
    """A test of any input, and its results."""

    file: Path
    name: str
    run: Callable[[bytes], bytes | None]
    inputs: int = 0
    """Inputs that the test took; shorter bytes than the input needs do not count."""
    elapsed_s: float = 0.0
    failure: str = ""

    @property
    def command(self) -> str:
        """The command that repeats and shrinks the failure."""
        file = self.file.relative_to(FOLDER.parents[1])
        return f"pytest --hypothesis-profile=fuzz {file} -k {self.name}"

    @property
    def result(self) -> str:
        """Its line."""
        ended = f"{self.inputs:,} inputs in {self.elapsed_s:.0f} s"
        return f"{self.name}: {ended}, {self.failure or 'no failure'}"


def targets(only: str) -> Iterator[Target]:
    """Every hypothesis test of this folder whose name contains `only`."""
    for file in sorted(FOLDER.glob("test_fuzz_*.py")):
        tests: dict[str, Any] = vars(importlib.import_module(f"tests.fuzz.{file.stem}"))
        for name, test in tests.items():
            if is_hypothesis_test(test) and only in name:
                yield Target(file=file, name=name, run=test.hypothesis.fuzz_one_input)


def fuzz(target: Target, inputs: int, source: random.Random, advance: Callable[[], None]) -> None:
    """Runs a target until its first failure."""
    started_s = time.monotonic()
    while target.inputs < inputs:
        try:
            taken = target.run(source.randbytes(source.randrange(MAX_BYTES)))
        except Exception as error:
            target.failure = f"{type(error).__name__}: {error}"[:200]
            traceback.print_exc(limit=-3)
            break
        if taken is not None:
            target.inputs += 1
            advance()
    target.elapsed_s = time.monotonic() - started_s


def main(
    inputs: Annotated[int, typer.Option(help="Inputs of each target.")] = 10_000,
    only: Annotated[str, typer.Option(help="Part of the names of targets to run.")] = "",
    seed: Annotated[int | None, typer.Option(help="Seed; a random one by default.")] = None,
) -> None:
    """Runs the fuzz targets and prints a line for each; exits with 1 after a failure."""
    settings.register_profile("fuzz", deadline=None, print_blob=True)
    settings.load_profile("fuzz")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    seed = random.randrange(2**32) if seed is None else seed
    chosen, console = list(targets(only)), Console()
    console.print(f"seed {seed}")
    with Progress(console=console) as progress:
        for number, target in enumerate(chosen):
            bar = progress.add_task(target.name, total=inputs)
            fuzz(target, inputs, random.Random(seed + number), partial(progress.advance, bar))
            progress.remove_task(bar)
            # At once: an interrupted run has named the targets that passed.
            console.print(target.result, markup=False, soft_wrap=True)
    failed = [target for target in chosen if target.failure]
    for target in failed:
        console.print(f"repeat with: {target.command}", soft_wrap=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
