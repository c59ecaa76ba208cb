"""Files of token values: one a step, the newest within a size and an age.

Written beside, fsynced and renamed: a file is complete or absent. The index of trajectories is in
memory; a start makes it from the headers of the files. Training does not depend on the values: a
file that cannot be read is removed.

    step-00000012.safetensors    columns [5, K] float16, as in `forge.rl.losses.token_values`;
                                 metadata: step, weight version, and each turn with its tokens

Shapes: K kept tokens of a step, t tokens of a turn.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from forge.core.errors import DataLoss, NotFound
from forge.runtime.files.sync import sync
from forge.runtime.telemetry import log
from services.trainer.samples.chosen_turns import TurnPlace

UNREADABLE = (OSError, SafetensorError, msgspec.MsgspecError, KeyError, IndexError)
_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_COLUMNS = "columns"
_ABOUT = "about"
_UNFINISHED = ".unfinished"


class _Turn(msgspec.Struct, frozen=True, array_like=True):
    trajectory_id: str
    turn_index: int
    tokens: int


class _About(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a file."""

    step: int
    weight_version: int
    turns: list[_Turn]
    """In the order of the columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValues:
    """Token values of one step."""

    step: int
    weight_version: int
    """Before the step: of the weights that computed the values."""
    turns: Sequence[TurnPlace]
    lengths: Sequence[int]
    """Tokens of each turn."""
    columns: Tensor
    """[5, K] float16 on the host, turn after turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnValues:
    """Token values of one turn."""

    step: int
    weight_version: int
    turn_index: int
    columns: Tensor
    """[5, t] float16."""


class _StoredFile(NamedTuple):
    size_bytes: int
    stored_s: float
    """Time of the file."""
    trajectories: frozenset[str]


class TokenValueFiles:
    """The stored steps. Blocks; not thread-safe."""

    def __init__(
        self,
        directory: Path,
        *,
        most_bytes: float,
        most_age_s: float = math.inf,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock`: the wall clock, which the times of files have."""
        self._directory = directory
        self._most_bytes = most_bytes
        self._most_age_s = most_age_s
        self._clock = clock
        self._files: dict[int, _StoredFile] = {}
        """By step."""
        self._steps: dict[str, int] = {}
        """Step that trained a trajectory."""

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(one.size_bytes for one in self._files.values())

    def open(self) -> None:
        """Read the headers of all files, and remove unfinished and unreadable ones."""
        if not self._directory.is_dir():
            return
        for path in sorted(self._directory.iterdir()):
            if path.name.endswith(_UNFINISHED):
                path.unlink(missing_ok=True)
            elif named := _NAME.fullmatch(path.name):
                try:
                    about, status = _about(path), path.stat()
                    self._enter(about, status.st_size, stored_s=status.st_mtime)
                except UNREADABLE as error:
                    self._drop(int(named[1]), error)
        self._make_room()
        self.expire()

    def expire(self) -> None:
        """Remove the steps beyond the age."""
        oldest_s = self._clock() - self._most_age_s
        for step in [step for step, one in self._files.items() if one.stored_s < oldest_s]:
            self._remove(step)

    def write(self, values: StepValues) -> None:
        """Store a step in place of an earlier one of that number; then remove the oldest beyond the
        size. Raises `OSError`."""
        about = _About(
            step=values.step,
            weight_version=values.weight_version,
            turns=[
                _Turn(*place, tokens)
                for place, tokens in zip(values.turns, values.lengths, strict=True)
            ],
        )
        metadata = {_ABOUT: msgspec.json.encode(about).decode()}
        content = save({_COLUMNS: values.columns.contiguous()}, metadata)
        path = self._path(values.step)
        unfinished = path.with_name(path.name + _UNFINISHED)
        # Of contents of trajectories, though without ids: for the trainer's user alone.
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            unfinished.write_bytes(content)
            # A file of zeros after a power loss would show zeros as values.
            sync(unfinished)
            unfinished.replace(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        self._forget(values.step)
        self._enter(about, len(content), stored_s=self._clock())
        self._make_room()

    def forget_after(self, step: int) -> None:
        """Remove the steps after `step`, which a rewind has taken back."""
        for later in [one for one in self._files if one > step]:
            self._remove(later)

    def read(self, trajectory_id: str) -> list[TurnValues]:
        """The stored turns of a trajectory, by index. Raises `NotFound` without any, `DataLoss` if
        the file cannot be read."""
        step = self._steps.get(trajectory_id)
        if step is None:
            raise NotFound(f"no token values of {trajectory_id} are stored")
        try:
            return _read(self._path(step), trajectory_id)
        except UNREADABLE as error:
            self._drop(step, error)
            raise DataLoss(f"the token values of step {step} cannot be read: {error}") from error

    def _enter(self, about: _About, size_bytes: int, *, stored_s: float) -> None:
        trajectories = frozenset(turn.trajectory_id for turn in about.turns)
        self._files[about.step] = _StoredFile(size_bytes, stored_s, trajectories)
        self._steps.update(dict.fromkeys(trajectories, about.step))

    def _make_room(self) -> None:
        for oldest in sorted(self._files):
            if self.size_bytes <= self._most_bytes:
                return
            self._remove(oldest)

    def _drop(self, step: int, error: BaseException) -> None:
        log.warning("token_values_unreadable", step=step, error=str(error))
        self._remove(step)

    def _remove(self, step: int) -> None:
        self._forget(step)
        with suppress(OSError):
            self._path(step).unlink(missing_ok=True)

    def _forget(self, step: int) -> None:
        stored = self._files.pop(step, None)
        for trajectory_id in stored.trajectories if stored is not None else ():
            # A later step may have trained it since.
            if self._steps.get(trajectory_id) == step:
                del self._steps[trajectory_id]

    def _path(self, step: int) -> Path:
        return self._directory / f"step-{step:08d}.safetensors"


def _about(path: Path) -> _About:
    with safe_open(path, framework="pt") as file:
        return msgspec.json.decode((file.metadata() or {})[_ABOUT], type=_About)


def _read(path: Path, trajectory_id: str) -> list[TurnValues]:
    about = _about(path)
    found = []
    with safe_open(path, framework="pt") as file:
        columns = file.get_slice(_COLUMNS)
        for turn, start in zip(about.turns, _starts(about.turns), strict=True):
            if turn.trajectory_id == trajectory_id:
                found.append(
                    TurnValues(
                        step=about.step,
                        weight_version=about.weight_version,
                        turn_index=turn.turn_index,
                        columns=columns[:, start : start + turn.tokens],
                    )
                )
    return sorted(found, key=lambda one: one.turn_index)


def _starts(turns: Iterable[_Turn]) -> Iterable[int]:
    start = 0
    for turn in turns:
        yield start
        start += turn.tokens
