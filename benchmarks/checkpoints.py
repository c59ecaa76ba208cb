"""Training steps beside the write of a checkpoint: by a process, and by a thread of the trainer.

    python -m benchmarks.checkpoints [--quick] [--json FILE] [--directory DIRECTORY]

The state is that of SmolLM2-135M: float32 weights, two moments, and the published weights in
bfloat16, 1.9 GB. `thread` is how earlier releases wrote it. The ways take turns. Of two kinds of
steps,

    compute    matrix products on all cores, as of a trainer without a GPU
    dispatch   many small operations of one thread, as of a trainer that feeds a GPU

`KIND.WAY.step_ratio` is the median time of a step during a write over that without one, and
`slow_ratio` that of the 95th percentile. `copy_s.WAY`: training waits for this copy to host memory.
`write_s`: from the copy until the files are durable, `cpu_s`: its CPU seconds, in all processes.
Medians of the rounds. `first_copy_s`: the copy of the first checkpoint by a process, later ones
reuse its memory; `start_s`: the start of the process; `process_mib`: its memory.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.support.report import arguments, keep, progress_bar, show
from benchmarks.weights import smollm2
from forge.runtime.files.sync import sync
from services.trainer.checkpoint.files import Contents, file_digest, raw_bytes
from services.trainer.checkpoint.shards import Shard
from services.trainer.checkpoint.shared_memory import SharedMemory, SpareMemory
from services.trainer.checkpoint.writer_process import WriterProcess
from services.trainer.model.host_copies import host_copy

ROUNDS = 5
_ALONE_S = 2.0
Step = Callable[[], object]
Write = Callable[[], object]


def state_of(elements: list[int]) -> dict[str, Tensor]:
    """Weights and moments, without equal pages."""
    names = ("master", "learner.first", "learner.second")
    return {
        f"{kind}.{number}": torch.randn(count)
        for kind in names
        for number, count in enumerate(elements)
    }


def copied_for_thread(state: Mapping[str, Tensor], directory: Path) -> Write:
    """Copy the state to host memory; return the write of earlier releases."""
    model, shards = _copied(state, host_copy)

    def write() -> None:
        save_file(model, directory / "model.safetensors", metadata={"format": "pt"})
        for _ in range(2):
            digest = hashlib.sha256()
            for one in model.values():
                digest.update(raw_bytes(one))
        save_file(shards, directory / "state.safetensors", metadata={"format": "pt"})
        for name in ("model.safetensors", "state.safetensors"):
            sync(directory / name)
        file_digest(directory / "state.safetensors")

    return write


def copied_for_process(
    state: Mapping[str, Tensor], directory: Path, *, writer: WriterProcess, spare: SpareMemory
) -> Write:
    """Copy the state to shared memory; return the write by a process."""
    memory = SharedMemory(spare)
    model, shards = _copied(state, partial(host_copy, empty=memory.empty))
    (directory / "state").mkdir()
    contents = Contents(
        model=model,
        shards=[Shard(name=name, offsets=(0,), data=one) for name, one in shards.items()],
        memory=memory,
        writer=writer,
    )
    return partial(contents.write_part, directory)


def _copied(
    state: Mapping[str, Tensor], copy: Callable[..., Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = {
        name: copy(one, torch.bfloat16) for name, one in state.items() if name.startswith("master")
    }
    return model, {name: copy(one) for name, one in state.items()}


def steps(kind: str) -> Step:
    """A step of about 20 ms."""
    matrix = torch.randn(1024, 1024)
    small = torch.zeros(8)

    def compute() -> None:
        for _ in range(4):
            torch.mm(matrix, matrix)

    def dispatch() -> None:
        for _ in range(8000):
            small.add_(1.0)

    return compute if kind == "compute" else dispatch


def times_until(step: Step, ended: Callable[[], bool]) -> list[float]:
    """Seconds of each step until `ended`."""
    times = []
    while not ended():
        began_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - began_s)
    return times


def _cpu_s() -> float:
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in tree)


def measured(copied: Callable[[Path], Write], step: Step, folder: Path) -> dict[str, float]:
    """The numbers of one checkpoint beside steps."""
    directory = Path(tempfile.mkdtemp(dir=folder))
    end_s = time.perf_counter() + _ALONE_S
    alone = times_until(step, lambda: time.perf_counter() > end_s)
    began_s = time.perf_counter()
    write = copied(directory)
    copy_s = time.perf_counter() - began_s
    thread = threading.Thread(target=write)
    began_s = time.perf_counter()
    thread.start()
    beside = times_until(step, lambda: not thread.is_alive())
    write_s = time.perf_counter() - began_s
    shutil.rmtree(directory)
    return {
        "step_ratio": statistics.median(beside) / statistics.median(alone),
        "slow_ratio": _slow(beside) / _slow(alone),
        "copy_s": copy_s,
        "write_s": write_s,
    }


def _slow(times: list[float]) -> float:
    return sorted(times)[int(0.95 * (len(times) - 1))]


def cpu_of(copied: Callable[[Path], Write], folder: Path) -> float:
    """CPU seconds of a write alone."""
    directory = Path(tempfile.mkdtemp(dir=folder))
    write = copied(directory)
    began_s = _cpu_s()
    write()
    cpu_s = _cpu_s() - began_s
    shutil.rmtree(directory)
    return cpu_s


def main() -> None:
    """Run, and show the numbers."""
    parser = arguments(__doc__ or "", quick="a small state, two rounds")
    parser.add_argument("--directory", type=Path, help="where to write; default: temporary files")
    args = parser.parse_args()
    elements = smollm2()[:20] if args.quick else smollm2()
    rounds = 2 if args.quick else ROUNDS
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=args.directory) as name, progress_bar() as bar:
        folder, writer = Path(name), WriterProcess()
        state = state_of(elements)
        ways = {
            "thread": partial(copied_for_thread, state),
            "process": partial(copied_for_process, state, writer=writer, spare=[]),
        }
        began_s = time.perf_counter()
        writer.write(folder, [], SharedMemory())
        numbers["start_s"] = time.perf_counter() - began_s
        found: dict[str, list[float]] = {}
        task = bar.add_task("checkpoints", total=rounds)
        for number in range(rounds):
            order = list(ways.items())[:: 1 if number % 2 else -1]
            for kind in ("compute", "dispatch"):
                for way, copied in order:
                    for what, value in measured(copied, steps(kind), folder).items():
                        prefix = f"{kind}.{way}." if what.endswith("ratio") else ""
                        suffix = "" if prefix else f".{way}"
                        found.setdefault(f"{prefix}{what}{suffix}", []).append(value)
            for way, copied in order:
                found.setdefault(f"cpu_s.{way}", []).append(cpu_of(copied, folder))
            bar.advance(task)
        numbers["process_mib"] = psutil.Process(writer.pid).memory_info().rss / 2**20
    numbers["first_copy_s"] = found["copy_s.process"][0]
    numbers |= {what: statistics.median(values) for what, values in sorted(found.items())}
    show("Checkpoints beside training", numbers)
    keep(numbers, args.json)


if __name__ == "__main__":
    main()
