"""Reads the NVIDIA GPUs of this process: metrics, and a summary in its directory entry.

Metrics have the names of NVIDIA's dcgm-exporter where that has one, so that its dashboards fit.
A host without library, driver or permission is one log line, and the service runs without them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from typing import Any

from forge.core.errors import NotFound
from forge.runtime.process.service import ServiceContext
from forge.runtime.telemetry import gauge, log

PERIOD_S = 10.0
"""Between two readings."""
ANNOUNCE_EVERY = 6
"""Readings between two summaries in the directory."""
METADATA_KEY = "gpus"
_MIB = 1 << 20
_LABELS = ("gpu", "UUID", "modelName")
_SLOWED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""Reasons of a lower clock that an operator can do something about."""

Read = Callable[[Any, Any], float]
"""Reads one value by the library, from a handle."""


def _active_links(nvml: Any, handle: Any) -> float:
    """NVLinks in use; the first link that the GPU lacks ends the count."""
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += nvml.nvmlDeviceGetNvLinkState(handle, link)
        except nvml.NVMLError:
            if link == 0:
                raise
            break
    return active


def _uncorrected(nvml: Any, handle: Any) -> float:
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return float(nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds))


_READINGS: Mapping[str, tuple[str, Read]] = {
    "DCGM_FI_DEV_GPU_UTIL": (
        "Share of time in which a kernel ran, in percent.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    ),
    "DCGM_FI_DEV_MEM_COPY_UTIL": (
        "Share of time in which memory was read or written, in percent.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).memory,
    ),
    "DCGM_FI_DEV_FB_USED": (
        "Memory in use, in MiB.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / _MIB,
    ),
    "DCGM_FI_DEV_FB_FREE": (
        "Free memory, in MiB.",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).free / _MIB,
    ),
    "DCGM_FI_DEV_POWER_USAGE": (
        "Power draw, in watts.",
        lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
    ),
    "DCGM_FI_DEV_GPU_TEMP": (
        "Temperature, in degrees Celsius.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": (
        "Memory errors since the driver started that could not be corrected.",
        _uncorrected,
    ),
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": (
        "Reasons why clocks are lowered, as NVML's bits.",
        lambda nvml, gpu: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
    ),
    "forge_gpu_nvlinks_active": ("NVLinks in use.", _active_links),
}
_GAUGES = {name: gauge(name, about, _LABELS) for name, (about, _) in _READINGS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU and its readable values, by metric."""

    index: int
    uuid: str
    model: str
    values: Mapping[str, float]
    error: str = ""
    """Why it cannot be read, e.g. since it has fallen off the bus."""

    def summary(self) -> str:
        """One line for people, without the values that are missing."""
        if self.error:
            return f"{self.index} {self.model}: not readable ({self.error})"
        of = self.values
        parts = []
        if (share := of.get("DCGM_FI_DEV_GPU_UTIL")) is not None:
            parts.append(f"{share:.0f} % busy")
        used, free = of.get("DCGM_FI_DEV_FB_USED"), of.get("DCGM_FI_DEV_FB_FREE")
        if used is not None and free is not None:
            parts.append(f"{used / 1024:.0f} of {(used + free) / 1024:.0f} GiB")
        if (power := of.get("DCGM_FI_DEV_POWER_USAGE")) is not None:
            parts.append(f"{power:.0f} W")
        if (errors := of.get("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 0.0)) > 0:
            parts.append(f"{errors:.0f} memory errors")
        bits = int(of.get("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 0))
        parts += [f"slowed by {reason}" for bit, reason in _SLOWED.items() if bits & bit]
        return f"{self.index} {self.model}: {', '.join(parts) or 'no values'}"


class GpuWatch:
    """Reads the GPUs again and again, on a thread: a driver may hang. What cannot be read any more
    leaves the metrics."""

    def __init__(
        self, context: ServiceContext, nvml: Any, *, visible: Sequence[str] | None
    ) -> None:
        """`visible`: numbers, UUIDs or their beginnings; None: all GPUs of the host."""
        self._context = context
        self._nvml = nvml
        self._visible = visible
        self._known: dict[int, tuple[str, str]] = {}
        """UUID and model of each GPU that was read, by its number."""
        self._exported: set[tuple[str, tuple[str, str, str]]] = set()
        """Metrics in force, with their labels."""
        self._lost: frozenset[int] = frozenset()
        self._failed = False

    async def run(self) -> None:
        """Read until cancelled. A failure of the driver, or of a GPU, is one log line."""
        reading = 0
        while True:
            try:
                gpus = await asyncio.to_thread(self.read)
            except self._nvml.NVMLError as error:
                await self._note_failure(error)
                reading = 0
            else:
                lost = frozenset(one.index for one in gpus if one.error)
                if reading % ANNOUNCE_EVERY == 0 or lost != self._lost:
                    self._context.metadata[METADATA_KEY] = "; ".join(one.summary() for one in gpus)
                    await self._context.announce()
                self._note_lost(gpus)
                self._lost, self._failed = lost, False
                reading += 1
            await asyncio.sleep(PERIOD_S)

    def read(self) -> list[Gpu]:
        """Read this process's GPUs and set their metrics. Raises NVMLError when the driver does
        not even count them; a value that a GPU lacks is left out."""
        found: list[Gpu] = []
        try:
            if self._failed:
                self._nvml.nvmlInit()
            visible = self._parents()
            for index in range(self._nvml.nvmlDeviceGetCount()):
                gpu = self._gpu(index, visible)
                if gpu is not None:
                    found.append(gpu)
        finally:
            self._export(found)
        return found

    def _gpu(self, index: int, visible: Sequence[str] | None) -> Gpu | None:
        """Read one GPU; None for one that this process does not see."""
        nvml, error = self._nvml, ""
        uuid, model = self._known.get(index, ("", "GPU"))
        values: dict[str, float] = {}
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            model = _text(nvml.nvmlDeviceGetName(handle))
            self._known[index] = (uuid, model)
        except nvml.NVMLError as failed:
            error = str(failed)
        if not _sees(visible, index, uuid):
            return None
        if not error:
            values = self._values(handle)
        return Gpu(index=index, uuid=uuid, model=model, values=values, error=error)

    def _parents(self) -> Sequence[str] | None:
        """Return what is visible, with the GPU in place of its parts (MIG): a part has no
        utilization, power or temperature of its own."""
        if self._visible is None:
            return None
        return [self._parent(one) if one.startswith("MIG-") else one for one in self._visible]

    def _parent(self, uuid: str) -> str:
        nvml = self._nvml
        try:
            part = nvml.nvmlDeviceGetHandleByUUID(uuid)
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
            return _text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError:
            return uuid

    def _values(self, handle: Any) -> dict[str, float]:
        values = {}
        for name, (_, read) in _READINGS.items():
            try:
                values[name] = float(read(self._nvml, handle))
            except self._nvml.NVMLError:
                continue
        return values

    def _export(self, gpus: Sequence[Gpu]) -> None:
        """Set the metrics, and remove those that have no value any more."""
        exported = set()
        for gpu in gpus:
            labels = (str(gpu.index), gpu.uuid, gpu.model)
            for name, value in gpu.values.items():
                _GAUGES[name].labels(*labels).set(value)
                exported.add((name, labels))
        for name, labels in self._exported - exported:
            _GAUGES[name].remove(*labels)
        self._exported = exported

    async def _note_failure(self, error: Exception) -> None:
        if not self._failed:
            log.warning("gpus_not_read", error=str(error))
        self._failed, self._lost = True, frozenset()
        if self._context.metadata.pop(METADATA_KEY, None) is not None:
            await self._context.announce()

    def _note_lost(self, gpus: Sequence[Gpu]) -> None:
        for gpu in gpus:
            if gpu.error and gpu.index not in self._lost:
                log.warning("gpu_not_read", gpu=gpu.index, uuid=gpu.uuid, error=gpu.error)


def visible_gpus(variable: str | None, device: str) -> list[str] | None:
    """Return the GPUs of a process, from CUDA_VISIBLE_DEVICES and its torch device; None: all.

    An engine with "cuda" or "cuda:0" may use several. Without the variable, "cuda:0" is the first
    GPU of the host alone.
    """
    entries = None
    if variable is not None:
        stripped = (one.strip() for one in variable.split(","))
        # As for CUDA, the first entry that names no GPU ends the list.
        entries = list(takewhile(lambda one: one not in ("", "-1"), stripped))
    number = device.partition(":")[2]
    if not number.isdigit():
        return entries
    if entries is None:
        return [number]
    return entries[int(number) : int(number) + 1] if int(number) else entries


def watch_gpus(context: ServiceContext, *, device: str) -> None:
    """Watch the GPUs while the process runs, if `device` is one; without NVML one log line."""
    if not device.startswith("cuda"):
        return
    try:
        nvml = _open()
    except NotFound as error:
        log.warning("gpus_not_watched", error=str(error))
        return
    visible = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), device)
    watch = GpuWatch(context, nvml, visible=visible)
    context.keep_running(watch.run(), name="gpu-watch")


def _sees(visible: Sequence[str] | None, index: int, uuid: str) -> bool:
    """Whether a GPU is among those of the process. One without a UUID has been lost from the start,
    and is seen by its number alone."""
    if visible is None:
        return True
    return any(one == str(index) or uuid.startswith(one) for one in visible)


def _open() -> Any:
    """Return NVML, initialized. Raises NotFound with the reason."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        raise NotFound("there is no nvidia-ml-py: pip install nvidia-ml-py") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NotFound(f"NVML does not start: {error}") from None
    return nvml


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
