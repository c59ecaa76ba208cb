"""A process's interface to its cluster: register, discover, lead, compare and swap, follow."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import grpc

from forge.core.errors import StaleFence, Unauthenticated, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination.claims import Fields, LeasedKey, Owner, this_process
from forge.runtime.coordination.directory import Contact, Instance, Signatures
from forge.runtime.coordination.discovery import Discovery, decode_entry
from forge.runtime.coordination.etcd import Etcd, Login, Refused, Versioned
from forge.runtime.coordination.etcd_channel import open_channel
from forge.runtime.coordination.leader_election import Leadership, elect
from forge.runtime.coordination.leases import EtcdLease, OnConflict, Registration

_PULSE_S = 0.5
_NO_METADATA: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdStatus:
    """The state of one member of etcd."""

    version: str
    size_bytes: int
    """Size of its data file."""
    problems: tuple[str, ...]
    """Alarms, such as NOSPACE, and a missing leader."""


class Coordinator:
    """A process's connection to its cluster."""

    def __init__(self, etcd: Etcd, signatures: Signatures | None = None) -> None:
        self._etcd = etcd
        self._signatures = signatures
        self._contact = Contact(time.monotonic())
        self._discoveries: dict[str, Discovery] = {}
        self._held: weakref.WeakSet[Registration | Leadership] = weakref.WeakSet()
        self._pulse = asyncio.create_task(self._keep_contact(), name="etcd-pulse")

    @classmethod
    async def connect(
        cls,
        endpoints: str,
        *,
        cluster: str,
        timeout_s: float = 10.0,
        credentials: grpc.ChannelCredentials | None = None,
        login: Login | None = None,
        signatures: Signatures | None = None,
    ) -> Coordinator:
        """Connect to etcd at "host:port,...". Raises Unavailable, in one line, when none answers,
        `Refused` when it refuses the user, Unauthenticated when it refuses the password.

        With `credentials` the connection is TLS; endpoints that begin with https:// need them.
        With `signatures` this process signs its entries and ignores those of strangers.
        """
        channel = await open_channel(endpoints, credentials)
        etcd = Etcd(channel, endpoints=endpoints, cluster=cluster, login=login)
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                await etcd.log_in()
                await etcd.get("config/cluster", timeout_s=max(0.1, min(left_s, 1.0)))
                return cls(etcd, signatures)
            except (Refused, Unauthenticated):
                await etcd.close()
                raise
            except Unavailable as error:
                if left_s > 0.2:
                    await asyncio.sleep(0.1)
                    continue
                await etcd.close()
                raise Unavailable(
                    f"no etcd answers at {endpoints}: start one, or name another with "
                    f"--etcd host:port ({error})"
                ) from None

    async def register(
        self,
        kind: str,
        instance_id: str,
        address: str,
        *,
        metadata: Mapping[str, str] = _NO_METADATA,
        ttl_s: float = 5.0,
        owner: Owner | None = None,
        on_conflict: OnConflict = lambda _: None,
    ) -> Registration:
        """Enter discovery until closed; a lost lease is replaced. Raises Unavailable, and Conflict
        when another live process has the instance id.

        `owner` is this process by default. `on_conflict` is called when another process took the
        id while the lease was lost.
        """
        return await self.hold(
            f"services/{kind}/{instance_id}",
            lambda metadata: {"address": address, "metadata": dict(metadata)},
            metadata=metadata,
            ttl_s=ttl_s,
            owner=owner,
            on_conflict=on_conflict,
            taken=lambda other: (
                f"instance_id {instance_id!r} is taken: a live {kind} at {other.get('address')} "
                "has it; give each instance an id of its own"
            ),
        )

    async def hold(
        self,
        key: str,
        fields_of: Callable[[Mapping[str, str]], Fields],
        *,
        ttl_s: float,
        taken: Callable[[Fields], str],
        metadata: Mapping[str, str] = _NO_METADATA,
        owner: Owner | None = None,
        on_conflict: OnConflict = lambda _: None,
    ) -> Registration:
        """Hold a leased key until closed, as `register` does: with the fields of the metadata of
        this moment. `taken` returns the message of Conflict from the other entry's fields."""
        claim = LeasedKey(
            self._etcd,
            key,
            ttl_s=ttl_s,
            owner=owner or this_process(),
            taken=taken,
            signatures=self._signatures,
        )

        async def enter(metadata: Mapping[str, str]) -> EtcdLease:
            return await claim.enter(fields_of(metadata))

        async def write(lease: EtcdLease, metadata: Mapping[str, str]) -> None:
            await claim.write(lease, fields_of(metadata))

        lease = await enter(metadata)
        registration = Registration(
            lease, enter=enter, write=write, metadata=metadata, on_conflict=on_conflict
        )
        self._held.add(registration)
        return registration

    def discover(self, kind: str) -> Discovery:
        """Return the instances of a kind, followed from the first call on."""
        if kind not in self._discoveries:
            self._discoveries[kind] = Discovery(kind, self._etcd, self._contact, self._signatures)
        return self._discoveries[kind]

    async def all_instances(self) -> tuple[Instance, ...]:
        """Return the present instances of all kinds. Raises Unavailable."""
        found = []
        for key, entry in (await self._etcd.list("services/")).items():
            # The discovery of its kind logs an unreadable or refused entry.
            with contextlib.suppress(ValueError, KeyError, TypeError, Unauthenticated):
                found.append(decode_entry(self._etcd.cluster, key, entry, self._signatures))
        return tuple(found)

    async def demands_login(self) -> bool:
        """Return whether etcd has authentication enabled. Raises Unavailable."""
        return await self._etcd.demands_login()

    async def etcd_status(self) -> EtcdStatus:
        """Return the state of the etcd member that this process calls. Raises Unavailable."""
        status = await self._etcd.status()
        return EtcdStatus(
            version=status.version, size_bytes=status.dbSize, problems=tuple(status.errors)
        )

    async def campaign(self, name: str, instance_id: str, *, ttl_s: float = 5.0) -> Leadership:
        """Wait until elected leader of `name`; an outage of etcd prolongs the wait."""
        leadership = await elect(self._etcd, name, instance_id, ttl_s=ttl_s)
        self._held.add(leadership)
        return leadership

    async def get(self, key: str) -> Versioned | None:
        """Return the value of /forge/<cluster>/<key>. Raises Unavailable."""
        return await self._etcd.get(key)

    async def compare_and_swap(self, key: str, value: bytes, *, expected_revision: int) -> int:
        """Replace the value of this revision; 0 expects no value. Returns the new revision.

        Raises StaleFence for another revision, Unavailable when etcd does not answer: the outcome
        is then unknown; read again.
        """
        revision = await self._etcd.swap(key, value, expected_revision=expected_revision)
        if revision is None:
            raise StaleFence(f"{key} is no longer at revision {expected_revision}")
        return revision

    async def values(self, prefix: str) -> list[bytes]:
        """Return the values under /forge/<cluster>/<prefix>, by key. Raises Unavailable."""
        return [entry.value for _, entry in sorted((await self._etcd.list(prefix)).items())]

    async def names(self, prefix: str) -> list[str]:
        """Return the keys under /forge/<cluster>/<prefix>. Raises Unavailable."""
        return await self._etcd.names(prefix)

    def follow(self, key: str) -> AsyncGenerator[Versioned | None, None]:
        """Yield the current value (None: absent), then each change; never misses the latest."""
        return self._etcd.follow(key)

    def use(self, credentials: grpc.ChannelCredentials) -> None:
        """Connect later calls to etcd with these; open watches stay on their connection."""
        self._etcd.use(credentials)

    async def close(self) -> None:
        """Disconnect. Registrations and leadership end with their leases."""
        await cancel_and_wait(self._pulse)
        for held in tuple(self._held):
            await held.abandon()
        for discovery in self._discoveries.values():
            await discovery.close()
        await self._etcd.close()

    async def _keep_contact(self) -> None:
        while True:
            with contextlib.suppress(Unavailable):
                await self._etcd.get("config/cluster", timeout_s=2 * _PULSE_S)
                self._contact.heard(time.monotonic())
            await asyncio.sleep(_PULSE_S)
