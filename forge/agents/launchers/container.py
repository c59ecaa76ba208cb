"""Programs in containers of podman or docker, with an image per task.

Owns the engine's command line and the removal of its containers. The engine owns images, files and
limits. The program's shell waits for the network of the gateway before it becomes the program.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Final

from forge.agents.launchers import container_removal
from forge.agents.launchers.base import ANSWER, Program, ProgramLimits, Request, read_answer
from forge.agents.launchers.gateway_network import (
    gateway_addresses,
    gateway_network,
    host_names,
)
from forge.agents.sandbox import seccomp
from forge.agents.sandbox.bubblewrap import UNPRIVILEGED_ID
from forge.agents.sandbox.child import end_group, last_line, last_lines, start_turn
from forge.core.errors import ConfigError, InvalidArgument
from forge.runtime.concurrency import child_start
from forge.runtime.concurrency.child_start import ChildProcess
from forge.runtime.telemetry import log

_ANSWERS: Final = "/forge"
_ANSWER_BYTES: Final = 1 << 20
_CERTIFICATES: Final = "/run/forge-tls"
_PROFILE: Final = "seccomp.json"
_OPEN_FILES: Final = 4096
# The program gets no standard input: it is the runner's to start it.
_START: Final = 'echo + && read -r _ && exec "$@" </dev/null'
_KILLED: Final = 137
_ABSENT: Final = "no such container"
_REMOVALS: Final = 5
_PAUSE_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSettings:
    """Settings of all containers of a runner."""

    engine: str
    """podman or docker, with further words of its command line."""
    image: str = ""
    """Image of tasks without one."""
    pull: str = "never"
    """never or missing."""
    user: str = ""
    """User inside; "": the image's, under a root runner an unprivileged one."""
    host_network: bool = False
    read: Sequence[str] = ()
    write: Sequence[str] = ()


