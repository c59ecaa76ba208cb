"""An engine process that gives no sign of life during its work ends with its worker.

The stand-in of vLLM's process answers a line with a line, and can be stopped.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.vllm.hang_watch import Limits, Progress, hung
from services.inference.engines.vllm.process_watch import ProcessWatch
from tests.support.runtime.waiting import until

PARTS = 11
"""Parts of the limit until a hang is certain."""


class Watched:
    """`hung` over parts that the test lets pass."""

    def __init__(self, *, answers: bool, cpu_counts: bool = True) -> None:
        self.progress = Progress()
        self.asked = 0
        self.used_s = 0.0
        self._answers = answers
        self._parts: asyncio.Queue[None] = asyncio.Queue()
        self.task = asyncio.create_task(
            hung(
                self.progress,
                self._ask,
                lambda: self.used_s,
                Limits(silence_s=60.0, working_s=600.0, cpu_counts=cpu_counts),
                sleep=self._sleep,
            )
        )

    async def pass_parts(self, count: int, *, used_s: float = 0.0) -> None:
        """Let parts of the limit pass, with CPU seconds in each."""
        for _ in range(count):
            self.used_s += used_s
            self._parts.put_nowait(None)
            for _ in range(10):
                await asyncio.sleep(0)

    async def _sleep(self, seconds: float) -> None:
        assert seconds == 6.0
        await self._parts.get()

    async def _ask(self) -> None:
        self.asked += 1
        if not self._answers:
            await asyncio.Event().wait()


@asynccontextmanager
async def watched(*, answers: bool, cpu_counts: bool = True) -> AsyncIterator[Watched]:
    """Watch until the end of the test."""
    found = Watched(answers=answers, cpu_counts=cpu_counts)
    yield found
    found.task.cancel()
    await asyncio.wait({found.task})


async def test_silence_of_a_running_request_is_a_hang() -> None:
    """Not before the whole limit; and an engine that does not answer is asked once."""
    async with watched(answers=False) as found:
        with found.progress.request():
            await found.pass_parts(PARTS - 1)
            assert not found.task.done()
            assert found.asked == 1
            await found.pass_parts(1)
            assert found.task.done()


async def test_answers_and_tokens_are_signs_of_life() -> None:
    """A long queue has no tokens, a scheduler that computes none has answers; and each token
    starts the limit again."""
    async with watched(answers=True) as found:
        with found.progress.request():
            await found.pass_parts(5 * PARTS)
            assert found.asked > 1
            assert not found.task.done()
    async with watched(answers=False) as found:
        with found.progress.request():
            for _ in range(5):
                await found.pass_parts(PARTS - 1)
                found.progress.note()
            assert not found.task.done()


async def test_engine_without_work_may_be_silent() -> None:
    """It is not asked either."""
    async with watched(answers=False) as found:
        await found.pass_parts(3 * PARTS)
        assert not found.task.done()
        assert not found.asked


async def test_silence_during_an_update_is_a_hang() -> None:
    """Also without requests, and on a GPU. A process that loads weights uses CPU time."""
    async with watched(answers=False, cpu_counts=False) as found:
        with found.progress.update():
            await found.pass_parts(3 * PARTS, used_s=1.0)
            assert not found.task.done()
            await found.pass_parts(PARTS)
            assert found.task.result() == "vllm.silence_s"


async def test_prompt_longer_than_the_limit_is_no_hang_on_a_cpu() -> None:
    """Its process uses CPU time, until the limit of any work: a loop without end uses it, too."""
    async with watched(answers=False) as found:
        with found.progress.request():
            await found.pass_parts(10 * (PARTS - 1), used_s=1.0)
            assert not found.task.done()
            await found.pass_parts(1, used_s=1.0)
            assert found.task.result() == "request_timeout_s"


async def test_little_cpu_time_is_no_work() -> None:
    """A process that waits wakes now and then."""
    async with watched(answers=False) as found:
        with found.progress.request():
            await found.pass_parts(PARTS, used_s=0.1)
            assert found.task.result() == "vllm.silence_s"


async def test_cpu_time_of_requests_on_a_gpu_is_no_sign_of_life() -> None:
    """A thread that waits for the device for ever may use a whole core."""
    async with watched(answers=False, cpu_counts=False) as found:
        with found.progress.request():
            await found.pass_parts(PARTS, used_s=6.0)
            assert found.task.result() == "vllm.silence_s"


async def test_error_of_the_engine_is_no_sign_of_life() -> None:
    """Its end is found elsewhere; it is asked again."""
    progress, asked = Progress(), 0

    async def fail() -> None:
        nonlocal asked
        asked += 1
        raise RuntimeError("dead")

    with progress.request():
        await asyncio.wait_for(hung(progress, fail, lambda: 0.0, limits(0.01)), 60)
    assert asked > 1


def limits(silence_s: float) -> Limits:
    return Limits(silence_s=silence_s, working_s=60.0, cpu_counts=True)


class Process:
    """A process that answers a line with a line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @property
    def ended(self) -> bool:
        """See `Processes`."""
        return self.process.returncode is not None

    async def ask(self) -> object:
        """See `Processes`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"step\n")
        return await self.process.stdout.readline()

    def used_s(self) -> float:
        """See `Processes`."""
        return 0.0

    def kill(self) -> None:
        """See `Processes`."""
        self.process.kill()

    def why_ended(self) -> str:
        """See `Processes`."""
        return f"vLLM's process ended: {self.process.returncode}"


async def test_stopped_process_ends_with_its_worker() -> None:
    """SIGSTOP under a request: the process is killed, which ends its requests, and the worker ends
    with the reason."""
    failed: list[BaseException] = []
    system = ActorSystem("hang", on_escalate=lambda _, error: failed.append(error))
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys\nfor line in sys.stdin: print(line, end='', flush=True)",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    process = Process(child)
    assert await process.ask() == b"step\n"
    child.send_signal(signal.SIGSTOP)
    watch = await ProcessWatch.start(system, process, limits(0.2))
    with watch.progress.request():
        assert await asyncio.wait_for(child.wait(), 60) == -signal.SIGKILL
    assert "vLLM hangs: " in str(await until(lambda: failed))
    assert "vllm.silence_s = 0.2" in str(failed)
    await watch.close()
    await system.stop()


async def test_ended_process_ends_an_idle_worker() -> None:
    """Without requests the end of the process is noticed, too."""
    system = ActorSystem("end")
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    watch = await ProcessWatch.start(system, Process(child), limits(60.0))
    await until(lambda: watch.lost)
    await watch.close()
    await system.stop()
