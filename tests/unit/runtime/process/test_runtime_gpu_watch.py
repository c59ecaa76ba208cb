"""NVML gives the state of GPUs. Its failures do not stop the service."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from prometheus_client import REGISTRY

from forge.runtime.process import gpu_watch
from forge.runtime.process.gpu_watch import METADATA_KEY, GpuWatch, visible_gpus, watch_gpus
from tests.support.runtime.waiting import until


class _NvmlError(Exception):
    """What the library raises."""


class _FakeNvml:
    """Two GPUs of one host; functions in `broken` raise, for all GPUs or with the name of one."""

    NVMLError = _NvmlError
    NVML_NVLINK_MAX_LINKS = 36
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *broken: str) -> None:
        self.broken = set(broken)
        self.readings = 0
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
            self.readings += name == "nvmlDeviceGetCount"
            if {name, f"{name} {given[0] if given else ''}"} & self.broken:
                raise _NvmlError(f"{name} failed")
            if name == "nvmlDeviceGetHandleByUUID":
                return {"MIG-7": "part of 1"}[given[0]]
            if name == "nvmlDeviceGetDeviceHandleFromMigDeviceHandle":
                return int(given[0].removeprefix("part of "))
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


def _watch(
    nvml: _FakeNvml, *, variable: str | None = None, device: str = "cuda"
) -> tuple[_Context, GpuWatch]:
    context = _Context()
    visible = visible_gpus(variable, device)
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
    ("variable", "device", "expected"),
    [
        ("1", "cuda", ["GPU-1"]),
        ("GPU-0", "cuda", ["GPU-0"]),
        ("", "cuda", []),
        ("0, 1", "cuda", ["GPU-0", "GPU-1"]),
        ("1,-1,0", "cuda", ["GPU-1"]),
        ("MIG-7", "cuda", ["GPU-1"]),
        (None, "cuda", ["GPU-0", "GPU-1"]),
        (None, "cuda:1", ["GPU-1"]),
        (None, "cuda:0", ["GPU-0"]),
        ("1,0", "cuda:1", ["GPU-0"]),
        ("0,1", "cuda:0", ["GPU-0", "GPU-1"]),
        ("0", "cuda:1", []),
    ],
)
def test_only_gpus_of_this_process_are_read(
    variable: str | None, device: str, expected: list[str]
) -> None:
    """CUDA_VISIBLE_DEVICES names them by number, UUID or part, and the device counts among these;
    several belong to one process with `cuda` or `cuda:0`."""
    _, watch = _watch(_FakeNvml(), variable=variable, device=device)
    assert [one.uuid for one in watch.read()] == expected


def test_part_of_a_gpu_that_is_gone_is_not_read() -> None:
    """The GPU of an unknown part is unknown."""
    _, watch = _watch(_FakeNvml("nvmlDeviceGetHandleByUUID"), variable="MIG-7")
    assert watch.read() == []


def test_values_that_cannot_be_read_any_more_leave_the_metrics() -> None:
    """An old value would look like a busy GPU: of one function, of one GPU, of the driver."""
    nvml = _FakeNvml()
    _, watch = _watch(nvml)
    watch.read()
    nvml.broken = {"nvmlDeviceGetUtilizationRates"}
    watch.read()
    assert _metric("DCGM_FI_DEV_GPU_UTIL", 0) is None
    assert _metric("DCGM_FI_DEV_POWER_USAGE", 0) == 412.5
    nvml.broken = {"nvmlDeviceGetHandleByIndex 0"}
    watch.read()
    assert _metric("DCGM_FI_DEV_POWER_USAGE", 0) is None
    assert _metric("DCGM_FI_DEV_POWER_USAGE", 1) == 412.5
    nvml.broken = {"nvmlDeviceGetCount"}
    with pytest.raises(_NvmlError):
        watch.read()
    assert _metric("DCGM_FI_DEV_POWER_USAGE", 1) is None
    nvml.broken = set()
    watch.read()
    assert _metric("DCGM_FI_DEV_GPU_UTIL", 0) == 87


def test_lost_gpu_keeps_its_name_and_its_place() -> None:
    """The others are read, and the directory entry says which one is lost."""
    nvml = _FakeNvml()
    _, watch = _watch(nvml, variable="GPU-0,GPU-1")
    watch.read()
    nvml.broken = {"nvmlDeviceGetHandleByIndex 0"}
    lost, other = watch.read()
    assert lost.summary() == "0 NVIDIA H100: not readable (nvmlDeviceGetHandleByIndex failed)"
    assert (lost.uuid, lost.values, other.error) == ("GPU-0", {}, "")
    assert other.values["DCGM_FI_DEV_GPU_UTIL"] == 87


async def test_the_directory_entry_has_a_summary() -> None:
    """`forge status` shows it among the metadata."""
    context, watch = _watch(_FakeNvml())
    running = asyncio.create_task(watch.run())
    await asyncio.wait_for(context.announced.wait(), 30)
    running.cancel()
    assert context.metadata[METADATA_KEY].startswith("0 NVIDIA H100: 87 % busy, 40 of 80 GiB")


async def test_lost_gpu_is_one_line_and_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed at once, and the other GPUs are still watched."""
    monkeypatch.setattr(gpu_watch, "PERIOD_S", 0.001)
    nvml = _FakeNvml()
    context, watch = _watch(nvml)
    with structlog.testing.capture_logs() as lines:
        running = asyncio.create_task(watch.run())
        await until(lambda: METADATA_KEY in context.metadata)
        nvml.broken = {"nvmlDeviceGetHandleByIndex 0"}
        await until(lambda: "not readable" in context.metadata[METADATA_KEY])
        readings = nvml.readings
        await until(lambda: nvml.readings > readings + 3)
        running.cancel()
    assert "1 NVIDIA H100: 87 % busy" in context.metadata[METADATA_KEY]
    assert [(one["event"], one["gpu"]) for one in lines] == [("gpu_not_read", 0)]


async def test_a_driver_that_fails_later_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory entry loses its summary until the driver answers again. The service
    continues."""
    monkeypatch.setattr(gpu_watch, "PERIOD_S", 0.001)
    nvml = _FakeNvml()
    context, watch = _watch(nvml)
    with structlog.testing.capture_logs() as lines:
        running = asyncio.create_task(watch.run())
        await until(lambda: METADATA_KEY in context.metadata)
        nvml.broken = {"nvmlDeviceGetCount"}
        await until(lambda: METADATA_KEY not in context.metadata)
        readings = nvml.readings
        await until(lambda: nvml.readings > readings + 3)
        nvml.broken = set()
        await until(lambda: METADATA_KEY in context.metadata)
        assert not running.done()
        running.cancel()
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
