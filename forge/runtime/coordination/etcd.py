"""The etcd client.

Adds a deadline to every call, a new token where etcd no longer accepts the present one, and to a
watch a new snapshot whenever it may have missed a change. Every failure is Unavailable.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from etcd3aio.auth import AuthService
from etcd3aio.errors import (
    EtcdConnectionError,
    EtcdError,
    EtcdPermissionDeniedError,
    EtcdTransientError,
    EtcdUnauthenticatedError,
)
from etcd3aio.kv import KVService, prefix_range_end
from etcd3aio.lease import LeaseService
from etcd3aio.maintenance import MaintenanceService
from etcd3aio.watch import WatchCreateRequest, WatchRequest, WatchStub

from forge.core.errors import ConfigError, Unauthenticated, Unavailable
from forge.runtime.concurrency.tasks import raise_if_cancelled
from forge.runtime.coordination.etcd_channel import EtcdChannel
from forge.runtime.telemetry import log

TIMEOUT_S = 5.0
_DELETE = 1
_REQUIRE_LEADER = (("hasleader", "true"),)
"""Metadata of a watch: a partitioned member ends it, instead of sending nothing."""
_STALE = ("auth store is old", "user name is empty")
"""In the errors of calls whose token precedes a change of users or roles."""
T = TypeVar("T")


class Refused(Unavailable):
    """etcd has answered, and refuses the call to the user of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A user of etcd and the file with its password."""

    user: str
    password_file: str

    @classmethod
    def of(cls, user: str, password_file: str, *, default_user: str) -> Self | None:
        """Return None without settings. Raises ConfigError for a file that cannot be read."""
        if not password_file:
            if user:
                raise ConfigError("etcd_user is set, so etcd_password_file must be set")
            return None
        login = cls(user=user or default_user, password_file=password_file)
        login.password()
        return login

    def password(self) -> str:
        """Read the file. Raises ConfigError."""
        try:
            return Path(self.password_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise ConfigError(f"etcd_password_file = {self.password_file!r}: {reason}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Versioned:
    """A value and the revision that its replacement expects."""

    value: bytes
    mod_revision: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """A change of the observed keys."""

    snapshot: bool
    """True: `present` has all keys. False: it has the added and replaced ones."""
    present: Mapping[str, Versioned]
    deleted: Sequence[str] = ()


class Etcd:
    """The keys of one cluster, relative to its prefix; failures are Unavailable."""

    def __init__(
        self,
        channel: EtcdChannel,
        *,
        endpoints: str,
        cluster: str,
        login: Login | None = None,
    ) -> None:
        self.cluster = cluster
        self._login = login
        self._token = ""
        self._token_is_doubtful = False
        """A call with it got no answer."""
        self._logging_in = asyncio.Lock()
        self._channel = channel
        self._endpoints = endpoints
        self._prefix = f"/forge/{cluster}/"
        # One attempt: the client would also repeat a compare-and-swap that succeeded.
        self._kv = KVService(channel, max_attempts=1)
        self._leases = LeaseService(channel, max_attempts=1)
        self._users = AuthService(channel, max_attempts=1)
        # Without a token: etcd 3.4 refuses to authenticate a call that has a stale one.
        self._authentication = AuthService(channel, max_attempts=1)
        self._maintenance = MaintenanceService(channel, max_attempts=1)
        self._watches = WatchStub(channel)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    def use(self, credentials: grpc.ChannelCredentials) -> None:
        """Connect later calls with these."""
        self._channel.use(credentials)

    async def log_in(self) -> None:
        """Get a token for the user of this process. Raises Unavailable, and Unauthenticated for a
        wrong password and for an etcd that demands none."""
        if self._login is None:
            return
        user, password = self._login.user, self._login.password()
        with self._reachable():
            try:
                granted = await self._authentication.authenticate(user, password, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise Unauthenticated(
                    f"etcd at {self._endpoints} refuses user {user}: {_reason(error)}"
                ) from None
        self._token = granted.token
        for service in (self._kv, self._leases, self._users, self._maintenance):
            service.set_token(self._token)

    async def administer(self, call: Callable[[AuthService], Awaitable[T]]) -> T:
        """Call etcd's service of users and roles. Raises Unavailable."""
        return await self._call(lambda: call(self._users))

    async def demands_login(self) -> bool:
        """Return whether etcd has authentication enabled. Raises Unavailable."""
        with self._reachable():
            try:
                await self._authentication.authenticate("", "", timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return error.code() is not grpc.StatusCode.FAILED_PRECONDITION
        return True

    async def status(self) -> Any:
        """Return the StatusResponse of the member that this process calls. Raises Unavailable."""
        return await self._call(lambda: self._maintenance.status(timeout=TIMEOUT_S))

    async def get(self, key: str, *, timeout_s: float = TIMEOUT_S) -> Versioned | None:
        """Return the value of a key, None if absent. Raises Unavailable."""
        path = self._prefix + key
        found = await self._call(lambda: self._kv.get(path, timeout=timeout_s), path)
        for entry in found.kvs:
            return _version(entry)
        return None

    async def names(self, prefix: str) -> list[str]:
        """Return the keys under a prefix. Raises Unavailable."""
        found = await self._range(self._prefix + prefix, keys_only=True)
        return [self._name(entry.key) for entry in found.kvs]

    async def list(self, prefix: str) -> dict[str, Versioned]:
        """Return all values under a prefix, by key. Raises Unavailable."""
        return self._versioned((await self._range(self._prefix + prefix)).kvs)

    async def _range(self, start: str, *, keys_only: bool = False) -> Any:
        end = prefix_range_end(start)
        return await self._call(
            lambda: self._kv.get(start, range_end=end, keys_only=keys_only, timeout=TIMEOUT_S),
            start,
        )

    async def swap(
        self, key: str, value: bytes, *, expected_revision: int, lease_id: int = 0
    ) -> int | None:
        """Return the new revision; None if the key has another revision (0: it must be absent)."""
        return await self._put_if(
            key, value, unchanged=key, revision=expected_revision, lease_id=lease_id
        )

    async def put_while(self, key: str, value: bytes, *, unchanged: str, revision: int) -> bool:
        """Store a value if another key still has this revision; False if not. Raises
        Unavailable."""
        return await self._put_if(key, value, unchanged=unchanged, revision=revision) is not None

    async def _put_if(
        self, key: str, value: bytes, *, unchanged: str, revision: int, lease_id: int = 0
    ) -> int | None:
        path = self._prefix + key
        # The client has no helper for this comparison; an absent key has mod-revision 0.
        holds = KVService.txn_compare_version(self._prefix + unchanged, 0)
        holds.target = holds.MOD
        holds.mod_revision = revision
        put = KVService.txn_op_put(path, value, lease=lease_id)
        # A repetition is safe: etcd refuses a stale token before it applies anything.
        response = await self._call(
            lambda: self._kv.txn(compare=[holds], success=[put], timeout=TIMEOUT_S), path
        )
        return int(response.header.revision) if response.succeeded else None

    async def grant(self, ttl_s: float, *, timeout_s: float) -> int:
        """Grant a lease; return its id."""
        ttl = math.ceil(ttl_s)
        return int((await self._call(lambda: self._leases.grant(ttl, timeout=timeout_s))).ID)

    async def renew(self, lease_id: int, *, timeout_s: float) -> bool:
        """Renew a lease; False if it no longer exists."""
        await self._replace_doubtful_token()
        stream = self._leases.keep_alive(lease_id)
        try:
            with self._reachable():
                # The client's own keep-alive has no deadline: a frozen etcd would hold it forever.
                async with asyncio.timeout(timeout_s):
                    async for response in stream:
                        return bool(response.TTL > 0)
        finally:
            stream.cancel()
        raise Unavailable(f"etcd at {self._endpoints} closed the lease stream")

    async def revoke(self, lease_id: int, *, timeout_s: float) -> None:
        """End a lease and delete its keys."""
        await self._call(lambda: self._leases.revoke(lease_id, timeout=timeout_s))

    async def observe(self, key: str, *, prefix: bool = False) -> AsyncGenerator[KeyChange, None]:
        """Yield a snapshot, then every change; a new snapshot after a possibly missed change.

        Never ends and never raises: an outage delays it. Keys are without the cluster's prefix.
        """
        start = self._prefix + key
        end = prefix_range_end(start) if prefix else b""
        outage = False
        while True:
            try:
                with self._reachable():
                    async with aclosing(self._observe_once(start, end)) as changes:
                        async for change in changes:
                            outage = False
                            yield change
            except Unavailable as error:
                if not outage:
                    log.warning("watch_interrupted", key=start, error=str(error))
                outage = True
            # Jitter: many processes lose their watches at once.
            await asyncio.sleep(random.uniform(0.1, 1.0))

    async def follow(self, key: str) -> AsyncGenerator[Versioned | None, None]:
        """Yield the current value (None: absent), then each change; never misses the latest."""
        last: Versioned | None = None
        first = True
        async with aclosing(self.observe(key)) as changes:
            async for change in changes:
                current = change.present.get(key)
                if first or current != last:
                    first, last = False, current
                    yield current

    async def _observe_once(self, start: str, end: bytes) -> AsyncGenerator[KeyChange, None]:
        """Return, or raise the stream's error, when a new snapshot is needed."""
        found = await self._call(
            lambda: self._kv.get(start, range_end=end or None, timeout=TIMEOUT_S), start
        )
        yield KeyChange(snapshot=True, present=self._versioned(found.kvs))
        # The client's own watch may skip revisions when it reconnects, and hangs on a compacted
        # revision; this one ends in both cases.
        token = (("token", self._token),) if self._token else ()
        stream = self._watches.Watch(metadata=_REQUIRE_LEADER + token)
        try:
            create = WatchCreateRequest(
                key=start.encode(), range_end=end, start_revision=found.header.revision + 1
            )
            await stream.write(WatchRequest(create_request=create))
            async for response in stream:
                if response.canceled or response.compact_revision:
                    return
                if response.events:
                    yield self._events(response.events)
        finally:
            stream.cancel()

    def _events(self, events: Sequence[Any]) -> KeyChange:
        # Several events of one key may come at once: only the last of each counts.
        latest = {event.kv.key: event for event in events}.values()
        return KeyChange(
            snapshot=False,
            present=self._versioned([event.kv for event in latest if event.type != _DELETE]),
            deleted=[self._name(event.kv.key) for event in latest if event.type == _DELETE],
        )

    def _versioned(self, entries: Sequence[Any]) -> dict[str, Versioned]:
        return {self._name(entry.key): _version(entry) for entry in entries}

    def _name(self, path: bytes) -> str:
        return path.decode().removeprefix(self._prefix)

    async def _call(self, call: Callable[[], Awaitable[T]], path: str = "") -> T:
        """Call etcd, twice where the token was stale. Raises Unavailable."""
        await self._replace_doubtful_token()
        token = self._token
        with self._reachable(path):
            try:
                return await call()
            except (EtcdError, grpc.aio.AioRpcError) as error:
                if not _is_stale(error):
                    raise
            if self._login is None:
                raise Refused(
                    f"etcd at {self._endpoints} demands a user: set etcd_password_file"
                ) from None
            try:
                async with self._logging_in:
                    if self._token == token:
                        await self.log_in()
            except (ConfigError, Unauthenticated) as error:
                raise Unavailable(str(error)) from None
            return await call()

    async def _replace_doubtful_token(self) -> None:
        """Log in after calls without an answer. Raises Unavailable.

        An etcd that was restored from a snapshot is at an earlier position, and lets a call wait
        whose token is of a later one: without an error, until the call ends by its deadline.
        """
        if not self._token_is_doubtful or not self._token:
            return
        async with self._logging_in:
            if self._token_is_doubtful:
                try:
                    await self.log_in()
                except (ConfigError, Unauthenticated) as error:
                    raise Unavailable(str(error)) from None
                self._token_is_doubtful = False

    @contextmanager
    def _reachable(self, path: str = "") -> Iterator[None]:
        member = self._channel.member
        try:
            yield
        except EtcdPermissionDeniedError as error:
            user = "this certificate: set etcd_password_file"
            user = self._login.user if self._login else user
            raise Refused(f"etcd at {self._endpoints} refuses {path} to {user}") from error
        except TimeoutError as error:
            self._token_is_doubtful = True
            self._channel.leave(member)
            raise Unavailable(f"etcd at {self._endpoints} does not answer") from error
        except (EtcdError, grpc.aio.AioRpcError) as error:
            raise_if_cancelled()
            if _is_of_member(error):
                self._token_is_doubtful = True
                self._channel.leave(member)
            raise Unavailable(f"etcd at {self._endpoints}: {_reason(error)}") from error


def _version(entry: Any) -> Versioned:
    return Versioned(value=entry.value, mod_revision=entry.mod_revision, lease_id=entry.lease)


def _reason(error: EtcdError | grpc.aio.AioRpcError) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return error.details() or error.code().name
    return str(error)


def _is_of_member(error: EtcdError | grpc.aio.AioRpcError) -> bool:
    """Whether another member may answer."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return isinstance(error, EtcdConnectionError | EtcdTransientError)


def _is_stale(error: EtcdError | grpc.aio.AioRpcError) -> bool:
    if isinstance(error, EtcdUnauthenticatedError):
        return True
    return any(text in _reason(error) for text in _STALE)
