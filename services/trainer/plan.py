"""Prints the memory of a rank before a run, and settings that fit: `forge trainer plan`.

Prints an estimate of the memory of a rank for a model, a number of ranks and a context. If it does
not fit into a device, it names the nearest settings that do.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from forge.core.errors import ForgeError, InvalidArgument
from forge.rl.config import OPTIMIZERS
from forge.runtime.process.host_check import require_model
from forge.runtime.settings.arguments import COUNT, NATURAL, POSITIVE, SHARE, OneLineParser
from services.trainer.memory_plan import (
    GIB,
    Estimate,
    MemorySettings,
    ModelSize,
    estimate,
    fitting,
    size_of,
)
from services.trainer.mesh import MeshSettings
from services.trainer.model.lora import ALL_LINEAR
from services.trainer.setting_tables import LoraSettings

MOST_RANKS = 4096
"""Largest world that is tried when a run does not fit."""


def plan(options: argparse.Namespace) -> str:
    """The lines to print. Raises `InvalidArgument` for a model or a mesh that does not exist."""
    bfloat16 = options.autocast == "bfloat16"
    lora = _lora(options)
    size = _size("--model", options.model, bfloat16=bfloat16, tp=options.tp, lora=lora)
    others = {"--reference": options.reference, "--teacher": options.teacher}
    mesh = MeshSettings(
        dp_replicate=options.dp_replicate,
        dp_shard=options.dp_shard
        or max(1, options.world // options.dp_replicate // options.cp // options.tp),
        cp=options.cp,
        tp=options.tp,
    )
    run = MemorySettings(
        shape=mesh.shape(options.world),
        context=options.context,
        bfloat16=bfloat16,
        recompute=options.recompute_share if options.recompute_activations else 0.0,
        optimizer=options.optimizer,
        frozen=tuple(
            _size(name, path, bfloat16=bfloat16, tp=options.tp, frozen=True)
            for name, path in others.items()
            if path
        ),
    )
    device_bytes = options.device_gib * GIB
    found = estimate(size, run)
    lines = [_of_model(size), "", *_table(found, run), ""]
    if found.total <= device_bytes:
        left = (device_bytes - found.total) / GIB
        lines.append(f"fits: {left:.1f} GiB of {options.device_gib:g} GiB remain")
    else:
        missing = (found.total - device_bytes) / GIB
        lines.append(f"does not fit: {missing:.1f} GiB above {options.device_gib:g} GiB")
        lines.append(_remedy(size, run, device_bytes))
    return "\n".join(lines)


def _lora(options: argparse.Namespace) -> LoraSettings | None:
    if not options.lora_rank:
        return None
    targets = tuple(options.lora_targets.split(","))
    return LoraSettings(rank=options.lora_rank, targets=targets)


def _size(option: str, path: Path, **settings: Any) -> ModelSize:
    require_model(option, str(path))
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise InvalidArgument(f"{option} {path}: {reason}") from error
    return size_of(config, **settings)


def _of_model(size: ModelSize) -> str:
    source = "counted" if size.exact else "rule of thumb: its experts need values"
    trained = size.in_layers.trained / 1e6
    adapters = f", {trained:.2f} million of them trained" if size.adapters else ""
    return (
        f"{size.weights / 1e9:.2f} billion weights in {size.layers} layers{adapters}; activations "
        f"{size.activation_bytes / 1e6:.2f} MB per token ({source})"
    )


def _table(found: Estimate, run: MemorySettings) -> list[str]:
    shape = run.shape
    title = (
        f"GiB of a rank (mesh.dp_replicate = {shape.dp_replicate}, mesh.dp_shard = "
        f"{shape.dp_shard}, mesh.cp = {shape.cp}, mesh.tp = {shape.tp}, {run.context} tokens in a "
        "pass)"
    )
    rows = [(name, getattr(found, name)) for name in Estimate.__dataclass_fields__]
    rows.append(("total", found.total))
    return [title, *(f"  {name:<12}{value / GIB:>10.2f}" for name, value in rows)]


def _remedy(size: ModelSize, run: MemorySettings, device_bytes: float) -> str:
    ranks = run.shape.ranks
    while ranks <= MOST_RANKS:
        tp = run.shape.tp
        wider = replace(run, shape=MeshSettings(dp_shard=ranks // tp, tp=tp).shape(ranks))
        other = fitting(size, wider, device_bytes=device_bytes)
        if other is not None:
            total = estimate(size, other).total / GIB
            recompute = ", recompute_activations = true" if other.recompute else ""
            return (
                f"change: {ranks} ranks, mesh.dp_shard = {other.shape.dp_shard}, "
                f"mesh.cp = {other.shape.cp}{_parts(tp)}{recompute}: {total:.1f} GiB"
            )
        ranks *= 2
    return f"change: a shorter context or LoRA; no mesh of up to {MOST_RANKS} ranks fits"


def _parts(tp: int) -> str:
    return f", mesh.tp = {tp}" if tp > 1 else ""


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="forge trainer plan", description=(__doc__ or "").split("\n\n")[1])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model directory; its weights are not read")
    add("--reference", type=Path, help="model directory of the reference (objective.kl_coef)")
    add("--teacher", type=Path, help="model directory of the teacher (objective.teacher_coef)")
    add("--world", type=COUNT, required=True, help="ranks: devices, or processes on CPUs")
    add("--device-gib", type=POSITIVE, required=True, help="memory of a device, GiB")
    add("--context", type=COUNT, required=True, help="tokens of the largest pass (token_budget)")
    add("--dp-replicate", type=COUNT, default=1, help="copies of the model")
    shard = "data groups of a copy; 0: the remaining ranks"
    add("--dp-shard", type=NATURAL, default=0, help=shard)
    add("--cp", type=COUNT, default=1, help="ranks that compute each tree together")
    add("--tp", type=COUNT, default=1, help="ranks that compute every token together")
    add("--autocast", choices=("none", "bfloat16"), default="bfloat16", help="type of the backbone")
    add("--recompute-activations", action="store_true", help="as trainer.recompute_activations")
    share = "share of the layers that it applies to, as trainer.recompute_share"
    add("--recompute-share", type=SHARE, default=1.0, help=share)
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="as trainer.optimizer.name")
    rank = "rank of adapters (lora.rank); 0: none"
    add("--lora-rank", type=NATURAL, default=0, help=rank)
    targets = "linear layers with adapters, separated by commas (lora.targets)"
    add("--lora-targets", default=ALL_LINEAR, help=targets)
    return parser


def main(argv: Sequence[str]) -> int:
    """Print the plan. Returns the exit code: 2 for invalid arguments."""
    options = _parser().parse_args(argv)
    transformers_logging.set_verbosity_error()
    # A forward that needs values fails, and then a rule of thumb counts.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        print(plan(options))
    except ForgeError as error:
        print(f"forge trainer plan: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
