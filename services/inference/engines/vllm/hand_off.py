"""Keys and values between a prefill and a decode worker, as a kind of hand-off.

`copy`: vLLM's process fills memory of the worker (`kv_connector`), the workers move its bytes as
those of any engine, and the other vLLM loads them. `nixl`: vLLM's NixlConnector moves them from GPU
to GPU, and the workers move its parameters alone.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import msgspec

from forge.core.errors import ConfigError, DataLoss, ResourceExhausted
from services.inference.engines.base import KvSpan, Prompt, RefusedHandOff
from services.inference.engines.byte_room import ByteRoom
from services.inference.engines.refusals import refused
from services.inference.engines.threads import run_to_end
from services.inference.engines.vllm.exchange.kv_format import (
    Layout,
    block_bytes,
    checked,
    fingerprint_of,
)
from services.inference.engines.vllm.exchange.names import KV_CONNECTOR, LOAD, SAVE, TOKENS
from services.inference.engines.vllm.exchange.shared_memory import SharedMemory

Params = dict[str, Any]
"""vLLM's kv_transfer_params."""
_HEADER_BYTES = 1 << 16
NOTHING = b"\0"
"""Data of a hand-off without keys and values: the prompt is shorter than a block, or they could not
be copied."""
NIXL_CONNECTOR = "NixlConnector"
NIXL_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""Parameters of a request whose keys and values another engine reads."""


class Saving(Protocol):
    """The keys and values of one prompt at its prefill worker."""

    params: Params

    def data(self, returned: Params | None) -> bytes | memoryview:
        """Return the hand-off. `returned`: vLLM's parameters at the end of the request."""

    def close(self) -> None:
        """Free it."""


class Loading(Protocol):
    """Keys and values of one prompt at its decode worker."""

    params: Params

    def close(self) -> None:
        """Free it."""


class HandOffs(Protocol):
    """One kind of hand-off."""

    fingerprint: bytes
    """Names kind, model and layout."""

    async def save(self, prompt: Prompt) -> Saving:
        """Wait for room for a prompt."""

    async def load(self, span: KvSpan, prompt: Prompt) -> Loading | None:
        """Wait for room for what came; None if it has nothing. Raises RefusedHandOff."""


class _Copy:
    """Memory of one prompt."""

    def __init__(self, room: ByteRoom, size: int) -> None:
        self.params: Params = {}
        self.memory = SharedMemory("forge-kv")
        self._room = room
        self._size = size

    def data(self, returned: Params | None) -> bytes | memoryview:
        """Return the written bytes, valid also after `close`."""
        if not self.memory.size:
            return NOTHING
        return memoryview(mmap.mmap(self.memory.fileno(), 0, prot=mmap.PROT_READ))

    def close(self) -> None:
        self.memory.close()
        self._room.give(self._size)


class CopyHandOffs:
    """The kind `copy`."""

    def __init__(
        self, layout: Layout, *, model: str, block_tokens: int, capacity_bytes: int
    ) -> None:
        self.fingerprint = fingerprint_of(layout, model=model)
        self._layout = layout
        self._block_tokens = block_tokens
        self._room = ByteRoom(capacity_bytes)

    async def save(self, prompt: Prompt) -> _Copy:
        """See `HandOffs`. Raises ResourceExhausted."""
        blocks = prompt.tokens // self._block_tokens
        copy = await self._copy(_HEADER_BYTES + blocks * block_bytes(self._layout))
        copy.params = {SAVE: copy.memory.address} if blocks else {}
        return copy

    async def load(self, span: KvSpan, prompt: Prompt) -> _Copy | None:
        """See `HandOffs`. Raises ResourceExhausted."""
        if bytes(span.data[:2]) == NOTHING:
            return None
        try:
            header, _ = await run_to_end(partial(checked, memoryview(span.data)))
        except DataLoss as error:
            raise _refused("damaged", str(error)) from error
        tokens = header.blocks * self._block_tokens
        if header.layout != self._layout:
            raise _refused("shape", "it has other layers or blocks")
        if tokens > prompt.tokens or span.from_token:
            raise _refused("place", f"{tokens} tokens from {span.from_token}")
        copy = await self._copy(len(span.data))
        try:
            await run_to_end(partial(copy.memory.write, span.data))
        except OSError as error:
            copy.close()
            raise _without_memory(error) from error
        except BaseException:
            copy.close()
            raise
        copy.params = {LOAD: copy.memory.address, TOKENS: tokens}
        return copy

    async def _copy(self, size: int) -> _Copy:
        capacity_bytes = self._room.capacity_bytes
        if size > capacity_bytes:
            raise ResourceExhausted(
                f"keys and values of {size} bytes exceed all of {capacity_bytes} (kv.mib)",
                retry_after_s=0.5,
            )
        await self._room.take(size)
        try:
            return _Copy(self._room, size)
        except OSError as error:
            self._room.give(size)
            raise _without_memory(error) from error


class _Remote:
    """The parameters of one prompt."""

    def __init__(self, params: Params) -> None:
        self.params = params

    def data(self, returned: Params | None) -> bytes | memoryview:
        return msgspec.msgpack.encode(returned) if returned else NOTHING

    def close(self) -> None:
        """vLLM frees the blocks: when decode has them, or after its own time."""


class NixlHandOffs:
    """The kind `nixl`."""

    def __init__(self, *, model: str, vllm_version: str) -> None:
        # Its parameters are no stable format.
        self.fingerprint = f"vllm_nixl {vllm_version} {model}".encode()

    async def save(self, prompt: Prompt) -> _Remote:
        """See `HandOffs`."""
        return _Remote(dict(NIXL_PREFILL))

    async def load(self, span: KvSpan, prompt: Prompt) -> _Remote | None:
        """See `HandOffs`."""
        if bytes(span.data[:2]) == NOTHING:
            return None
        try:
            return _Remote(msgspec.msgpack.decode(span.data, type=Params))
        except msgspec.MsgspecError as error:
            raise _refused("damaged", str(error)) from error


def require_nixl() -> None:
    """Raises ConfigError without the package."""
    if find_spec("nixl") is None:
        raise ConfigError(
            "vllm.hand_off = 'nixl': this Python has no nixl; install it (docs/engines.md)"
        )


def transfer_config(kind: Literal["copy", "nixl"], *, role: str) -> Mapping[str, Any]:
    """Return the arguments of vLLM's KVTransferConfig."""
    common = {
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        # What does not arrive is computed again.
        "kv_load_failure_policy": "recompute",
    }
    if kind == "copy":
        module, name = KV_CONNECTOR
        return {"kv_connector": name, "kv_connector_module_path": module, **common}
    return {"kv_connector": NIXL_CONNECTOR, **common}


def _without_memory(error: OSError) -> ResourceExhausted:
    return ResourceExhausted(f"no memory for keys and values: {error}", retry_after_s=0.5)


def _refused(reason: str, words: str) -> RefusedHandOff:
    return refused(reason, f"hand-off of vLLM: {words}")
