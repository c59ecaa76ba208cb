"""The options of `forge run` and `forge up`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from forge.cli.local_run.models.run_models import RunModels
from forge.cli.local_run.presets import CPU, EMBEDDED, Settings, parse_overrides

Root = Annotated[Path, typer.Option(help="Directory of runs and models.", envvar="FORGE_ROOT")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of weights, tasks and their order.")]
OF_CAMPAIGN = ("steps", "eval_tasks", "eval_every_steps")
"""Options of a run that a stack without a campaign lacks."""
_KEPT = {
    "engine": str,
    "engine_python": Path,
    "device": str,
    "trainer_processes": int,
    "models": Path,
    "eval_every_steps": int,
}
"""Options that a run keeps, as it does `overrides`."""
_ALSO_SET = {
    "steps": ("trainer.max_steps",),
    "device": ("trainer.device", "prefill.device", "decode.device"),
    "trainer_processes": ("trainer.ranks",),
    "models": ("gateway.models",),
    "eval_every_steps": ("trainer.evaluation.every_steps",),
}
"""By option, the settings that say the same: what is given again replaces a kept other one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of one run. Raises `InvalidArgument` for a wrong `--set`."""

    model: Annotated[
        str | None,
        typer.Option(
            help="tiny, smollm2, a directory, or a hub id with a chat template.",
            show_default="that of --run-dir, or tiny",
        ),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed of weights, tasks and their order.",
            show_default="that of --run-dir, or 0",
        ),
    ] = None
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps. Default: the model's preset.")
    ] = None
    eval_tasks: Annotated[
        int | None, typer.Option(min=1, help="Held-out tasks per domain. Default: the preset's.")
    ] = None
    eval_every_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Also measure held-out tasks every N steps of training."),
    ] = None
    root: Root = Path(".forge")
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run. Default: one under --root.")
    ] = None
    etcd: Annotated[
        str, typer.Option(help="host:port[,host:port] of an etcd on loopback. Default: start one.")
    ] = ""
    gateways: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Gateway processes, each of one core. Default: one per 8 cores, at most 4.",
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="Torch device of the trainer and the workers: cpu, cuda:0, or cuda (each trainer "
            "process its own GPU). On a GPU the trainer computes in bfloat16.",
            show_default=f"that of --run-dir, or {CPU}",
        ),
    ] = None
    trainer_processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="that of --run-dir, or 1",
            help="Processes of the trainer (ranks), started by torchrun. They compute each tree "
            "together, or divide the model with --set trainer.mesh.dp_shard=N (docs/scaling.md).",
        ),
    ] = None
    console: Annotated[
        bool, typer.Option(help="Serve the web console on a free port of loopback.")
    ] = True
    models: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with tables \\[models.NAME]: other models than the policy, which the "
            "run also serves (docs/models.md)."
        ),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            show_default=f"that of --run-dir, or {EMBEDDED}",
            help="Engine of inference: embedded, vllm, or one of an installed package. Any other "
            "than embedded runs as one worker of the role both (docs/engines.md).",
        ),
    ] = None
    engine_python: Annotated[
        Path | None,
        typer.Option(
            help="Python of the engine's environment. Default: .venv-ENGINE/bin/python if it "
            "exists, else this one.",
        ),
    ] = None
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="service.key=value, e.g. trainer.optimizer.learning_rate=1e-4. Repeatable; a "
            "resumed run keeps those of its earlier starts.",
        ),
    ] = None
    settings: Settings = field(init=False)
    """The parsed `overrides`."""
    other_models: RunModels = field(init=False)
    """The content of `models`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", parse_overrides(self.overrides or []))
        others = RunModels.read(self.models) if self.models else RunModels(tables={})
        object.__setattr__(self, "other_models", others)

    def kept(self) -> dict[str, Any]:
        """Returns the given options with which the run is resumed, for its state."""
        given = {name: getattr(self, name) for name in _KEPT}
        kept: dict[str, Any] = {
            name: str(value.absolute()) if isinstance(value, Path) else value
            for name, value in given.items()
            if value is not None
        }
        return kept | ({"overrides": _words(self.settings)} if self.settings else {})

    def resuming(self, kept: Mapping[str, Any]) -> tuple[Self, str]:
        """Returns these options with those that the run has `kept` and that are not given again,
        and the latter as words."""
        chosen = {
            name: made(kept[name])
            for name, made in _KEPT.items()
            if name in kept and getattr(self, name) is None
        }
        if self.engine not in (None, kept.get("engine")):
            # The Python of another engine.
            chosen.pop("engine_python", None)
        if "ranks" in self.settings.get("trainer", {}):
            # Two numbers of ranks are refused.
            chosen.pop("trainer_processes", None)
        replaced = {key for name, own in _ALSO_SET.items() if getattr(self, name) for key in own}
        former = parse_overrides(kept.get("overrides", []))
        left = {
            service: {
                key: value
                for key, value in own.items()
                if key not in self.settings.get(service, {}) and f"{service}.{key}" not in replaced
            }
            for service, own in former.items()
        }
        words = [f"--{name.replace('_', '-')} {value}" for name, value in chosen.items()]
        words += [f"--set {word}" for word in _words(left)]
        overrides = [*_words(left), *(self.overrides or [])]
        return replace(self, **chosen, overrides=overrides or None), " ".join(words)


def _words(settings: Settings) -> list[str]:
    return [
        f"{service}.{key}={value}"
        for service, own in settings.items()
        for key, value in own.items()
    ]
