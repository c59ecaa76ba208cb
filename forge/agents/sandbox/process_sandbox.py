"""The sandbox of a process that runs other people's code for long: a root directory of its own.

Owns its file system, namespaces, user and filter of system calls; the process sets its own limits.
It has the packages of Python and of the system, read-only, a private /tmp, /dev/shm and /proc, and
no other process. Reward functions and commands have it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Final

from forge.agents.sandbox import bubblewrap, seccomp
from forge.agents.sandbox.child import clean_environment, end_group, last_line, start_turn
from forge.agents.sandbox.installations import is_within, shown_directories, without_home
from forge.core.errors import ConfigError, FailedPrecondition
from forge.runtime.concurrency import child_start

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SETTINGS: Final = ("alternatives", "ca-certificates", "hosts", "ld.so.cache", "localtime",
                    "nsswitch.conf", "pki", "resolv.conf", "ssl")  # fmt: skip
"""Entries of /etc: names, certificates and libraries, no secrets."""
_CERTIFICATES: Final = ("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS")


def _late() -> str:
    return f"bwrap has not ended within {bubblewrap.PROBE_S:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSandbox:
    """View of a process in the sandbox."""

    modules: Collection[str] = ()
    """Modules whose directories it imports from."""
    programs: Collection[str] = ()
    """Programs and scripts, shown with their installations."""
    read: Collection[str] = ()
    """Further files and directories, read-only."""
    write: Collection[str] = ()
    """Directories of the host that it writes."""
    owner: str = "reward"
    """First word of the settings of `read` and `write`, for errors."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Content of further files, by path."""
    secrets: Collection[str] = ()
    """Files that stay hidden, with their directories where no module is in them."""
    network: bool = False
    """Share the network of the host."""
    tmp_bytes: int
    """Size of /tmp, and of /dev/shm."""
    proc: bool = True
    """Mount a private /proc."""

    async def fitted(self) -> ProcessSandbox:
        """Returns the sandbox without /proc, if this host permits no mount of it: in a container or
        unit that masks parts of its own /proc, the kernel refuses plain users a new one."""
        problem = await self.problem()
        if not problem or problem == _late():
            return self
        without = replace(self, proc=False)
        return self if await without.problem() else without

    async def problem(self) -> str:
        """Returns the reason if this host cannot run the sandbox; "" if it can. Raises
        `ConfigError` for a path of a setting that does not exist."""
        for setting, paths in (("read", self.read), ("write", self.write)):
            for path in paths:
                if not os.path.lexists(path):
                    raise ConfigError(f"{self.owner}_{setting}: there is no {path}")
        try:
            async with self.command(sys.executable, "-I", "-S", "-c", "") as (command, descriptors):
                probe = await child_start.start(
                    *command,
                    stdin=DEVNULL,
                    stdout=DEVNULL,
                    stderr=PIPE,
                    env=self.environment(()),
                    pass_fds=descriptors,
                    start_new_session=True,
                )
        except FailedPrecondition as error:
            return str(error)
        try:
            async with asyncio.timeout(bubblewrap.PROBE_S):
                _, errors = await probe.communicate()
        except TimeoutError:
            return _late()
        finally:
            await end_group(probe)
        reason = last_line(errors, chars=200, otherwise="bwrap failed")
        return reason if probe.returncode else ""

    def environment(self, passed: Collection[str]) -> dict[str, str]:
        """Returns the variables of the process."""
        return clean_environment(passed) | {"HOME": "/tmp", "TMPDIR": "/tmp"}

    @asynccontextmanager
    async def command(self, *words: str) -> AsyncIterator[tuple[tuple[str, ...], tuple[int, ...]]]:
        """Returns the command line that runs `words` in the sandbox, and the descriptors that it
        needs, for one start: the process is started within the context. Contexts wait for each
        other. Raises `FailedPrecondition` without bubblewrap or libseccomp."""
        async with start_turn():
            with ExitStack() as stack:
                system_calls = stack.enter_context(seccomp.filter_file(seccomp.deny_list()))
                contents: list[str] = []
                descriptors = [system_calls]
                for path, text in self.files.items():
                    content = stack.enter_context(seccomp.filter_file(text.encode()))
                    contents += ("--perms", "0444", "--ro-bind-data", str(content), path)
                    descriptors.append(content)
                # A thread, because hundreds of paths are looked up.
                file_system = await asyncio.to_thread(lambda: tuple(self._mounts(contents)))
                command = (
                    bubblewrap.executable(),
                    *bubblewrap.namespaces(network=self.network),
                    *file_system,
                    *("--seccomp", str(system_calls)),
                    "--",
                    *words,
                )
                yield command, tuple(descriptors)

    def _mounts(self, contents: Sequence[str]) -> Iterator[str]:
        """Later entries cover earlier ones. `contents`: the words of `files`."""
        sources = {path for entry in self._sources() for path in without_home(entry)}
        sources.discard(Path("/tmp"))
        environment = (Path(os.environ[name]) for name in _CERTIFICATES if os.environ.get(name))
        python = {Path(sys.prefix), Path(sys.base_prefix), *environment}
        chosen = {Path(path).absolute() for path in (*self.read, *self.write)}
        etc = {Path("/etc", name) for name in _SETTINGS} - set(map(Path, self.files))
        named = {path for path in sources | python | etc | chosen if path.exists()}
        # bubblewrap mounts nothing over a link: real paths are mounted, and links made to them.
        shown = {path.resolve() for path in named}
        links = {path for path in named - shown if not is_within(path, (*shown, *_SYSTEM))}
        kept = {path.resolve() for path in python | chosen}
        for name in _SYSTEM:
            if Path(name).is_symlink():
                yield from ("--symlink", str(Path(name).readlink()), name)
            elif Path(name).is_dir():
                yield from ("--ro-bind", name, name)
        size = str(self.tmp_bytes)
        # Before the directories below it.
        yield from ("--perms", "1777", "--size", size, "--tmpfs", "/tmp")
        # bubblewrap makes the missing parents with the mode of the host's, for example 700 for
        # /root.
        parents = {parent for path in shown | links for parent in path.parents} | {Path("/etc")}
        for parent in sorted(parent for parent in parents if not _is_system(parent)):
            yield from ("--perms", "0755", "--dir", str(parent))
        yield from (*(("--proc", "/proc") if self.proc else ()), "--dev", "/dev")
        yield from ("--perms", "1777", "--size", size, "--tmpfs", "/dev/shm")
        for path in sorted(path for path in shown if not _is_system(path)):
            yield from _bind(path)
        for path in links:
            yield from ("--symlink", str(path.resolve()), str(path))
        covers = set(self._secret_paths(shown))
        for source in sources & shown - kept:
            covers.update(_private_entries(source, shown))
        yield from _cover(path for path in covers if covers.isdisjoint(path.parents))
        yield from contents
        for place in self.write:
            yield from ("--bind", os.path.realpath(place), os.path.realpath(place))
        directory = Path.cwd()
        yield from ("--chdir", str(directory) if is_within(directory, shown) else "/")
        yield from ("--remount-ro", "/dev", "--remount-ro", "/")

    def _sources(self) -> Iterator[Path]:
        """Directories from which the process imports, and those of its programs."""
        yield Path.cwd()
        yield from shown_directories(self.programs)
        yield Path(__file__).parents[3]
        yield from (Path(entry) for entry in sys.path if entry)
        for name in self.modules:
            try:
                found = importlib.util.find_spec(name.partition(".")[0])
            except (ImportError, ValueError):
                continue
            places = [*(found.submodule_search_locations or ())] if found else []
            if found and found.origin:
                places.append(str(Path(found.origin).parent if places else found.origin))
            yield from (Path(place).parent for place in places if Path(place).is_absolute())

    def _secret_paths(self, shown: Collection[Path]) -> Iterator[Path]:
        for secret in self.secrets:
            path = Path(secret).resolve()
            if secret and path.exists() and is_within(path, shown):
                holds_source = any(root.is_relative_to(path.parent) for root in shown)
                yield path if holds_source else path.parent


