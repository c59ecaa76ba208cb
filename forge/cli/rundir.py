"""The directory of a run: its files, its state between starts, its lock.

A run directory has all data of one run: a start in it resumes the run, and its deletion removes the
run. A lock prevents two simultaneous starts in one directory.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from forge.core.errors import FailedPrecondition, InvalidArgument
from forge.runtime.files.private import replace_private_file
from forge.runtime.security.tokens import Keyring

Phase = Literal["before", "train", "after", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The content of `run.json`."""

    model: str
    model_path: str
    seed: int
    steps: int
    phase: Phase = "before"
    """The current phase, from which a resumed run continues."""
    campaign: bool = True
    """False: `forge up` began it, so its queue may have any tasks."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the command line with which the run is resumed: see `RunOptions.kept`."""


class RunDirectory:
    """The files of one run, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key_file = path / "key"
        self.logs = path / "logs"
        self.etcd = path / "etcd"
        self.etcd_endpoints = path / "etcd.endpoints"
        self.checkpoints = path / "checkpoints"
        self.metrics_file = path / "metrics.jsonl"
        self.eval_tasks = path / "eval-tasks.jsonl"
        self.curves = path / "curves.svg"
        self.comparison = path / "comparison.svg"
        self.processes = path / "processes.json"
        """Module and flags of each service, by name, as it was started last."""
        self._state_file = path / "run.json"

    def pool(self, shard: str) -> Path:
        """Returns the data directory of a pool shard."""
        return self.path / "pool" / shard

    def log_file(self, process: str) -> Path:
        """Returns the log file of a process."""
        return self.logs / f"{process}.log"

    def create(self) -> None:
        """Creates missing directories and a missing cluster key.

        Raises `InvalidArgument` if the directory is not writable.
        """
        try:
            for directory in (self.path, self.logs, self.etcd, self.checkpoints):
                directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from None
        if not self.key_file.exists():
            Keyring.generate(self.key_file)

    def load(self) -> RunState | None:
        """Returns the saved state, or None. Raises `InvalidArgument` for an invalid file."""
        try:
            return RunState(**json.loads(self._state_file.read_text()))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self._unusable(error) from None
        except (ValueError, TypeError) as error:
            raise InvalidArgument(
                f"{self._state_file} is not a run's state ({error}); remove {self.path} or name "
                "another directory with --run-dir"
            ) from error

    def check_same(self, state: RunState, *, model: str | None, seed: int | None) -> None:
        """Raises `InvalidArgument` unless `state` has this model and seed; None: any."""
        other = {}
        if model and model != state.model and Path(model).resolve() != Path(state.model_path):
            other["model"] = (state.model, model)
        if seed is not None and seed != state.seed:
            other["seed"] = (str(state.seed), str(seed))
        if other:
            differences = " and ".join(
                f"--{name} {saved}, not {given}" for name, (saved, given) in other.items()
            )
            names = " and ".join(f"--{name}" for name in other)
            raise InvalidArgument(
                f"{self.path} is a run with {differences}: omit {names} to resume it, or name "
                "another directory with --run-dir"
            )

    def require_campaign(self, state: RunState) -> None:
        """Raises `FailedPrecondition` for a directory that `forge up` began: a campaign would train
        on its tasks, and measure weights that have trained on them before."""
        if not state.campaign:
            raise FailedPrecondition(
                f"{self.path} is of forge up, so its queue may have tasks of others: continue it "
                f"with `forge up --run-dir {self.path}`, or name another directory with --run-dir"
            )

    def save(self, state: RunState) -> None:
        """Writes the state to disk."""
        replace_private_file(self._state_file, json.dumps(asdict(state), indent=2) + "\n")

    def enter(self, phase: Phase) -> None:
        """Saves that the run has reached `phase`."""
        state = self.load()
        assert state is not None, "a run is saved before its phase changes"
        self.save(replace(state, phase=phase))

    def in_use(self) -> bool:
        """Returns True if a process has locked the directory."""
        try:
            with self.locked():
                return False
        except FailedPrecondition:
            return True

    def require_unlocked(self) -> None:
        """Raises as `locked` if another process has locked the directory; creates no file."""
        if (self.path / "lock").exists():
            with self.locked():
                pass

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the directory for a block. Raises `FailedPrecondition` while another process has
        the lock, `InvalidArgument` if the directory is not writable."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            opened = (self.path / "lock").open("w")
        except OSError as error:
            raise self._unusable(error) from None
        with opened as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FailedPrecondition(
                    f"{self.path} is in use by another forge process; stop it first or name "
                    "another directory with --run-dir"
                ) from None
            yield

    def _unusable(self, error: OSError) -> InvalidArgument:
        return InvalidArgument(
            f"{error.filename}: {error.strerror}; name another directory with --root or --run-dir"
        )


def choose_run_directory(
    root: Path, *, model: str, seed: int, campaign: bool = True
) -> RunDirectory:
    """Returns the first unfinished run of this model and seed, or the next free name; with
    `campaign` none that `forge up` began."""
    label = model.strip("/").replace("/", "_")
    number = 1
    while True:
        directory = RunDirectory(root / "runs" / f"{label}-seed{seed}-{number}")
        state = directory.load()
        if state is None or (state.phase != "done" and (state.campaign or not campaign)):
            return directory
        number += 1
