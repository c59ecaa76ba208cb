"""NVML gives the state of GPUs. Its failures do not stop the service."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from prometheus_client import REGISTRY

from forge.runtime.process.gpu_watch import METADATA_KEY, GpuWatch, watch_gpus


class _NvmlError(Exception):
    """What the library raises."""


class _FakeNvml:
    """Two GPUs of one host; functions in `broken` raise."""

    NVMLError = _NvmlError
    NVML_NVLINK_MAX_LINKS = 36
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *broken: str) -> None:
        self._broken = set(broken)
        self._answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetName": b"NVIDIA H100",
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87, memory=31),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=40 << 30, free=40 << 30),
            "nvmlDeviceGetPowerUsage": 412_500,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetCurrentClocksThrottleReasons": 0x24,
        }

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            if name in self._broken:
                raise _NvmlError(f"{name} failed")
            if name == "nvmlDeviceGetHandleByIndex":
                return given[0]
            if name == "nvmlDeviceGetUUID":
                return f"GPU-{given[0]}"
            if name == "nvmlDeviceGetNvLinkState":
                if given[1] == 18:
                    raise _NvmlError("no such link")
                return 1
            return self._answers[name]

        return call


class _Context:
    """What the watch needs of a ServiceContext."""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}
        self.announced = asyncio.Event()
        self.kept: list[str] = []

    async def announce(self) -> None:
        self.announced.set()

    def keep_running(self, work: Any, *, name: str) -> None:
        work.close()
        self.kept.append(name)


def _watch(nvml: _FakeNvml, *, visible: str | None = None) -> tuple[_Context, GpuWatch]:
    context = _Context()
    return context, GpuWatch(context, nvml, visible=visible)  # type: ignore[arg-type]


def _metric(name: str, gpu: int) -> float | None:
    labels = {"gpu": str(gpu), "UUID": f"GPU-{gpu}", "modelName": "NVIDIA H100"}
    value: float | None = REGISTRY.get_sample_value(name, labels)
    return value


def test_values_have_the_names_of_dcgm_exporter() -> None:
    """Utilization, memory, power, temperature, errors, throttle reasons and NVLinks are metrics."""
    _, watch = _watch(_FakeNvml())
    first, second = watch.read()
    assert (first.uuid, second.uuid) == ("GPU-0", "GPU-1")
    assert _metric("DCGM_FI_DEV_GPU_UTIL", 1) == 87
    assert _metric("DCGM_FI_DEV_FB_USED", 0) == 40 * 1024
    assert _metric("DCGM_FI_DEV_POWER_USAGE", 0) == 412.5
    assert _metric("forge_gpu_nvlinks_active", 0) == 18
    assert first.summary() == (
        "0 NVIDIA H100: 87 % busy, 40 of 80 GiB, 412 W, slowed by power cap, "
        "slowed by temperature (software)"
    )


@pytest.mark.parametrize(
    "broken",
    [
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetNvLinkState",
    ],
)
def test_a_value_that_a_gpu_lacks_is_left_out(broken: str) -> None:
    """One function without support or permission leaves the others' values."""
    _, complete = _watch(_FakeNvml())
    _, watch = _watch(_FakeNvml(broken))
    whole, found = (one.read()[0].values for one in (complete, watch))
    missing = set(whole) - set(found)
    assert 1 <= len(missing) <= 2 and set(found) < set(whole)


@pytest.mark.parametrize(
    ("visible", "expected"), [("1", ["GPU-1"]), ("GPU-0", ["GPU-0"]), ("", [])]
)
def test_only_gpus_of_this_process_are_read(visible: str, expected: list[str]) -> None:
    """CUDA_VISIBLE_DEVICES names them by number or by UUID."""
    _, watch = _watch(_FakeNvml(), visible=visible)
    assert [one.uuid for one in watch.read()] == expected


async def test_the_directory_entry_has_a_summary() -> None:
    """`forge status` shows it among the metadata."""
    context, watch = _watch(_FakeNvml())
    running = asyncio.create_task(watch.run())
    await asyncio.wait_for(context.announced.wait(), 30)
    running.cancel()
    assert context.metadata[METADATA_KEY].startswith("0 NVIDIA H100: 87 % busy, 40 of 80 GiB")


async def test_a_driver_that_fails_later_is_one_line() -> None:
    """The directory entry loses its summary. The service continues."""
    context, watch = _watch(_FakeNvml("nvmlDeviceGetCount"))
    context.metadata[METADATA_KEY] = "0 NVIDIA H100"
    with structlog.testing.capture_logs() as lines:
        running = asyncio.create_task(watch.run())
        await asyncio.wait_for(context.announced.wait(), 30)
    assert not running.done()
    running.cancel()
    assert METADATA_KEY not in context.metadata
    assert [one["event"] for one in lines] == ["gpus_not_read"]


@pytest.mark.parametrize("nvml", [None, _FakeNvml("nvmlInit")], ids=["no library", "no driver"])
def test_a_host_without_nvml_is_one_line(
    nvml: _FakeNvml | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither library nor driver is needed to serve."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    context = _Context()
    with structlog.testing.capture_logs() as lines:
        watch_gpus(context, device="cuda:0")  # type: ignore[arg-type]
    assert context.kept == []
    assert [one["event"] for one in lines] == ["gpus_not_watched"]


def test_a_process_without_a_gpu_watches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is read or logged."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    context = _Context()
    with structlog.testing.capture_logs() as lines:
        watch_gpus(context, device="cpu")  # type: ignore[arg-type]
    assert context.kept == [] and lines == []


def test_a_process_on_a_gpu_watches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch runs as a part of the process."""
    monkeypatch.setitem(sys.modules, "pynvml", _FakeNvml())
    context = _Context()
    watch_gpus(context, device="cuda")  # type: ignore[arg-type]
    assert context.kept == ["gpu-watch"]
