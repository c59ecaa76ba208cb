"""vLLM's processes: their start, and why they ended.

Every error of a process names the last line of vLLM's own error, which is in its output alone.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any

import psutil
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from forge.core.errors import ConfigError, Unavailable
from forge.core.routes import RouteShape
from forge.runtime.telemetry import log
from services.inference.engines.capabilities import Capabilities
from services.inference.engines.vllm.engine_output import EngineOutput
from services.inference.engines.vllm.exchange.names import WORKER_PID
from services.inference.engines.vllm.staging import Checkpoint

_FAILED_CORES = re.compile(r"'[^']*': (-?\d+)")
"""In the error of a start: names of processes, and exit codes."""
_MOST_CHARACTERS = 500


class Processes:
    """vLLM, and the output of its processes."""

    def __init__(self, llm: AsyncLLM, output: EngineOutput) -> None:
        self.llm = llm
        self._output = output
        manager = llm.engine_core.resources.engine_manager
        self._processes = list(manager.processes) if manager else []

    @classmethod
    def start(cls, chosen: AsyncEngineArgs) -> Processes:
        """Start them, to end with this process; blocks until the model is built. Raises ConfigError
        for arguments that vLLM refuses, Unavailable if a process ends."""
        output = EngineOutput()
        os.environ[WORKER_PID] = str(os.getpid())
        try:
            with output.inherited():
                llm = AsyncLLM.from_engine_args(chosen)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"engine = 'vllm': {_one_line(error)}") from error
        except Exception as error:
            codes = [int(code) for code in _FAILED_CORES.findall(str(error))]
            found = output.cause(codes) or _one_line(error)
            raise Unavailable(f"engine = 'vllm': vLLM did not start: {found}") from error
        return cls(llm, output)

    async def prepare(self, checkpoint: Checkpoint, *, model: str, able: Capabilities) -> None:
        """Have them sample as `answer_logits` does unless they draft; draft as `draft_heads` does
        with the ability `drafts`. Raises ConfigError for a model that loses weights in an
        update."""
        if able.shares:
            await self.call("forge_answer_sampler")
        else:
            await self.call("forge_prepare_drafts", able.drafts)
        for problem, lost in await self.call("forge_lost_weights", checkpoint.tensors):
            if problem:
                log.warning("vllm_reload_not_tried", error=problem)
            if lost:
                others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
                raise ConfigError(
                    f"model_path = {model!r}: engine = 'vllm' would never update "
                    f"{lost[0]}{others}: this vLLM takes no tensor for it, or copies one past its "
                    "loader; choose another engine"
                )

    async def record_experts(self) -> RouteShape | None:
        """Have them record the experts of each token; None if they cannot."""
        (found,) = await self.call("forge_record_experts")
        if isinstance(found, str):
            log.debug("experts_not_recorded", reason=found)
            return None
        layers, top_k, experts = found
        return RouteShape(layers=layers, top_k=top_k, experts=experts)

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker's extension, on all ranks. Raises Unavailable if a process
        has ended."""
        try:
            return list(await self.llm.collective_rpc(method, args=args))
        except EngineDeadError as error:
            raise Unavailable(f"engine = 'vllm': {self.why_ended()}") from error

    @property
    def ended(self) -> bool:
        """True if one of the processes has ended."""
        return bool(self.llm.errored)

    async def ask(self) -> object:
        """Return as soon as the scheduler is between two steps."""
        return await self.llm.is_sleeping()

    def used_s(self) -> float:
        """CPU seconds of all that run, with their child processes: those of further devices."""
        return sum(_used_s(process.pid) for process in self._processes)

    def kill(self) -> None:
        """Kill all processes with their child processes, also suspended ones."""
        for process in self._processes:
            for child in _family(process.pid)[1:]:
                with suppress(psutil.Error):
                    child.kill()
            process.kill()

    def why_ended(self) -> str:
        """Return that they ended, and why."""
        cause = self._output.cause(process.exitcode for process in self._processes)
        return f"vLLM's process ended: {cause or 'it wrote no error'}"


def _family(pid: int | None) -> list[psutil.Process]:
    """Return a process and its child processes; none if it has ended."""
    if pid is None:
        return []
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _used_s(pid: int | None) -> float:
    found = 0.0
    for process in _family(pid):
        with suppress(psutil.Error):
            times = process.cpu_times()
            found += times.user + times.system
    return found


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MOST_CHARACTERS]
