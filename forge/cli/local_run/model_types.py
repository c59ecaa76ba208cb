"""The type in which a run computes its policy: one for the trainer and its workers.

A model sampled in another type than it is trained in has other log-probs, independent of the type
that its file has. The trainer's setting `autocast` decides; workers follow unless the command line
names theirs.
"""

from __future__ import annotations

from collections.abc import Iterable

from forge.cli.local_run.presets import Settings
from forge.runtime.coordination import Instance
from forge.runtime.settings.model_config import stored_type

_WORKERS = ("prefill", "decode")
_OF_AUTOCAST = {"none": "float32", "auto": "device", "bfloat16": "bfloat16"}
"""The workers' `dtype` by the trainer's `autocast`."""
_OF_FILE = {"float32": "float32", "bfloat16": "device"}
"""The `dtype` that means the same as auto, by the type in config.json."""


def worker_types(settings: Settings, model_path: str) -> Settings:
    """Returns the settings of workers that compute as the trainer of these settings does.

    None where their default does so: then a worker that joins the run needs no setting either.
    """
    autocast = settings.get("trainer", {}).get("autocast", "none")
    # The trainer refuses any other value.
    dtype = _OF_AUTOCAST.get(autocast, "auto")
    if _OF_FILE.get(stored_type(model_path)) == dtype:
        return {}
    return {worker: {"dtype": dtype} for worker in _WORKERS}


def types_line(instances: Iterable[Instance]) -> str:
    """Returns the line about the types in which trainer and workers compute; "" without any."""
    found = {one.kind: one.metadata["dtype"] for one in instances if "dtype" in one.metadata}
    trainer = found.pop("trainer", "")
    workers = {kind: dtype for kind, dtype in found.items() if kind in _WORKERS}
    if not (trainer and workers):
        return ""
    if set(workers.values()) == {trainer}:
        return f"Trainer and workers compute in {trainer}"
    listed = ", ".join(f"{kind} in {dtype}" for kind, dtype in workers.items())
    return f"The trainer computes in {trainer}, {listed}: their log-probs differ"
