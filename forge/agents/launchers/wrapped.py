"""Programs in bubblewrap, with a private /tmp and the gateway as their network.

Owns the files and variables that a command sees; `forge.agents.sandbox.process_sandbox` makes the
sandbox.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Final

from forge.agents.launchers import entry
from forge.agents.launchers.base import ANSWER, Program, ProgramLimits, Request, read_answer
from forge.agents.launchers.gateway_network import gateway_addresses, gateway_network, hosts_file
from forge.agents.launchers.handover import Handover
from forge.agents.sandbox.bubblewrap import UNPRIVILEGED_ID, interpreter, remedy
from forge.agents.sandbox.child import end_group, last_line
from forge.agents.sandbox.control_groups import CONTROL_GROUPS, ControlGroup
from forge.agents.sandbox.installations import names_file
from forge.agents.sandbox.process_sandbox import ProcessSandbox
from forge.core.errors import ConfigError
from forge.runtime.concurrency import child_start
from forge.runtime.concurrency.child_start import ChildProcess

_CERTIFICATES: Final = "/etc/forge-tls"
_USERS: Final = {
    "/etc/passwd": f"agent:x:{UNPRIVILEGED_ID}:{UNPRIVILEGED_ID}::{entry.HOME}:/bin/sh\n",
    "/etc/group": f"agent:x:{UNPRIVILEGED_ID}:\n",
}


class SandboxLauncher:
    """Starts programs in bubblewrap."""

    def __init__(
        self,
        sandbox: ProcessSandbox,
        *,
        limits: ProgramLimits,
        home: str = "",
        words: Sequence[str] = (),
    ) -> None:
        """`home`: a directory copied to HOME; `words`: the command, shown with its installations.
        The sandbox has the network of the host, or the gateway alone."""
        files = [word for word in words if names_file(word)]
        read = [*sandbox.read, home] if home else sandbox.read
        self._sandbox = replace(sandbox, programs=files, read=read)
        self._limits = limits
        self._home = str(Path(home).absolute()) if home else ""

    async def check(self) -> None:
        """Raises `ConfigError` if this host has no sandbox."""
        self._sandbox = await self._sandbox.fitted()
        if problem := await self._sandbox.problem():
            raise ConfigError(f"no sandbox for commands: {problem}; {remedy()}")

    @asynccontextmanager
    async def start(self, request: Request) -> AsyncIterator[Program]:
        """Starts a program in the sandbox. Raises `OSError` and `RuntimeError`."""
        async with AsyncExitStack() as stack:
            handover = stack.enter_context(Handover())
            limits = self._limits
            memory_bytes = limits.memory_bytes and limits.memory_bytes + limits.tmp_bytes
            group = stack.enter_context(
                CONTROL_GROUPS.group(memory_bytes=memory_bytes, processes=limits.processes)
            )
            process = await self._start(request, handover, group)
            stack.push_async_callback(end_group, process)
            parcel = await handover.receive()
            if parcel is None:
                assert process.stderr
                reason = last_line(await process.stderr.read(), chars=200, otherwise="no reason")
                raise RuntimeError(f"the sandbox did not start: {reason}")
            (answers,) = parcel.descriptors
            stack.callback(os.close, answers)
            if not self._sandbox.network:
                addresses = gateway_addresses(request.gateway)
                await stack.enter_async_context(gateway_network(parcel.pid, addresses))
            handover.reply()
            yield Program(
                process=process,
                answer=partial(read_answer, answers),
                over_limit=partial(asyncio.to_thread, _over_limit, group),
            )

    async def close(self) -> None:
        """As `Launcher.close`: nothing to free."""

    async def _start(
        self, request: Request, handover: Handover, group: ControlGroup
    ) -> ChildProcess:
        names, contents = _certificates(request.certificates)
        files = {**_USERS, **contents}
        if not self._sandbox.network:
            files["/etc/hosts"] = hosts_file(gateway_addresses(request.gateway))
        sandbox = replace(self._sandbox, files=files)
        channel = handover.theirs.fileno()
        user = UNPRIVILEGED_ID if os.getuid() == 0 else 0
        numbers = (channel, self._limits.memory_bytes, self._limits.processes, user)
        # The interpreter without its virtual environment starts faster.
        first = (interpreter(), "-I", "-S", str(Path(entry.__file__)))
        async with sandbox.command(*first, *map(str, numbers), self._home, *request.words) as (
            command,
            descriptors,
        ):
            process = await child_start.start(
                *group.words,
                *command,
                env={**request.inherited, **request.variables, **names, **_PLACES},
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,
                pass_fds=(*descriptors, channel),
            )
        handover.started()
        return process


_PLACES: Final = {
    "HOME": entry.HOME,
    "TMPDIR": "/tmp",
    "USER": "agent",
    "LOGNAME": "agent",
    "FORGE_ANSWER": f"{entry.ANSWERS}/{ANSWER}",
}


def _certificates(files: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the variables inside, and the content of the files by their path inside."""
    inside = {path: f"{_CERTIFICATES}/{number}.pem" for number, path in enumerate(files.values())}
    contents = {inside[path]: Path(path).read_text() for path in inside}
    return {name: inside[path] for name, path in files.items()}, contents


def _over_limit(group: ControlGroup) -> str:
    return "over its limit on memory" if group.over_limit() else ""
