"""Stand-ins for `wandb` and `trackio`, as strict as the packages (`make test-trackers`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

OPTIONS: Mapping[str, frozenset[str]] = {
    "wandb": frozenset({"project", "name", "reinit", "settings"}),
    "trackio": frozenset({"project", "name", "embed", "auto_log_gpu", "auto_log_cpu"}),
}
"""The arguments of `init` that the tests of the real package pass."""


class Table(NamedTuple):
    """A table."""

    columns: list[str]
    data: list[list[Any]]


@dataclass
class TrackedRun:
    """One run."""

    name: str
    orders_steps: bool
    logged: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    axes: dict[str, str] = field(default_factory=dict)
    finished: bool = False

    def log(self, data: dict[str, Any], step: int) -> None:
        """Log values at a step."""
        assert not self.finished, "log after finish"
        last = self.logged[-1][0] if self.logged else 0
        assert not self.orders_steps or step >= last, f"step {step} after {last} is dropped"
        self.logged.append((step, data))

    def finish(self) -> None:
        """End the run."""
        assert not self.finished, "finish twice"
        self.finished = True


class WandbRun(TrackedRun):
    """A run of W&B alone has axes."""

    def define_metric(self, name: str, step_metric: str) -> None:
        """Show a metric over another one."""
        self.axes[name] = step_metric


class Tracker:
    """A stand-in for the package."""

    def __init__(self, package: str) -> None:
        self._package = package
        self.runs: list[TrackedRun] = []

    def init(self, **options: Any) -> TrackedRun:
        """Begin a run."""
        assert options.keys() == OPTIONS[self._package], options
        make = WandbRun if self._package == "wandb" else TrackedRun
        self.runs.append(make(options["name"], self._package == "wandb"))
        return self.runs[-1]

    def Table(self, columns: Sequence[str], data: Sequence[Sequence[Any]]) -> Table:
        """Make a table; each row has a value for each column."""
        assert all(len(row) == len(columns) for row in data)
        return Table(list(columns), [list(row) for row in data])
