"""Discovery: follows the instances of one kind.

The I/O around `directory`: etcd's changes and the clock go in, instances come out.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from forge.core.errors import Unauthenticated, Unavailable
from forge.runtime.concurrency.tasks import cancel_and_wait
from forge.runtime.coordination.directory import (
    Contact,
    Directory,
    Instance,
    Signatures,
    entry_text,
)
from forge.runtime.coordination.etcd import Etcd, KeyChange, Versioned
from forge.runtime.telemetry import log


class Discovery:
    """The instances of one kind, followed until the process ends."""

    def __init__(
        self, kind: str, etcd: Etcd, contact: Contact, signatures: Signatures | None
    ) -> None:
        self.kind = kind
        self.instances: tuple[Instance, ...] = ()
        """The last known view; an outage of etcd does not empty it."""
        self._etcd = etcd
        self._contact = contact
        self._signatures = signatures
        self._refused: dict[str, str] = {}
        self._directory = Directory()
        self._next_change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._known = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._follow(), name=f"discovery-{kind}")

    async def known(self) -> None:
        """Wait for the first view of etcd; until then `instances` is empty."""
        await self._known.wait()

    async def wait(
        self,
        *,
        count: int = 1,
        timeout_s: float,
        where: Callable[[Instance], bool] | None = None,
    ) -> tuple[Instance, ...]:
        """Wait for `count` fitting instances; return all.

        Raises Unavailable after `timeout_s`; Unauthenticated if only strangers have entries.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            fitting = self.instances if where is None else tuple(filter(where, self.instances))
            if len(fitting) >= count:
                return fitting
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await self.changed()
            except TimeoutError:
                if self._refused and not self.instances:
                    reason = next(iter(self._refused.values()))
                    raise Unauthenticated(
                        f"no {self.kind} instance in cluster {self._etcd.cluster!r} has a valid "
                        f"entry ({reason}): compare key_file with theirs"
                    ) from None
                raise Unavailable(
                    f"{len(fitting)} of {count} fitting {self.kind} instances in cluster "
                    f"{self._etcd.cluster!r} after {timeout_s:g} s"
                ) from None

    def changed(self) -> Coroutine[Any, Any, None]:
        """Return an awaitable for the next change after this call, however late it is awaited."""
        # Bound here, not in the coroutine's first step: its task may start after the change.
        return _until(self._next_change)

    async def close(self) -> None:
        """Stop following."""
        await cancel_and_wait(self._task)
        if self._expiry is not None:
            self._expiry.cancel()

    async def _follow(self) -> None:
        folder = f"services/{self.kind}/"
        async with aclosing(self._etcd.observe(folder, prefix=True)) as changes:
            async for change in changes:
                self._apply(change, folder)

    def _apply(self, change: KeyChange, folder: str) -> None:
        now_s = time.monotonic()
        in_doubt = self._contact.in_doubt(now_s)
        found = {}
        for name, entry in change.present.items():
            instance_id = name.removeprefix(folder)
            try:
                found[instance_id] = decode_entry(self._etcd.cluster, name, entry, self._signatures)
            except Unauthenticated as error:
                if name not in self._refused:
                    log.error("entry_refused", key=name, error=str(error))
                self._refused[name] = str(error)
            except (ValueError, KeyError, TypeError):
                log.error("entry_unreadable", key=name, value=entry.value)
        if change.snapshot:
            self._directory.replace(found, now_s=now_s, in_doubt=in_doubt)
        for instance in found.values():
            self._directory.put(instance)
        for name in change.deleted:
            self._refused.pop(name, None)
            self._directory.remove(name.removeprefix(folder), now_s=now_s, in_doubt=in_doubt)
        self._publish()
        self._known.set()

    def _publish(self) -> None:
        """Publish the directory's state, and schedule the end of the next grace period."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        now_s = time.monotonic()
        next_s = self._directory.expire(now_s)
        if next_s is not None:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(next_s - now_s + 0.01, self._publish)
        if self._directory.instances != self.instances:
            self.instances = self._directory.instances
            self._next_change.set_result(None)
            self._next_change = asyncio.get_running_loop().create_future()


def decode_entry(
    cluster: str, key: str, entry: Versioned, signatures: Signatures | None
) -> Instance:
    """Return the instance of "services/<kind>/<instance>".

    Raises Unauthenticated for a foreign signature; ValueError, KeyError or TypeError for another
    form.
    """
    _, kind, instance_id = key.split("/", 2)
    if signatures is not None:
        fields = json.loads(entry.value)
        if not isinstance(fields, dict):
            raise TypeError(key)
        text = entry_text(cluster, key, entry.lease_id, fields)
        signatures.verify_entry(kind, text, fields)
    return Instance.decode(kind, instance_id, entry.value, entry.mod_revision)


async def _until(change: asyncio.Future[None]) -> None:
    await asyncio.shield(change)
