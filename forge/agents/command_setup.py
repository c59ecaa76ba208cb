"""The command of a runner, made from its settings.

Owns the choice of the launcher, and the one rule for a host without the sandbox.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from forge.agents.config import RunnerConfig
from forge.agents.launchers.bare import BareLauncher
from forge.agents.launchers.base import Launcher, Program, ProgramLimits, Request
from forge.agents.launchers.container import ContainerLauncher, ContainerSettings
from forge.agents.launchers.wrapped import SandboxLauncher
from forge.agents.sandbox.process_sandbox import ProcessSandbox
from forge.agents.scaffolds.command import Command, command_words
from forge.core.errors import ConfigError
from forge.runtime.telemetry import log


class UnsafeFallback:
    """Starts programs in the sandbox, or on a host without one as children of the runner."""

    def __init__(self, sandbox: Launcher, bare: Launcher) -> None:
        self._launcher = sandbox
        self._bare = bare

    async def check(self) -> None:
        """Chooses the launcher: the sandbox, or the host where it has no sandbox."""
        try:
            await self._launcher.check()
        except ConfigError as error:
            log.warning("unsafe_sandbox", reason=str(error))
            self._launcher = self._bare

    def start(self, request: Request) -> AbstractAsyncContextManager[Program]:
        """Starts a program with the chosen launcher."""
        return self._launcher.start(request)

    async def close(self) -> None:
        """Frees the chosen launcher."""
        await self._launcher.close()


def make_command(config: RunnerConfig) -> Command:
    """Returns the scaffold that runs the command. Raises `ConfigError`."""
    words = command_words(config.command, on_host=config.command_sandbox != "container")
    return Command(
        words,
        launcher=_make_launcher(config, words),
        pass_environment=config.pass_environment,
        tls_ca=config.tls_ca,
        tls_cert=config.command_tls_cert,
        tls_key=config.command_tls_key,
    )


def _make_launcher(config: RunnerConfig, words: Sequence[str]) -> Launcher:
    limits = ProgramLimits(
        memory_bytes=config.command_memory_mb << 20,
        processes=config.command_processes,
        tmp_bytes=config.command_tmp_mb << 20,
    )
    if config.command_sandbox == "container":
        return _make_container_launcher(config, limits)
    bare = BareLauncher(limits)
    if config.command_sandbox == "none":
        return bare
    sandbox = SandboxLauncher(
        ProcessSandbox(
            read=config.command_read,
            write=config.command_write,
            owner="command",
            secrets=config.secret_files,
            network=config.command_network == "host",
            tmp_bytes=limits.tmp_bytes,
        ),
        limits=limits,
        home=config.command_home,
        words=words,
    )
    return UnsafeFallback(sandbox, bare) if config.unsafe_sandbox else sandbox


def _make_container_launcher(config: RunnerConfig, limits: ProgramLimits) -> ContainerLauncher:
    if config.command_home:
        raise ConfigError("command_home: a container has the home directory of its image")
    settings = ContainerSettings(
        engine=config.container_engine,
        image=config.container_image,
        pull=config.container_pull,
        user=config.container_user,
        host_network=config.command_network == "host",
        read=config.command_read,
        write=config.command_write,
    )
    return ContainerLauncher(settings, limits=limits, runner=config.instance_id)
