"""The presets of `forge run`, by model: tasks, sizes and service settings.

Everything here can be changed from the command line (`--steps`, `--set service.key=value`); this
module has only the defaults; the named document has the measurements that chose them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forge.core.errors import InvalidArgument

PROCESSES = {
    "pool": "services.pool",
    "scheduler": "services.scheduler",
    "trainer": "services.trainer",
    "prefill": "services.inference",
    "decode": "services.inference",
    "router": "services.inference",
    "gateway": "services.gateway",
    "runner": "forge.agents",
    "console": "services.console",
}
"""The processes of a run, in the order they start, and the module of each."""

EMBEDDED = "embedded"
"""The engine of a run that names none."""

CPU = "cpu"
"""The device of a run that names none."""

Settings = Mapping[str, Mapping[str, str]]
"""Settings by process name, as its `--print-config` names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Defaults of one run."""

    domains: Mapping[str, float]
    """Share of each domain in every batch; they sum to 1."""
    steps: int
    """Optimizer steps."""
    groups_per_step: int
    group_size: int
    """Rollouts of each training task."""
    concurrency: int
    """N: maximum number of running groups. The window W is 0.3 N."""
    eval_tasks: int
    """Held-out tasks per domain, each attempted `eval_attempts` times."""
    eval_attempts: int
    """More tasks narrow the confidence interval more than as many more attempts do."""
    settings: Settings = field(default_factory=dict)


# Chosen in docs/tiny_model.md.
TINY = Preset(
    domains={"reasoning": 0.25, "qa": 0.25, "code": 0.25, "general": 0.25},
    steps=45,
    groups_per_step=8,
    group_size=8,
    concurrency=32,
    eval_tasks=48,
    eval_attempts=1,
    settings={
        "trainer": {
            "optimizer.learning_rate": "5e-4",
            "optimizer.learning_rate_schedule": "linear",
            "checkpoint.every_steps": "2",
            "torch_threads": "1",
        },
        "scheduler": {
            "queue.rollout_lease_s": "15",
            # Tasks are submitted to the end: a batch is never short of them.
            "queue.short_batch_after_s": "600",
        },
        "runner": {"max_tokens": "64", "rollout_timeout_s": "120"},
    },
)

# Chosen in docs/smollm2.md.
SMOLLM2 = Preset(
    domains={"chain_sum": 0.25, "products": 0.25, "gcd": 0.25, "letter_counting": 0.25},
    steps=25,
    groups_per_step=12,
    group_size=16,
    concurrency=48,
    eval_tasks=48,
    eval_attempts=1,
    settings={
        "trainer": {
            "optimizer.learning_rate": "2e-5",
            "advantages.normalize_std": "group",
            "autocast": "auto",
            "publish_dtype": "auto",
        },
        "scheduler": {"queue.short_batch_after_s": "600"},
    },
)

PRESETS: Mapping[str, Preset] = {"tiny": TINY, "smollm2": SMOLLM2}


def preset_for(model: str) -> Preset:
    """Returns the preset of a model; unknown models train on SmolLM2's tasks."""
    return PRESETS.get(model, SMOLLM2)


def parse_overrides(assignments: list[str]) -> Settings:
    """Parses `service.key=value` words. Raises `InvalidArgument` with the wrong word."""
    settings: dict[str, dict[str, str]] = {}
    for word in assignments:
        target, equals, value = word.partition("=")
        service, dot, key = target.partition(".")
        if not (equals and dot and service and key):
            raise InvalidArgument(
                f"--set {word!r}: expected service.key=value, e.g. "
                "trainer.optimizer.learning_rate=1e-4"
            )
        if service not in PROCESSES:
            raise InvalidArgument(
                f"--set {word!r}: there is no {service}; name one of {', '.join(PROCESSES)}"
            )
        settings.setdefault(service, {})[key.replace("-", "_")] = value
    return settings


def merged(*layers: Settings) -> dict[str, dict[str, str]]:
    """Combines settings; for each key the last layer wins."""
    result: dict[str, dict[str, str]] = {}
    for layer in layers:
        for service, settings in layer.items():
            result.setdefault(service, {}).update(settings)
    return result
