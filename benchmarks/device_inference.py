"""Speed of the embedded engine on a GPU beside transformers.

    python -m benchmarks.device_inference [--quick] [--json FILE] [--shape 0.6b|1.7b|moe|mamba2...]
        [--batch N...] [--rounds N] [--device cuda:0] [--only decode|drafts|swap...]

Random weights of a Qwen 3 in bfloat16; `moe` has the layers of Qwen3-30B-A3B, 8 of its 48, and the
engine records its experts; `mamba2` and `falcon_h1` are recurrent models of 130M and 500M. Prompts
of 512 random tokens that all arrive at once, answers of 128 tokens at temperature 1 that never
stop, no prompt twice. Seconds are of the clock. In every round all programs run, one after the
other:

    graphs          the engine in the role both: a decode step is one CUDA graph of fused layers
    unfused         a graph of the layers' own kernels
    eager           the same without graphs
    engine          in place of these three, for layers without graphs: recurrent ones
    generate        transformers, one call for all prompts, SDPA
    generate_batch  the continuous batching of transformers (with --peers)

    <program>.<batch>.first_ms          until all prompts have their first token
    <program>.<batch>.decode_tokens_s   the other tokens over the rest of the time
    <program>.<batch>.decode_min, .decode_max   that speed in the slowest and in the fastest round
    <program>.<batch>.tokens_s          all tokens over all time
    drafts.<batch>.<heads>.decode_tokens_s, .acceptance   with as many draft heads; the layers of
                    these weights change little, so that heads without layers foretell some tokens:
                    the speed depends on the acceptance, which is shown beside it
    drafts.<batch>.<heads>.gain, .gain_min, .gain_max   that speed over the one without drafts in
                    the same round: median, least and largest
    swap.stage_s, swap.pause_ms         new weights under 32 answers: until they serve, and the
                    longest pause between two steps meanwhile
    bytes.*         memory of the device
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from benchmarks.support.inference.device_programs import (
    SHAPES,
    Engine,
    Generate,
    generate,
    generate_batch,
)
from benchmarks.support.report import arguments, keep, show
from forge.core.named_tensor import NamedTensor
from forge.rl.mtp.heads import MtpHead, MtpHeads
from forge.runtime.actors.actor_system import ActorSystem
from services.inference.engines.embedded.decode_step import DecodeStep
from services.inference.engines.embedded.metrics import ACCEPTED, DRAFTED
from services.inference.engines.embedded.speculation.depth import DepthChooser
from services.inference.engines.tensor_bytes import to_named

PROMPT_TOKENS = 512
ANSWER_TOKENS = 128
HEADS = (1, 3)


class Bench:
    """Models and programs of one call."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.config = SHAPES[options.shape]
        self.config.save_pretrained(folder)
        self.folder = folder
        self.rng = Random(0)
        self.numbers: dict[str, float] = {}
        torch.manual_seed(0)
        with self.device:
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.bfloat16)
        self.model: Any = model.eval().requires_grad_(False)

    def note(self, key: str, value: float) -> None:
        """Keep a number, and say it: a run that is cut off has shown what it measured."""
        self.numbers[key] = value
        sys.stdout.write(f"{key} {value:.3f}\n")
        sys.stdout.flush()

    def weights(self) -> dict[str, NamedTensor]:
        """The model's, as a trainer publishes them."""
        tied = self.config.tie_word_embeddings
        return {
            name: to_named(name, one)
            for name, one in self.model.state_dict().items()
            if not (tied and name == "lm_head.weight")
        }

    def prompts(self, count: int) -> list[list[int]]:
        """Fresh ones."""
        size = self.config.vocab_size
        return [[self.rng.randrange(size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]

    async def seconds(self, run: Generate, batch: int, tokens: int) -> float:
        """The time of one call."""
        prompts = self.prompts(batch)
        self.synchronize()
        began_s = time.perf_counter()
        await run(prompts, tokens)
        self.synchronize()
        return time.perf_counter() - began_s

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def note_memory(self, name: str) -> None:
        """Allocated memory of the device."""
        if self.device.type == "cuda":
            self.note(f"bytes.{name}", torch.cuda.memory_allocated(self.device))

    def engine_options(self, kv_mib: int, **others: Any) -> dict[str, Any]:
        """Options of an engine that has nearly all of a device's memory."""
        kv_bytes = kv_mib << 20 if self.device.type == "cuda" else 1 << 30
        return {"device": self.options.device, "dtype": "bfloat16", "kv_bytes": kv_bytes} | others


async def decode(bench: Bench) -> None:
    """Engine and transformers at all batch sizes."""
    options = bench.options
    system = ActorSystem("benchmark")
    engine = await Engine.start(system, bench.folder, **bench.engine_options(28 << 10))
    await engine.served.load(bench.weights(), version=1)
    bench.note_memory("engine_and_model")
    programs = engine.programs() | {"generate": generate(bench.model)}
    if options.peers:
        programs["generate_batch"] = generate_batch(bench.model)
    for name in options.without:
        programs.pop(name, None)
    for batch in options.batch:
        first: dict[str, list[float]] = {name: [] for name in programs}
        whole: dict[str, list[float]] = {name: [] for name in programs}
        if batch > options.generate_up_to:
            programs.pop("generate", None)
        for name, run in [*programs.items()]:
            try:
                # Loads libraries, compiles kernels and captures graphs.
                await bench.seconds(run, batch, 3)
            except Exception as error:
                sys.stdout.write(f"{name} does not run: {type(error).__name__}: {error}\n")
                del programs[name]
        for number in range(options.rounds):
            for name, run in programs.items():
                if number and name in options.once:
                    continue
                first[name].append(await bench.seconds(run, batch, 1))
                whole[name].append(await bench.seconds(run, batch, ANSWER_TOKENS))
        for name in programs:
            rest_s = [all_s - one_s for one_s, all_s in zip(first[name], whole[name], strict=True)]
            tokens = batch * (ANSWER_TOKENS - 1)
            bench.note(f"{name}.{batch}.first_ms", median(first[name]) * 1e3)
            bench.note(f"{name}.{batch}.decode_tokens_s", tokens / median(rest_s))
            bench.note(f"{name}.{batch}.decode_min", tokens / max(rest_s))
            bench.note(f"{name}.{batch}.decode_max", tokens / min(rest_s))
            bench.note(f"{name}.{batch}.tokens_s", batch * ANSWER_TOKENS / median(whole[name]))
    await system.stop()


async def drafts(bench: Bench) -> None:
    """Answers with and without draft heads."""
    for name, weight in bench.model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data *= 0.015
    weights = bench.weights()
    # Each draws what a model without layers would: the layers change little.
    channels = bench.config.hidden_size
    heads = MtpHeads(max(HEADS), channels=channels, embedding_channels=channels)
    for head in heads:
        assert isinstance(head, MtpHead)
        zero, one = torch.zeros(channels, channels), torch.eye(channels)
        head.fuse.weight.data = torch.cat([zero, one], 1)
        head.down.weight.data.zero_()
    weights |= {name: to_named(name, one.bfloat16()) for name, one in heads.named_tensors().items()}
    system = ActorSystem("benchmark")
    chosen = bench.engine_options(4 << 10, draft_tokens=max(HEADS))
    engine = await Engine.start(system, bench.folder, **chosen)
    await engine.served.load(weights, version=1)
    for batch in (1, 8):
        speeds: dict[int, list[float]] = {count: [] for count in (0, *HEADS)}
        accepted = dict.fromkeys(HEADS, 0.0)
        drafted = dict.fromkeys(HEADS, 0.0)
        for count in speeds:
            with patch.object(DepthChooser, "choose", partial(_choice, count)):
                await bench.seconds(engine.graphs, batch, ANSWER_TOKENS)
        for _ in range(bench.options.rounds):
            for count, found in speeds.items():
                before = (_drafted(count), _accepted(count))
                with patch.object(DepthChooser, "choose", partial(_choice, count)):
                    first_s = await bench.seconds(engine.graphs, batch, 1)
                    whole_s = await bench.seconds(engine.graphs, batch, ANSWER_TOKENS)
                found.append(batch * (ANSWER_TOKENS - 1) / (whole_s - first_s))
                if count:
                    drafted[count] += _drafted(count) - before[0]
                    accepted[count] += _accepted(count) - before[1]
        for count, found in speeds.items():
            bench.note(f"drafts.{batch}.{count}.decode_tokens_s", median(found))
            if count:
                gains = [one / none for one, none in zip(found, speeds[0], strict=True)]
                bench.note(f"drafts.{batch}.{count}.gain", median(gains))
                bench.note(f"drafts.{batch}.{count}.gain_min", min(gains))
                bench.note(f"drafts.{batch}.{count}.gain_max", max(gains))
                bench.note(f"drafts.{batch}.{count}.acceptance", accepted[count] / drafted[count])
    await system.stop()


def _choice(count: int, sequences: int, *, most: int) -> int:
    """In place of `DepthChooser.choose`: always as many drafts."""
    return min(count, most)


def _drafted(heads: int) -> float:
    return float(sum(DRAFTED.labels(str(head + 1))._value.get() for head in range(heads)))


def _accepted(heads: int) -> float:
    return float(sum(ACCEPTED.labels(str(head + 1))._value.get() for head in range(heads)))


async def swap(bench: Bench) -> None:
    """Weights that change under load."""
    system = ActorSystem("benchmark")
    engine = await Engine.start(system, bench.folder, **bench.engine_options(8 << 10))
    weights = bench.weights()
    await engine.served.load(weights, version=1)
    bench.note_memory("served_and_model")
    await bench.seconds(engine.graphs, 32, 3)
    with _step_ends() as ends:
        answers = asyncio.create_task(engine.graphs(bench.prompts(32), 1024))
        while len(ends) < 30:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for version in (2, 3):
            staged_from_s = time.perf_counter()
            await engine.served.load(weights, version=version)
            loaded_s = time.perf_counter()
            await asyncio.sleep(0.2)
            gaps = [
                after - before
                for before, after in itertools.pairwise(ends)
                if before > staged_from_s - 0.1
            ]
            # The first staging allocates its memory on the host.
            bench.note(f"swap.{version}.stage_s", loaded_s - staged_from_s)
            bench.note(f"swap.{version}.pause_ms", (max(gaps) - median(gaps)) * 1e3)
            bench.note(f"swap.{version}.step_ms", median(gaps) * 1e3)
        answers.cancel()
        await asyncio.wait({answers})
    await system.stop()


@contextmanager
def _step_ends() -> Iterator[list[float]]:
    """The times when decode steps end."""
    ends: list[float] = []
    run = DecodeStep.run

    def timed(step: DecodeStep, sequences: Any) -> Any:
        try:
            return run(step, sequences)
        finally:
            ends.append(time.perf_counter())

    with patch.object(DecodeStep, "run", timed):
        yield ends


PARTS = {"decode": decode, "drafts": drafts, "swap": swap}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "", quick="batches 1 and 32, one round")
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one more")
    parser.add_argument("--once", nargs="+", default=[], help="programs of one measured round")
    parser.add_argument("--generate-up-to", type=int, default=1 << 30, help="its largest batch")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--without", nargs="+", default=[], help="programs to leave out")
    parser.add_argument("--peers", action="store_true", help="generate_batch, too")
    options = parser.parse_args(argv)
    if options.quick:
        options.batch, options.rounds = [1, 32], 1
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder))
        for name in options.only:
            asyncio.run(PARTS[name](bench))
            gc.collect()
            if bench.device.type == "cuda":
                torch.cuda.empty_cache()
    took_s = time.monotonic() - began_s
    show(f"device_inference {options.shape}, {took_s:,.0f} s", bench.numbers)
    keep(bench.numbers, options.json)


if __name__ == "__main__":
    main()
