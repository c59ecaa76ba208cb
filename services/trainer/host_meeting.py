"""How hosts of a changing number meet, under torchrun: torch's dynamic rendezvous with changes.

- A host that ends leaves the meeting. torch closes it, and then no further host could join.
- The endpoint may be a directory that all hosts mount. Then no host has the store of the others,
  and they meet without any of them.
- A host whose ranks have ended ends without waiting for the others, which may be lost.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
    _RendezvousExitOp,
)

NAME = "forge"
"""Of the rendezvous, for `--rdzv-backend`."""
ADDRESS_S = 60
"""Longest time from the end of a meeting until rank 0 has stored its address, by default."""
_TIMEOUTS = ("join", "last_call", "close", "heartbeat")
_DIGEST_BYTES = hashlib.sha256().digest_size


class MeetingFile(RendezvousBackend):
    """The state of the meeting in a file, which hosts change in turn.

    The file has the state's SHA-256 before it. A state that a lost host wrote in part is no state:
    the hosts then meet anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        """Of the rendezvous."""
        return NAME

    def get_state(self) -> tuple[bytes, Token] | None:
        """Raises `RendezvousConnectionError` if the directory is not available."""
        with self._locked(fcntl.LOCK_SH) as file:
            return _read(file)

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Store a state if `token` is that of the present one, or None and there is none. Returns
        the state in the file, its token, and whether it is the new one. Raises as `get_state`."""
        with self._locked(fcntl.LOCK_EX) as file:
            present = _read(file)
            if present is not None and present[1] != token:
                return (*present, False)
            digest = hashlib.sha256(state).digest()
            os.pwrite(file, digest + state, 0)
            os.ftruncate(file, _DIGEST_BYTES + len(state))
            os.fsync(file)
        return state, digest, True

    @contextmanager
    def _locked(self, how: int) -> Iterator[int]:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                # Over NFS, a lock also renews what this host has read of the file.
                fcntl.flock(file, how)
                yield file
            finally:
                os.close(file)
        except OSError as error:
            raise RendezvousConnectionError(f"{self._path}: {error.strerror}") from error


def _read(file: int) -> tuple[bytes, Token] | None:
    content = os.pread(file, os.fstat(file).st_size, 0)
    digest, state = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return (state, digest) if hashlib.sha256(state).digest() == digest else None


class HostMeeting(DynamicRendezvousHandler):
    """torch's rendezvous, which outlives a host."""

    def get_backend(self) -> str:
        """Name by which torchrun selected it."""
        return NAME

    def shutdown(self) -> bool:
        """Leave; the others stay, and further hosts can join. Returns whether the store knows."""
        self._stop_heartbeats()
        try:
            self._op_executor.run(
                _RendezvousExitOp(), self._get_deadline(self._settings.timeout.close)
            )
        except RendezvousError:
            return False
        return True


def is_directory(endpoint: str) -> bool:
    """Whether an endpoint is a directory, not an address."""
    return endpoint.startswith("/")


def use_meeting() -> None:
    """Make the rendezvous known to torchrun by its name."""
    rendezvous_handler_registry.register(NAME, make_meeting)
    # Ranks end without an error if rank 0 is lost. Then torchrun would wait 5 minutes for its host.
    SimpleElasticAgent._exit_barrier = _end_alone  # type: ignore[method-assign]


def _end_alone(agent: SimpleElasticAgent) -> None:
    """In place of torchrun's wait for the other hosts: the supervisor starts this one again."""


def make_meeting(params: RendezvousParameters) -> HostMeeting:
    """The rendezvous at an endpoint, with torch's options for `c10d`. Raises
    `RendezvousConnectionError`."""
    store, backend = _place(params)
    return HostMeeting.from_backend(  # type: ignore[no-any-return]
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(*(_timeout(params, name) for name in _TIMEOUTS)),
        keep_alive_interval=params.get_as_int("keep_alive_interval", 5) or 5,
        keep_alive_max_attempt=params.get_as_int("keep_alive_max_attempt", 3) or 3,
    )


def _timeout(params: RendezvousParameters, name: str) -> timedelta | None:
    seconds = params.get_as_int(f"{name}_timeout")
    return None if seconds is None else timedelta(seconds=seconds)


def _place(params: RendezvousParameters) -> tuple[Store, RendezvousBackend]:
    if not is_directory(params.endpoint):
        backend, store = create_backend(params)
        return store, backend
    folder = Path(params.endpoint)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise RendezvousConnectionError(f"{folder}: {error.strerror}") from error
    # Of each round, the address of its rank 0: it grows by some 100 bytes per round.
    addresses = FileStore(str(folder / "addresses"))
    # As torch's own store. If the host of rank 0 is lost, hosts would wait 5 minutes for it.
    limit = _timeout(params, "read") or timedelta(seconds=ADDRESS_S)
    addresses.set_timeout(limit)
    return addresses, MeetingFile(folder / "hosts")
