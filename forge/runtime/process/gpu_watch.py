"""Reads the NVIDIA GPUs of this process: metrics, and a summary in its directory entry.

Metrics have the names of NVIDIA's dcgm-exporter where that has one, so that its dashboards fit.
A host without library, driver or permission is one log line, and the service runs without them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
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
    """One GPU and the values that it could tell, by metric."""

    index: int
    uuid: str
    model: str
    values: Mapping[str, float]

    def summary(self) -> str:
        """One line for people, without the values that are missing."""
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
    """Reads the GPUs again and again, on a thread: a driver may hang."""

    def __init__(self, context: ServiceContext, nvml: Any, *, visible: str | None) -> None:
        """`visible` is CUDA_VISIBLE_DEVICES; None: all GPUs of the host."""
        self._context = context
        self._nvml = nvml
        self._visible = None if visible is None else visible.split(",")

    async def run(self) -> None:
        """Read until cancelled; the first failure of the driver ends it, with one log line."""
        reading = 0
        while True:
            try:
                gpus = await asyncio.to_thread(self.read)
            except self._nvml.NVMLError as error:
                log.warning("gpus_not_read", error=str(error))
                break
            if reading % ANNOUNCE_EVERY == 0:
                self._context.metadata[METADATA_KEY] = "; ".join(one.summary() for one in gpus)
                await self._context.announce()
            reading += 1
            await asyncio.sleep(PERIOD_S)
        if self._context.metadata.pop(METADATA_KEY, None) is not None:
            await self._context.announce()
        await asyncio.Event().wait()

    def read(self) -> list[Gpu]:
        """Read this process's GPUs and set their metrics. Raises NVMLError when the driver does
        not even count them; a value that a GPU lacks is left out."""
        nvml, found = self._nvml, []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            if not self._sees(index, uuid):
                continue
            gpu = Gpu(
                index=index,
                uuid=uuid,
                model=_text(nvml.nvmlDeviceGetName(handle)),
                values=self._values(handle),
            )
            for name, value in gpu.values.items():
                _GAUGES[name].labels(str(index), uuid, gpu.model).set(value)
            found.append(gpu)
        return found

    def _sees(self, index: int, uuid: str) -> bool:
        if self._visible is None:
            return True
        return any(one == str(index) or (one and uuid.startswith(one)) for one in self._visible)

    def _values(self, handle: Any) -> dict[str, float]:
        values = {}
        for name, (_, read) in _READINGS.items():
            try:
                values[name] = float(read(self._nvml, handle))
            except self._nvml.NVMLError:
                continue
        return values


def watch_gpus(context: ServiceContext, *, device: str) -> None:
    """Watch the GPUs while the process runs, if `device` is one; without NVML one log line."""
    if not device.startswith("cuda"):
        return
    try:
        nvml = _open()
    except NotFound as error:
        log.warning("gpus_not_watched", error=str(error))
        return
    watch = GpuWatch(context, nvml, visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    context.keep_running(watch.run(), name="gpu-watch")


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
