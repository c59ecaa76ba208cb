"""The cost of the sandboxes: `python -m benchmarks.sandbox [--quick]`.

Wall milliseconds of a program's start to end, of a reward process's start with its first call, and
of a further call, each with and without the sandbox, interleaved in each round.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable

from benchmarks.support.report import arguments, keep, show
from forge.agents.environments.base import Transcript
from forge.agents.process_sandbox import ProcessSandbox
from forge.agents.reward_pool import RewardLimits, RewardPool
from forge.agents.rewards import RewardTask
from forge.agents.sandbox import Sandbox

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
    found = {name: statistics.median(values) for name, values in times.items()}
    for what in ("program", "reward_start", "reward_call"):
        found[f"{what}_ratio"] = found[f"{what}_sandboxed_ms"] / found[f"{what}_bare_ms"]
    return found


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
