"""The first code in the sandbox of a command: `python -I -S entry.py`.

Owns the order: limits, directories, user, then the program in place of this one. It sends the
directory of the answer to the runner, and waits for its byte: by then the network is ready. Only
the standard library, without packages: each import delays each rollout.

Arguments: socket, RLIMIT_DATA, RLIMIT_NPROC, user (0: stay), template of HOME, then the program.
"""

from __future__ import annotations

import os
import resource
import socket
import sys

WORK, HOME, ANSWERS = "/tmp/work", "/tmp/home", "/tmp/forge"


def main() -> None:
    """Becomes the program."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    memory_bytes, processes, user = map(int, sys.argv[2:5])
    template, *words = sys.argv[5:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if user and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for kind, limit in ((resource.RLIMIT_DATA, memory_bytes), (resource.RLIMIT_NPROC, processes)):
        if limit:
            resource.setrlimit(kind, (limit, limit))
    os.umask(0o022)
    for directory in (WORK, ANSWERS):
        os.mkdir(directory)  # noqa: PTH102 - the import of pathlib takes time
    _make_home(template)
    os.chdir(WORK)
    answers = os.open(ANSWERS, os.O_RDONLY | os.O_DIRECTORY)
    socket.send_fds(channel, [b"+"], [answers])
    os.close(answers)
    if not channel.recv(1):
        sys.exit("the runner is gone")
    channel.close()
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}; command_read shows more of the host")


def _make_home(template: str) -> None:
    if template:
        import shutil

        shutil.copytree(template, HOME, symlinks=True)
    else:
        os.mkdir(HOME)  # noqa: PTH102


if __name__ == "__main__":
    main()
