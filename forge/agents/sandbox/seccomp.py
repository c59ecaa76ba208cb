"""Filters of system calls for sandboxes.

Owns two lists. Programs of a model get an allow-list: no fork, no thread, no socket, no shared
memory, no ptrace. Commands and reward functions need threads, processes and sockets; they get a
deny-list of calls that administer a host or widen the attack surface of its kernel.

libseccomp compiles the filters: it knows the numbers of every architecture. Every Debian and Fedora
has it, so ctypes is enough and no binding is a dependency.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from forge.core.errors import FailedPrecondition

_ALLOW: Final = 0x7FFF0000
_ERROR: Final = 0x00050000
"""With the number of the error in its lower half."""
_ALLOWED: Final = """
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
_REFUSED: Final = """
unshare setns
mount umount2 pivot_root move_mount open_tree mount_setattr fsopen fsconfig fsmount fspick
open_by_handle_at fanotify_init quotactl quotactl_fd acct swapon swapoff reboot
init_module finit_module delete_module kexec_load kexec_file_load
bpf perf_event_open userfaultfd lookup_dcookie
keyctl add_key request_key
syslog iopl ioperm modify_ldt uselib
settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname
pidfd_getfd
"""
_MISSING: Final = "clone3 io_uring_setup io_uring_enter io_uring_register"
"""A filter cannot look at the arguments of clone3, and io_uring passes filters by."""
_CLONE_NEWUSER: Final = 0x10000000
_TIOCSTI: Final = 0x5412
_FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Permitted kinds of sockets. Network namespaces do not separate some others, e.g. AF_VSOCK, which
reaches the host of a virtual machine."""
_LAST_FAMILY: Final = 64
_EQUAL: Final = 4
_GREATER_OR_EQUAL: Final = 5
_MASKED_EQUAL: Final = 7
_OPERATORS: Final = {
    _EQUAL: "SCMP_CMP_EQ",
    _GREATER_OR_EQUAL: "SCMP_CMP_GE",
    _MASKED_EQUAL: "SCMP_CMP_MASKED_EQ",
}
_32_BITS: Final = 0xFFFFFFFF


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


@contextmanager
def filter_file(program: bytes) -> Iterator[int]:
    """Returns a descriptor of a filter, for one start: a reader moves its offset."""
    descriptor = os.memfd_create("filter")
    try:
        os.write(descriptor, program)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


@cache
def allow_list() -> bytes:
    """Returns the filter of programs of a model. Raises `FailedPrecondition` without libseccomp."""
    with _Compiler(otherwise=_ERROR | errno.EPERM) as compiler:
        for name in _ALLOWED.split():
            compiler.add(_ALLOW, name)
        return compiler.program()


@cache
def deny_list() -> bytes:
    """Returns the filter of commands and reward functions. Raises `FailedPrecondition` without
    libseccomp."""
    with _Compiler(otherwise=_ALLOW) as compiler:
        for number, name, comparison in _refused():
            compiler.add(_ERROR | number, name, *comparison)
        return compiler.program()


def container_profile() -> str:
    """Returns the deny-list as a profile of podman and docker: their own may be missing."""
    rules = [
        {"names": [name], "action": "SCMP_ACT_ERRNO", "errnoRet": number}
        | ({"args": [_argument(*comparison)]} if comparison else {})
        for number, name, comparison in _refused()
    ]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})


def _argument(index: int, operator: int, first: int, second: int = 0) -> dict[str, object]:
    return {"index": index, "op": _OPERATORS[operator], "value": first, "valueTwo": second}


def _refused() -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """Yields error number, call, and argument, operator and one or two numbers of a comparison."""
    for name in _REFUSED.split():
        yield errno.EPERM, name, ()
    for name in _MISSING.split():
        # As from a kernel without the call: programs then use an older one.
        yield errno.ENOSYS, name, ()
    # A user namespace of its own would give a process capabilities, and so more of the kernel.
    yield errno.EPERM, "clone", (0, _MASKED_EQUAL, _CLONE_NEWUSER, _CLONE_NEWUSER)
    # It types into the terminal of the runner.
    yield errno.EPERM, "ioctl", (1, _MASKED_EQUAL, _32_BITS, _TIOCSTI)
    for family in range(_LAST_FAMILY):
        if family not in _FAMILIES:
            yield errno.EPERM, "socket", (0, _EQUAL, family)
    yield errno.EPERM, "socket", (0, _GREATER_OR_EQUAL, _LAST_FAMILY)


class _Compiler:
    """One filter in the making."""

    def __init__(self, *, otherwise: int) -> None:
        try:
            self._library = ctypes.CDLL("libseccomp.so.2")
        except OSError:
            raise FailedPrecondition("there is no libseccomp") from None
        self._library.seccomp_init.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._library.seccomp_init(ctypes.c_uint32(otherwise)))

    def __enter__(self) -> _Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        self._library.seccomp_release(self._context)

    def add(self, action: int, name: str, *comparison: int) -> None:
        """Adds a rule for a call; `comparison`: argument, operator and one or two numbers."""
        number = self._library.seccomp_syscall_resolve_name(name.encode())
        # Newer architectures lack some of the older calls.
        if number < 0:
            return
        compared: Any = (_Comparison * 1)(_Comparison(*comparison)) if comparison else None
        add, count = self._library.seccomp_rule_add_array, 1 if comparison else 0
        self._check(add(self._context, ctypes.c_uint32(action), number, count, compared))

    def program(self) -> bytes:
        """Returns the program of the Berkeley packet filter."""
        descriptor = os.memfd_create("filter")
        try:
            self._check(self._library.seccomp_export_bpf(self._context, descriptor))
            os.lseek(descriptor, 0, os.SEEK_SET)
            return os.read(descriptor, 1 << 16)
        finally:
            os.close(descriptor)

    def _check(self, result: int) -> None:
        if result < 0:
            raise FailedPrecondition(f"libseccomp compiles no filter: {os.strerror(-result)}")
