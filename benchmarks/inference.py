"""Speed of the embedded engine and of its service beside transformers and vLLM, on a CPU.

    python -m benchmarks.inference [--quick] [--json FILE] [--only WORKLOAD...] [--rounds N]

Each program is a process with one thread of torch and the same weights. In every round all run the
same prompts, one after the other; figures are medians over rounds of CPU seconds and of their
ratios. Sampling is at temperature 1; the engine and vLLM return log-probs.

    tiny      float32, 16 prompts of 512 tokens, answers of 64
    agent     float32, 8 groups of 8 members with one prompt of 512 each, 6 turns of 48 sampled and
              48 new tokens
    smollm2   bfloat16, the shape of SmolLM2-135M, 8 prompts of 256 tokens, answers of 64

    <workload>.over_<peer>      CPU seconds of the peer over those of the engine
    <workload>.<program>_s      CPU seconds
    <workload>.service_over_engine      CPU seconds of the bare engine over those of router and
                                worker; service_two has a prefill and a decode worker
    ttft_cached_speedup         CPU seconds until the first token of turns >= 2, without the prefix
                                cache over with it, in the engine; ttft_service_cached_speedup:
                                through the service

vLLM runs in `.venv-vllm` (`make engine-vllm`); without it its keys are absent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from benchmarks.support.inference.workloads import (
    WORKLOADS,
    Ask,
    Workload,
    by_model,
    time_to_first_token,
)
from benchmarks.support.processes import ended
from benchmarks.support.report import arguments, keep, show
from forge.runtime.process.child_processes import dying_with_parent

VLLM = Path(".venv-vllm/bin/python")
INSTALL = "vLLM is not installed, its keys are absent; `make engine-vllm` installs it"
PEERS = ("generate", "generate_batch", "vllm")
SERVICES = ("service", "service_two")


class Child:
    """One program; see `benchmarks.support.inference.child` for what it reads and writes."""

    def __init__(self, name: str, argv: Sequence[str], log: Path) -> None:
        self.name = name
        self.cpu_s = 0.0
        """CPU seconds of all requests so far."""
        self._log = log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                dying_with_parent(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def ready(self) -> bool:
        """Wait until it has started; False, with its last line of errors, if it has ended."""
        assert self.process.stdout is not None
        if self.process.stdout.readline():
            return True
        lines = self._log.read_text(errors="replace").strip().splitlines()
        sys.stderr.write(f"{self.name} does not run: {lines[-1] if lines else ''}\n")
        return False

    def ask(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Sample answers of this many tokens."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = json.dumps({"prompts": prompts, "tokens": tokens})
        self.process.stdin.write(request.encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(f"{self.name} has ended: {lines[-1] if lines else ''}")
        reply = json.loads(line)
        self.cpu_s += reply["cpu_s"]
        answers: list[list[int]] = reply["answers"]
        return answers

    def first_token_s(self, prompt: list[int]) -> float:
        """CPU seconds until the first token."""
        before_s = self.cpu_s
        self.ask([prompt], 1)
        return self.cpu_s - before_s


@contextmanager
def children(
    names: Sequence[str], model: Path, work: Workload, logs: Path
) -> Iterator[list[Child]]:
    """All programs that run, started at once."""
    with ExitStack() as undo:
        found = []
        for name in names:
            child = Child(name, _command(name, model, work), logs / f"{name}.log")
            undo.callback(ended, child.process)
            found.append(child)
        yield [child for child in found if child.ready()]


def _command(name: str, model: Path, work: Workload) -> list[str]:
    options = ["--model", str(model), "--dtype", work.dtype]
    if name == "vllm":
        script = str(Path(__file__).parent / "support" / "inference" / "vllm_peer.py")
        return [str(VLLM), script, *options, "--context", "2048"]
    kind, _, uncached = name.partition(":")
    argv = [sys.executable, "-m", "benchmarks.support.inference.child", kind, *options]
    return [*argv, "--cache-mib", "0"] if uncached else argv


def measure(
    names: Sequence[str], programs: Sequence[str], *, rounds: int, logs: Path
) -> dict[str, float]:
    """The figures of workloads of one model."""
    work = WORKLOADS[names[0]]
    model = work.save(logs / names[0])
    numbers: dict[str, float] = {}
    with children(programs, model, work, logs) as running:
        for name in names:
            seconds: dict[str, list[float]] = {child.name: [] for child in running}
            for number in range(rounds + 1):
                for child in running:
                    spent_s = _spent_s(child, WORKLOADS[name], seed=number)
                    # The first round compiles, allocates and learns.
                    if number:
                        seconds[child.name].append(spent_s)
            numbers |= _figures(name, seconds)
    return numbers


def _spent_s(child: Child, work: Workload, *, seed: int) -> float:
    before_s = child.cpu_s
    ask: Ask = child.ask
    work.run(ask, seed=seed)
    return child.cpu_s - before_s


def _figures(name: str, seconds: dict[str, list[float]]) -> dict[str, float]:
    engine = seconds["engine"]
    found = {f"{name}.{program}_s": median(spent) for program, spent in seconds.items()}
    found[f"{name}.tokens_per_cpu_s"] = WORKLOADS[name].sampled_tokens / median(engine)
    for program, spent in seconds.items():
        ratios = [other / own for other, own in zip(spent, engine, strict=True)]
        if program in PEERS:
            found[f"{name}.over_{program}"] = median(ratios)
        elif program in SERVICES:
            found[f"{name}.{program}_over_engine"] = median(1 / ratio for ratio in ratios)
    return found


def first_tokens(*, turns: int, logs: Path) -> dict[str, float]:
    """Time to the first token of later turns with and without the prefix cache."""
    work = WORKLOADS["tiny"]
    model = work.save(logs / "first_tokens")
    numbers: dict[str, float] = {}
    for kind, key in (("engine", "ttft"), ("service", "ttft_service")):
        with children((kind, f"{kind}:uncached"), model, work, logs) as running:
            spent = [
                time_to_first_token(
                    child.first_token_s, vocabulary=work.config.vocab_size, turns=turns, seed=seed
                )
                for seed, child in enumerate(running)
            ]
        cached_s, uncached_s = (median(each) for each in spent)
        numbers[f"{key}_cached_ms"] = cached_s * 1000
        numbers[f"{key}_uncached_ms"] = uncached_s * 1000
        numbers[f"{key}_cached_speedup"] = uncached_s / cached_s
    return numbers


def main() -> None:
    """Measure and print."""
    parser = arguments(
        __doc__ or "", quick="tiny alone, beside generate and the services; 3 rounds"
    )
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one more")
    parser.add_argument("--without", nargs="+", choices=(*PEERS, *SERVICES), default=[])
    options = parser.parse_args()
    names, rounds = options.only, options.rounds
    without = set(options.without)
    if options.quick:
        # vLLM takes minutes to start, generate_batch to run.
        names, rounds, without = ["tiny"], 3, {"generate_batch", "vllm"}
    elif not VLLM.exists():
        without.add("vllm")
        sys.stderr.write(INSTALL + "\n")
    programs = [one for one in ("engine", *SERVICES, *PEERS) if one not in without]
    began_s = time.monotonic()
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for each in by_model(names):
            numbers |= measure(each, programs, rounds=rounds, logs=Path(folder))
        numbers |= first_tokens(turns=6 if options.quick else 20, logs=Path(folder))
    show(f"inference, {rounds} rounds, {time.monotonic() - began_s:,.0f} s", numbers)
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
