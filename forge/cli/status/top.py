"""`forge top`: a live view of a running system in the terminal.

Owns the view, its refresh and its key. It calls what `forge status` calls. Without a terminal it is
one snapshot.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from forge.cli.command_exit import console
from forge.cli.connection import Connection
from forge.cli.local_run.display import sparkline
from forge.cli.queue.command import line_of
from forge.cli.status.system_state import SystemState, read_state
from forge.core.enum_words import enum_word
from forge.core.errors import ForgeError
from forge.runtime.concurrency.tasks import cancel_and_wait, first_done
from forge.v1 import inference_pb2, scheduler_pb2, trainer_pb2

HISTORY = 44
"""Values of a curve."""
_BAD = ("not serving", "no answer")


class TopView:
    """Content of the screen: the newest state, and short curves of the earlier ones."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._state: SystemState | None = None
        self._lost: ForgeError | None = None
        self._rewards: dict[str, deque[float]] = {}
        """By domain; "reward" is the mean over all."""
        self._sampled: deque[float] = deque(maxlen=HISTORY)
        self._step = -1

    def update(self, state: SystemState) -> None:
        """Show a new state."""
        self._state, self._lost = state, None
        if isinstance(state.inference, inference_pb2.GetInferenceStatusResponse):
            self._sampled.append(state.inference.sampled_tokens_per_s)
        trainer = state.trainer
        if isinstance(trainer, trainer_pb2.GetTrainerStatusResponse) and trainer.HasField("latest"):
            latest = trainer.latest
            if latest.step != self._step:
                self._step = latest.step
                for name, value in [
                    *sorted(latest.reward_by_domain.items()),
                    ("reward", latest.mean_reward),
                ]:
                    self._rewards.setdefault(name, deque(maxlen=HISTORY)).append(value)

    def lose(self, error: ForgeError) -> None:
        """Show that the newest reading failed; the state before it stays."""
        self._lost = error

    def __rich__(self) -> RenderableType:
        """Return the screen."""
        head = Text(f"forge top  {self._cluster}  {time.strftime('%H:%M:%S')}", style="bold")
        rows: list[RenderableType] = [head]
        if self._lost is not None:
            rows.append(Text(f"not read: {self._lost}", style="red"))
        if self._state is None:
            return Group(*rows, Text("reading ...", style="dim"))
        rows += [Text(line) for line in self._lines(self._state)]
        rows += [self._curves(), _services(self._state)]
        rows += [Text(one, style="yellow") for one in self._state.problems()]
        return Group(*rows)

    def _lines(self, state: SystemState) -> Iterator[str]:
        if isinstance(state.scheduler, scheduler_pb2.GetSchedulerStatusResponse):
            status = state.scheduler
            yield f"queue    {line_of(status)}"
            yield (
                f"window   {status.complete_in_window} complete inside, "
                f"{status.complete_outside_window} outside; {status.running_rollouts} rollouts "
                f"run, {status.retries} repeated, {status.faults} ended by the infrastructure"
            )
        else:
            yield f"queue    {state.scheduler}"
        if isinstance(state.trainer, trainer_pb2.GetTrainerStatusResponse):
            yield from _training(state.trainer)
        else:
            yield f"trainer  {state.trainer}"
        if isinstance(state.inference, inference_pb2.GetInferenceStatusResponse):
            load = state.inference
            yield (
                f"sampling {load.sampled_tokens_per_s:.0f} tokens/s, {load.queued} queued, "
                f"weights v{load.weight_version}  {_load_curve(self._sampled)}"
            )
        else:
            yield f"sampling {state.inference}"

    def _curves(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for name, values in self._rewards.items():
            grid.add_row(f"reward {name}" if name != "reward" else "reward, all", *_curve(values))
        return grid


def _training(status: trainer_pb2.GetTrainerStatusResponse) -> Iterator[str]:
    phase = enum_word(trainer_pb2.TrainerPhase, status.phase)
    limit = f"/{status.max_steps}" if status.max_steps else ""
    yield f"trainer  step {status.step}{limit}, {phase}, weights v{status.weight_version}"
    if status.HasField("latest"):
        step = status.latest
        yield (
            f"step     {step.trained_tokens_per_s:.0f} trained tokens/s, staleness "
            f"{step.staleness_mean:.1f} (max {step.staleness_max:.0f}), merge "
            f"{step.merge_ratio:.1f}x, entropy {step.entropy:.2f}, log-prob gap "
            f"{step.logprob_gap_mean:.4f}, J {step.yield_j:.2f}, {step.step_s:.1f} s"
        )


def _curve(values: deque[float]) -> tuple[str, Text]:
    return f"{values[-1]:.2f}", Text(sparkline([*values]), style="cyan")


def _load_curve(values: deque[float]) -> str:
    top = max(values, default=0.0)
    return sparkline([value / top for value in values]) if top else ""


def _services(state: SystemState) -> Table:
    table = Table("kind", "instance", "address", "state", box=None, pad_edge=False)
    for one in state.services:
        bad = one.state in _BAD
        text = Text(one.state if bad else one.role or one.state, style="red" if bad else "")
        table.add_row(one.kind, one.instance, one.address, text)
    for kind in state.missing:
        table.add_row(kind, Text("none", style="red"))
    return table


async def show_top(at: Connection, *, every_s: float) -> None:
    """Shows the view until q; without a terminal one snapshot. Raises `Unavailable` without etcd at
    the start; later outages are shown."""
    view = TopView(at.cluster)
    async with at.open() as (coordinator, channels):

        async def read() -> None:
            view.update(await read_state(coordinator, channels, cluster=at.cluster))

        if not console.is_terminal:
            await read()
            console.print(view, soft_wrap=True)
            return
        with (
            _quit_key() as quits,
            Live(
                view, console=console, screen=True, auto_refresh=False, vertical_overflow="crop"
            ) as live,
        ):
            while not quits.is_set():
                reading = asyncio.create_task(read())
                if reading not in await first_done(reading, quits.wait()):
                    await cancel_and_wait(reading)
                    return
                try:
                    reading.result()
                except ForgeError as error:
                    view.lose(error)
                live.refresh()
                await _wait(quits, every_s)


async def _wait(quits: asyncio.Event, every_s: float) -> None:
    try:
        async with asyncio.timeout(every_s):
            await quits.wait()
    except TimeoutError:
        return


@contextmanager
def _quit_key() -> Iterator[asyncio.Event]:
    """Reads single keys of the terminal for a block; the event is set by q."""
    quits = asyncio.Event()
    if not sys.stdin.isatty():
        yield quits
        return
    import termios
    import tty

    file, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(file)

    def read_key() -> None:
        # All keys at once, and nothing at the end of the terminal.
        keys = os.read(file, 64)
        if not keys or b"q" in keys.lower():
            quits.set()

    tty.setcbreak(file)
    loop.add_reader(file, read_key)
    try:
        yield quits
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)