def _bind(path: Path) -> Iterator[str]:
    if os.getuid() == 0 and path.is_dir() and path.stat().st_mode & 0o005 != 0o005:
        # The user of the process cannot enter it: show its entries in a directory of the sandbox.
        yield from ("--perms", "0755", "--dir", str(path))
        for entry in path.iterdir():
            if entry.is_symlink():
                yield from ("--symlink", str(entry.readlink()), str(entry))
            else:
                yield from ("--ro-bind", str(entry), str(entry))
    else:
        yield from ("--ro-bind", str(path), str(path))


def _is_system(path: Path) -> bool:
    return is_within(path, _SYSTEM) or path == Path("/")


def _private_entries(directory: Path, shown: Collection[Path]) -> Iterator[Path]:
    """Returns `.forge`, `.git`, `.env` and the like, except a virtual environment."""
    for entry in directory.iterdir() if directory.is_dir() else ():
        # The name first: a directory of packages has hundreds of entries.
        private = entry.name[0] == "." and not entry.is_symlink()
        if private and not any(path.is_relative_to(entry) for path in shown):
            yield entry


def _cover(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        if path.is_dir():
            yield from ("--perms", "0755", "--tmpfs", str(path), "--remount-ro", str(path))
        else:
            yield from ("--ro-bind", "/dev/null", str(path))
