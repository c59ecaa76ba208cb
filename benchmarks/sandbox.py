"""The cost of the sandboxes: `python -m benchmarks.sandbox [--quick]`.

Wall milliseconds of a program's start to end, of a reward process's start with its first call, of a
further call, and of a command's start to end (`/bin/true`, with the gateway as its network), each
with and without the sandbox, interleaved in each round; and of the command in a container.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable

import grpc.aio

from benchmarks.support.report import arguments, keep, show
from forge.agents.environments.base import Transcript
from forge.agents.launchers.bare import BareLauncher
from forge.agents.launchers.base import Launcher, ProgramLimits, Request
from forge.agents.launchers.container import ContainerLauncher, ContainerSettings
from forge.agents.launchers.wrapped import SandboxLauncher
from forge.agents.rewards import RewardTask
from forge.agents.rollout import Gateway
from forge.agents.sandbox.process_sandbox import ProcessSandbox
from forge.agents.sandbox.program_sandbox import Sandbox
from forge.agents.scoring.reward_pool import RewardLimits, RewardPool
from tests.support.agents.container_engine import IMAGE, READ, engine

FUNCTION = "tests.support.agents.tasks:polite"
LIMITS = RewardLimits(call_s=60.0, memory_bytes=2 << 30, processes=0)
CALLS = 50
"""Further calls of each round."""


async def measure(rounds: int) -> dict[str, float]:
    """Returns medians, and their ratios."""
    box = ProcessSandbox(modules=["tests"], tmp_bytes=1 << 20)
    programs = {"sandboxed": Sandbox(), "bare": Sandbox()}
    if problem := await programs["sandboxed"].problem() or await box.problem():
        raise SystemExit(problem)
    # Without its check, a sandbox runs programs bare.
    programs["bare"].unsafe, programs["bare"]._problem = True, "measured without"
    commands = await _commands()
    task = RewardTask(task_id="t", domain="d", payload={"wanted": "4"})
    transcript = Transcript(answer="4", turns=1)
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, sandbox in programs.items():
            times[f"program_{name}_ms"].append(await _ms(sandbox.run("print(4)")))
        for name, chosen in (("sandboxed", box), ("bare", None)):
            pool = RewardPool({"d": FUNCTION}, limits=LIMITS, workers=1, sandbox=chosen)
            times[f"reward_start_{name}_ms"].append(await _ms(pool.score(transcript, task)))
            calls = [await _ms(pool.score(transcript, task)) for _ in range(CALLS)]
            times[f"reward_call_{name}_ms"].append(statistics.median(calls))
            await pool.close()
        for name, launcher in commands.items():
            times[f"command_{name}_ms"].append(await _ms(_run(launcher)))
    for launcher in commands.values():
        await launcher.close()
    found = {name: statistics.median(values) for name, values in times.items()}
    for what in ("program", "reward_start", "reward_call", "command"):
        found[f"{what}_ratio"] = found[f"{what}_sandboxed_ms"] / found[f"{what}_bare_ms"]
    return found


async def _commands() -> dict[str, Launcher]:
    """Returns the launchers that this host has."""
    limits = ProgramLimits(memory_bytes=2 << 30, processes=4096)
    found: dict[str, Launcher] = {
        "sandboxed": SandboxLauncher(ProcessSandbox(tmp_bytes=1 << 20), limits=limits),
        "bare": BareLauncher(limits),
    }
    words, _ = engine()
    if words:
        settings = ContainerSettings(engine=" ".join(words), image=IMAGE, read=READ)
        found["container"] = ContainerLauncher(settings, limits=limits, runner="benchmark")
    for launcher in found.values():
        await launcher.check()
    return found


async def _run(launcher: Launcher) -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:9") as channel:
        gateway = Gateway(
            instance_id="g",
            http_url="http://127.0.0.1:8",
            grpc_address="127.0.0.1:9",
            channel=channel,
        )
        request = Request(words=["/bin/true"], variables={}, inherited={}, gateway=gateway)
        async with launcher.start(request) as program:
            await program.process.wait()


async def _ms(work: Awaitable[object]) -> float:
    began_s = time.perf_counter()
    await work
    return 1000 * (time.perf_counter() - began_s)


def main() -> None:
    """Measures, shows and keeps."""
    parser = arguments(__doc__ or "", quick="fewer rounds")
    options = parser.parse_args()
    numbers = asyncio.run(measure(5 if options.quick else 30))
    show("sandboxes, medians", numbers)
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
