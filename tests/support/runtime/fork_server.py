"""Forks the processes of services: `python -m tests.support.runtime.fork_server <file descriptor>`.

Owns the imports: what a service runs is imported once, in this process, before the first fork for
it. A fork has one thread and has used neither gRPC nor torch, so it continues as a fresh process of
`python -m <module>` does after its imports. Clients connect to the socket of the file descriptor.
With a client its processes end, and with the last client the server.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

REQUEST_BYTES = 1 << 20
SAVE_EVERY_S = 1.0
TORCH_MODELS = ("transformers.models.qwen3.modeling_qwen3",)
TESTS = (
    "anthropic",
    "forge.agents.app",
    "openai",
    "peft",
    "reasoning_gym",
    "services.console.app",
    "services.gateway.app",
    "services.inference.app",
    "services.pool.app",
    "services.scheduler.app",
    "services.trainer.app",
    "torch",
    *TORCH_MODELS,
)
"""Modules that test files import, for a worker of pytest-xdist. Not those of pytest and its
plugins, whose assertions pytest rewrites, nor `datasets`, which starts a thread."""
ALSO = {
    "forge.agents": (
        "forge.agents.scaffolds.blackbox",
        "forge.agents.scaffolds.whitebox",
        "openai.resources.chat.completions",
    ),
    "forge.cli.main": (
        "forge.cli.credentials.certs",
        "forge.cli.credentials.etcd",
        "forge.cli.exports.command",
        "forge.cli.pool.command",
        "forge.cli.pool.pool_reading",
        "forge.cli.queue.command",
        "forge.cli.status.command",
        "forge.cli.credentials.token",
        "forge.cli.weights",
        "forge.client.operator",
        "forge.client.stored.pool",
        "rich._emoji_codes",
        "rich.table",
        "typer._adapters",
    ),
    "services.trainer": TORCH_MODELS,
    "services.inference": ("services.inference.router.role",),
    "tests.support.inference.held_worker": (
        "services.inference.app",
        "services.inference.router.role",
        "tests.support.inference.held_answers",
        "tests.support.inference.table_engine",
    ),
    "tests.support.pool.lmdb_panic": ("services.pool.app",),
    "tests.support.suite.xdist_worker": TESTS,
    "tests.support.gateway.scripted_engine": (
        "services.gateway.model.chat_model",
        "services.inference.router.sample_stream",
    ),
}
"""Modules that a service imports once it has started."""
COMMAND = "forge.cli.main"
EVERY = ("encodings.idna",)
"""Likewise of each process, for its first connection."""
INFERENCE = ("services.inference", "tests.support.inference.held_worker")
WORKER = (
    "services.inference.worker.role",
    "services.inference.engines.embedded.family_check",
    "services.inference.engines.embedded.roles.wiring",
    "llguidance.hf",
    *TORCH_MODELS,
)
"""Likewise of an inference worker."""


class Client:
    """A test process and what was forked for it."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.status_files: dict[int, int] = {}
        """By the ids of its running processes."""

    def fileno(self) -> int:
        return self.channel.fileno()

    def leave(self) -> None:
        """End its processes."""
        for pid, status in self.status_files.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(status)
        self.channel.close()


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Returns in each forked process, with the request; and None when all clients have left."""
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    # The terminal's interrupt is for the test process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clients = [Client(listener.accept()[0])]
    while clients:
        readable: list[Any] = [listener, woken, *clients]
        ready, _, _ = select.select(readable, [], [])
        if woken in ready:
            os.read(woken, 4096)
            report_ends(clients)
        for client in clients.copy():
            if client not in ready:
                continue
            data, files, _, _ = socket.recv_fds(client.channel, REQUEST_BYTES, 4)
            if not data:
                clients.remove(client)
                client.leave()
                continue
            request: dict[str, Any] = json.loads(data)
            import_service(request["module"], request["argv"])
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                become(request, files[1:])
                ours = [listener.detach(), *(each.channel.detach() for each in clients)]
                statuses = [file for each in clients for file in each.status_files.values()]
                for file in (*ours, woken, waker, *files, *statuses):
                    os.close(file)
                return request
            client.status_files[pid] = files[0]
            for file in files[1:]:
                os.close(file)
            client.channel.send(str(pid).encode())
        if listener in ready:
            clients.append(Client(listener.accept()[0]))
    return None


def report_ends(clients: list[Client]) -> None:
    """Write the exit code of each process that has ended."""
    while any(client.status_files for client in clients):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        (client,) = (each for each in clients if pid in each.status_files)
        # A client that is about to leave reads it no more.
        with suppress(BrokenPipeError), os.fdopen(client.status_files.pop(pid), "w") as file:
            file.write(str(os.waitstatus_to_exitcode(status)))


def import_service(module: str, argv: list[str]) -> None:
    """Import what the module runs, if that has not been done."""
    for also in (*EVERY, *ALSO.get(module, ())):
        importlib.import_module(also)
    if module in INFERENCE and "router" not in argv:
        for also in WORKER:
            importlib.import_module(also)
    if module != COMMAND and module.startswith(("services.", "forge.")):
        main = f"{module}.__main__"
        # Tools have no app.
        getattr(importlib.import_module(main), "load_app", lambda: None)()
        # It is run as `__main__`, and warned of where it has been imported as well.
        del sys.modules[main]
    gc.freeze()
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread does not survive a fork"


def become(request: dict[str, Any], files: list[int]) -> None:
    """Take the environment of a fresh process. `files`: stdout, stderr, and stdin if it has one."""
    stdin = files[2] if len(files) > 2 else os.open(os.devnull, os.O_RDONLY)
    for number, file in enumerate([stdin, *files[:2]]):
        os.dup2(file, number)
    if len(files) < 3:
        os.close(stdin)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["directory"])
    sys.argv[1:] = request["argv"]
    # A service that was started through a link executes these again.
    sys.orig_argv[1:] = ["-m", request["module"], *request["argv"]]


def save_coverage() -> None:
    """Under `make coverage`, save the lines reached every second: SIGKILL ends most services."""
    if "coverage" not in sys.modules:
        return
    measured = sys.modules["coverage"].Coverage.current()

    def save() -> None:
        while True:
            time.sleep(SAVE_EVERY_S)
            save_whole(measured)

    if measured is not None:
        threading.Thread(target=save, name="coverage", daemon=True).start()


def save_whole(measured: Any) -> None:
    """Save the data, and a copy that appears whole: coverage writes its SQLite file without a
    journal, so a kill during a save may damage it."""
    measured.save()
    file = Path(measured.get_data().data_filename())
    if file.exists():
        # Not `.coverage.*`: `coverage combine` must not find a half of it.
        unfinished = file.with_name(f"unfinished{file.name}")
        shutil.copyfile(file, unfinished)
        unfinished.replace(file.with_name(f"{file.name}.copy"))


def main() -> None:
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        save_coverage()
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
