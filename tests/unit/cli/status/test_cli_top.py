"""The view of `forge top`, and the shell completion of all commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from forge.cli.status.system_state import Service, SystemState
from forge.cli.status.top import TopView
from forge.core.errors import Unavailable
from forge.v1 import inference_pb2, scheduler_pb2, trainer_pb2

COMPLETE = """
eval "$(forge --show-completion bash)"
COMP_WORDS=({words}) COMP_CWORD={number}
_forge_completion forge
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def state(*, step: int, reward: float) -> SystemState:
    service = Service(
        kind="pool",
        instance="pool-1",
        address="127.0.0.1:7211",
        role="",
        state="no answer",
        version="",
        metadata={},
        error="it is gone",
    )
    return SystemState(
        cluster="c",
        services=[service],
        scheduler=scheduler_pb2.GetSchedulerStatusResponse(
            head=7, window=40, complete_in_window=3, trained=12
        ),
        inference=inference_pb2.GetInferenceStatusResponse(sampled_tokens_per_s=1234.0),
        trainer=trainer_pb2.GetTrainerStatusResponse(
            step=step,
            latest=trainer_pb2.StepMetrics(
                step=step,
                mean_reward=reward,
                reward_by_domain={"code": reward},
                staleness_mean=1.5,
                staleness_max=4,
                trained_tokens_per_s=567.0,
            ),
        ),
        clock_problems=[],
    )


def shown(view: TopView) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def test_view_has_queue_reward_throughput_staleness_and_services() -> None:
    """Rewards are a curve over steps: a step that is read twice is one point."""
    view = TopView("c")
    assert "reading" in shown(view)
    for step, reward in ((1, 0.0), (2, 0.5), (2, 0.5), (3, 1.0)):
        view.update(state(step=step, reward=reward))
    text = shown(view)
    for part in (
        "H 7, W 40",
        "3 complete inside",
        "12 trained",
        "staleness 1.5 (max 4)",
        "567 trained tokens/s",
        "1234 tokens/s",
        "No trainer is registered",
        "pool pool-1 at 127.0.0.1:7211: it is gone",
    ):
        assert part in text, text
    (line,) = [line for line in text.splitlines() if line.startswith("reward code")]
    assert line.split()[2] == "1.00"
    assert len(line.split()[-1]) == 3


def test_failed_reading_keeps_the_state_before_it() -> None:
    """An outage of etcd is a line, and ends with the next reading."""
    view = TopView("c")
    view.update(state(step=1, reward=0.5))
    view.lose(Unavailable("etcd does not answer"))
    assert "not read: etcd does not answer" in shown(view)
    assert "reward code" in shown(view)
    view.update(state(step=2, reward=0.5))
    assert "not read" not in shown(view)


def complete(*words: str) -> list[str]:
    """What bash offers behind these words, with the documented command."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = COMPLETE.format(words=" ".join(f"'{word}'" for word in words), number=len(words) - 1)
    ended = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": path},
        timeout=60,
    )
    assert not ended.stderr, ended.stderr
    return [line.rstrip() for line in ended.stdout.splitlines()]


def test_shell_completes_commands_and_options() -> None:
    """Also of a command of a group."""
    assert complete("forge", "tra") == ["trainer", "trajectories"]
    assert "--min-reward" in complete("forge", "trajectories", "ls", "--min")