class ContainerLauncher:
    """Starts programs in containers."""

    def __init__(self, settings: ContainerSettings, *, limits: ProgramLimits, runner: str) -> None:
        """`runner`: label of its containers; those of an earlier process with it are removed.
        Raises `ConfigError`."""
        self._settings = settings
        self._limits = limits
        self._label = f"forge.runner={runner}"
        self._engine = shlex.split(settings.engine)
        self._removal: ChildProcess | None = None
        if not self._engine or shutil.which(self._engine[0]) is None:
            raise ConfigError(f"container_engine: there is no program {settings.engine!r}")
        if os.sep in self._engine[0]:
            self._engine[0] = str(_absolute(self._engine[0]))

    async def check(self) -> None:
        """Raises `ConfigError` if the engine does not answer, or the image is absent."""
        await self._ask("ps", "--quiet", failure="container_engine")
        if self._settings.image and self._settings.pull == "never":
            await self._ask("image", "inspect", self._settings.image, failure="container_image")
        # It outlives the runner after SIGKILL, and removes what the runner cannot.
        self._removal = await child_start.start(
            *(sys.executable, "-I", "-S", str(Path(container_removal.__file__))),
            *(self._label, *self._engine),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,
        )
        assert self._removal.stdout
        await self._removal.stdout.readline()

    @asynccontextmanager
    async def start(self, request: Request) -> AsyncIterator[Program]:
        """As `Launcher.start`. Raises `InvalidArgument` for a task without an image."""
        image = request.image or self._settings.image
        if not isinstance(image, str) or not image or image.startswith("-"):
            raise InvalidArgument(
                f"payload 'image' must name an image, is {image!r}; or set container_image"
            )
        name = f"forge-{uuid.uuid4().hex}"
        async with AsyncExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forge-")))
            # Before the start: a cancelled one may have made it already.
            stack.push_async_callback(self._remove, name)
            process = await self._start(name, image, request, directory)
            stack.push_async_callback(end_group, process)
            assert process.stdin and process.stdout
            if not await process.stdout.readline():
                raise RuntimeError(f"no container of image {image}: {await _reason(process)}")
            addresses = [] if self._settings.host_network else gateway_addresses(request.gateway)
            pid = int(await self._ask("inspect", "--format", "{{.State.Pid}}", name))
            answers = await stack.enter_async_context(
                gateway_network(pid, addresses, directory=_ANSWERS)
            )
            process.stdin.write(b"+\n")
            process.stdin.close()
            yield Program(
                process=process,
                answer=partial(read_answer, answers),
                over_limit=partial(self._over_limit, process),
            )

    async def close(self) -> None:
        """As `Launcher.close`; removes containers that are left."""
        if self._removal is not None:
            assert self._removal.stdin
            self._removal.stdin.close()
            await self._removal.wait()

    async def _start(
        self, name: str, image: str, request: Request, directory: Path
    ) -> ChildProcess:
        variables = {
            **request.variables,
            **{name: request.inherited[name] for name in request.passed},
            **{name: f"{_CERTIFICATES}/{name}" for name in request.certificates},
            "TMPDIR": "/tmp",
            "FORGE_ANSWER": f"{_ANSWERS}/{ANSWER}",
        }
        for variable, path in request.certificates.items():
            # The user inside may be another one than the owner of the file.
            (directory / variable).write_bytes(Path(path).read_bytes())
            (directory / variable).chmod(0o444)
        directory.chmod(0o755)
        (directory / _PROFILE).write_text(seccomp.container_profile())
        mounts = [f"{directory}:{_CERTIFICATES}:ro"] if request.certificates else []
        async with start_turn():
            return await child_start.start(
                *(*self._engine, "run", "--interactive", "--name", name, "--label", self._label),
                *self._options(request, directory, mounts),
                *(word for variable in variables for word in ("--env", variable)),
                *("--entrypoint", "/bin/sh", image, "-c", _START, "forge", *request.words),
                env={**_engine_environment(), **variables},
                # conmon writes a file `oom` into it.
                cwd=directory,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                start_new_session=True,
            )

    def _options(self, request: Request, directory: Path, mounts: Sequence[str]) -> list[str]:
        settings, limits = self._settings, self._limits
        words = [f"--network={'host' if settings.host_network else 'none'}"]
        words += [f"--pull={settings.pull}", "--stop-timeout=0"]
        words += ["--cap-drop=ALL", "--security-opt=no-new-privileges"]
        words += [f"--security-opt=seccomp={directory / _PROFILE}"]
        words += [f"--ulimit=nofile={_OPEN_FILES}:{_OPEN_FILES}", "--ulimit=core=0:0"]
        if limits.processes:
            words += [f"--pids-limit={limits.processes}"]
            words += [f"--ulimit=nproc={limits.processes}:{limits.processes}"]
        if limits.memory_bytes:
            memory_bytes = limits.memory_bytes + limits.tmp_bytes
            # Equal limits: no swap.
            words += [f"--memory={memory_bytes}", f"--memory-swap={memory_bytes}"]
        words += [f"--tmpfs=/tmp:rw,exec,size={limits.tmp_bytes},mode=1777"]
        words += [f"--tmpfs={_ANSWERS}:rw,size={_ANSWER_BYTES},mode=1777"]
        if not settings.host_network:
            names = host_names(gateway_addresses(request.gateway)).items()
            words += [f"--add-host={name}:{number}" for name, number in names]
        if user := settings.user or (f"{UNPRIVILEGED_ID}:{UNPRIVILEGED_ID}" * (os.getuid() == 0)):
            words += [f"--user={user}"]
        mounts = [*mounts, *(f"{path}:{path}:ro" for path in map(_absolute, settings.read))]
        mounts += [f"{path}:{path}:rw" for path in map(_absolute, settings.write)]
        return words + [f"--volume={mount}" for mount in mounts]

    async def _over_limit(self, process: ChildProcess) -> str:
        # Engines do not know reliably by which limit: the container's is the lower one.
        killed = process.returncode == _KILLED and self._limits.memory_bytes
        return "over its limit on memory, or killed by its host" if killed else ""

    async def _remove(self, name: str) -> None:
        reason = ""
        for _ in range(_REMOVALS):
            try:
                await self._ask("rm", "--force", name)
                return
            except RuntimeError as error:
                if _ABSENT in str(error).lower() and reason:
                    return
                reason = str(error)
            # The client was killed while it started the container.
            await asyncio.sleep(_PAUSE_S)
        # The removal at the end of the runner is left.
        log.warning("container_not_removed", container=name, error=reason)

    async def _ask(self, *words: str, failure: str = "") -> str:
        """Returns the output of a command of the engine. Raises `RuntimeError` with its error;
        `ConfigError` if `failure` names a setting."""
        process = await child_start.start(
            *self._engine, *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        output, errors = await process.communicate()
        if process.returncode == 0:
            return output.decode(errors="replace").strip()
        reason = last_line(errors, chars=300, otherwise="no reason")
        text = f"{shlex.join([*self._engine, *words[:2]])}: {reason}"
        raise ConfigError(f"{failure}: {text}") if failure else RuntimeError(text)


def _engine_environment() -> dict[str, str]:
    """Returns the variables with which an engine finds its settings, without secrets of others."""
    names = ("PATH", "HOME", "USER", "LOGNAME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "TMPDIR")
    prefixes = ("DOCKER_", "CONTAINER", "XDG_DATA_")
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(prefixes)
    }


def _absolute(path: str) -> Path:
    return Path(path).absolute()


async def _reason(process: ChildProcess) -> str:
    assert process.stderr
    lines = last_lines((await process.stderr.read()).decode(errors="replace"), chars=300)
    # docker ends with a hint to its help.
    reasons = [line for line in lines if "--help" not in line]
    return reasons[-1] if reasons else "the engine gives no reason"
