"""Cost of the gateway: calls per CPU second, latency, growth with history, memory.

    python -m benchmarks.gateway [--quick] [--json FILE]

Everything stands on loopback before the same mock upstream, which answers 32 tokens in 4 pieces,
or 32, 256 or 2,048 tokens one by one every 10 ms, as an engine streams them, and is measured in
interleaved rounds; medians count. The gateway does its whole work: token, tree
of contexts, template, tokenizer, record in a real pool, stream. Peers come from `make bench-peers`
and are left out where they are not installed; `benchmarks/support/gateway/targets.py` says what
each of them does. Work is counted in CPU seconds of the process in front, since the machine is
shared with the load, the upstream and the pool.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.support.cpu import cpu_s, rss_bytes
from benchmarks.support.gateway.chat_load import QUESTION, Agent, Load, Target, drive, new_client
from benchmarks.support.gateway.mock_upstream import LENGTHS, max_tokens_for
from benchmarks.support.gateway.targets import Targets, answer_of, start_targets
from benchmarks.support.report import arguments, keep, show
from services.gateway.http.openai.completions import chat_schema
from services.gateway.http.request_fields import request_body

CONCURRENCY = 16
MIN_CALLS = 100
"""Fewest calls of a run, on a machine that has little time for it."""
TURNS = 6
"""Turns of a session in the runs that compare: agents are short with a proxy that forgets them."""
PIECES = 4
"""Pieces of an answer."""
PACED_MS = 100
"""Between pieces where latency is measured: an answer takes 0.4 s, and nobody is saturated."""
TOKEN_MS = 10
"""Between the tokens of an answer that is streamed token by token."""
LENGTH_TURNS = 2
LONG_TURNS = 128
EARLY, LATE = range(5, 13), range(121, 129)
LONG_TEXT = QUESTION * 15
"""A question of such a length that 128 turns make 69k tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Duration of the measurement."""

    rounds: int
    seconds: float
    paced_seconds: float
    lengths: tuple[int, ...]
    length_rounds: int
    long_sessions: int
    open_sessions: int


QUICK = Size(
    rounds=1,
    seconds=1.5,
    paced_seconds=2.5,
    lengths=(32, 256),
    length_rounds=1,
    long_sessions=2,
    open_sessions=1500,
)
FULL = Size(
    rounds=5,
    seconds=4.0,
    paced_seconds=8.0,
    lengths=LENGTHS,
    length_rounds=3,
    long_sessions=6,
    open_sessions=10_000,
)


async def measure(size: Size) -> dict[str, float]:
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as folder:
        async with start_targets(Path(folder)) as targets:
            numbers |= await compare(targets, size)
            numbers |= await latency(targets, size)
            numbers |= await by_length(targets, size)
            numbers |= await growth(targets, size)
            numbers |= await memory(targets, size)
    return numbers


async def compare(targets: Targets, size: Size) -> dict[str, float]:
    """Calls per CPU second, of the gateway over each peer."""
    per_cpu_s: dict[str, list[float]] = {name: [] for name in targets.all if name != "upstream"}
    pool_ms: list[float] = []
    for round_ in range(-1, size.rounds):
        for name in _rotated(list(per_cpu_s), round_):
            pool_before_s = cpu_s(targets.pool_pid)
            load = await _run(targets.all[name], targets.answer, size.seconds)
            pool_s = cpu_s(targets.pool_pid) - pool_before_s
            if round_ < 0:
                continue  # to warm up
            per_cpu_s[name].append(load.per_cpu_s)
            if name == "forge":
                pool_ms.append(1000 * pool_s / len(load.latencies_s))
    medians = {name: statistics.median(found) for name, found in per_cpu_s.items()}
    numbers = {f"{name}.calls_per_cpu_s": median for name, median in medians.items()}
    for name in medians:
        if name != "forge":
            ratios = [
                ours / peers
                for ours, peers in zip(per_cpu_s["forge"], per_cpu_s[name], strict=True)
            ]
            numbers[f"rps_over_{name}"] = statistics.median(ratios)
    numbers["forge.cpu_ms_per_call"] = 1000 / medians["forge"]
    numbers["pool.cpu_ms_per_call"] = statistics.median(pool_ms)
    return numbers


async def latency(targets: Targets, size: Size) -> dict[str, float]:
    """Time that the gateway adds to an answer, at 16 answers at once."""
    quantiles: dict[str, list[tuple[float, float]]] = {}
    for round_ in range(size.rounds):
        for name in _rotated(["upstream", "forge", "floor", "proxy"], round_):
            load = await _run(
                targets.all[name],
                targets.answer,
                size.paced_seconds,
                max_tokens=1000 + PACED_MS,
                begin_within_s=PIECES * PACED_MS / 1000,
            )
            cuts = statistics.quantiles(load.latencies_s, n=100)
            quantiles.setdefault(name, []).append((1000 * cuts[49], 1000 * cuts[98]))
    numbers = {}
    prefixes = {"forge": "", "floor": "floor.", "proxy": "proxy."}
    for name, prefix in prefixes.items():
        for at, quantile in enumerate(("p50", "p99")):
            added = [
                ours[at] - bare[at]
                for ours, bare in zip(quantiles[name], quantiles["upstream"], strict=True)
            ]
            numbers[f"{prefix}overhead_{quantile}_ms"] = statistics.median(added)
    return numbers


async def by_length(targets: Targets, size: Size) -> dict[str, float]:
    """Answers per CPU second over the proxy, and what is added to the time to the first token, by
    the length of answers that are streamed token by token."""
    numbers = {}
    for length in size.lengths:
        max_tokens = max_tokens_for(length, TOKEN_MS)
        answer = await answer_of(targets.all["upstream"], max_tokens=max_tokens)
        ratios, added_ms, cpu_ms = [], [], []
        for round_ in range(size.length_rounds):
            loads = {}
            for name in _rotated(["upstream", "forge", "proxy"], round_):
                loads[name] = await _run(
                    targets.all[name],
                    answer,
                    0.0,
                    max_tokens=max_tokens,
                    turns=LENGTH_TURNS,
                    at_least=2 * CONCURRENCY,
                    begin_within_s=TOKEN_MS * length / 1000,
                )
            ratios.append(loads["forge"].per_cpu_s / loads["proxy"].per_cpu_s)
            firsts_s = {name: statistics.median(load.firsts_s) for name, load in loads.items()}
            added_ms.append(1000 * (firsts_s["forge"] - firsts_s["upstream"]))
            cpu_ms.append(1000 / loads["forge"].per_cpu_s)
        numbers[f"rps_over_proxy_{length}"] = statistics.median(ratios)
        numbers[f"first_token_added_ms_{length}"] = statistics.median(added_ms)
        numbers[f"cpu_ms_per_answer_{length}"] = statistics.median(cpu_ms)
    return numbers


async def growth(targets: Targets, size: Size) -> dict[str, float]:
    """CPU of a late turn of a long session over that of an early one."""
    forge = targets.all["forge"]
    agents = [Agent(forge, targets.answer, question=LONG_TEXT) for _ in range(size.long_sessions)]
    spent_s = {"early": 0.0, "late": 0.0}
    parsing_s = {"early": 0.0, "late": 0.0}
    async with new_client() as client:
        for turn in range(1, LONG_TURNS + 1):
            phase = "early" if turn in EARLY else "late" if turn in LATE else ""
            before_s = cpu_s(forge.pid)
            for agent in agents:
                await agent.turn(client)
            if phase:
                spent_s[phase] += cpu_s(forge.pid) - before_s
                parsing_s[phase] += sum(_parse_s(agent.last_body) for agent in agents)
    calls = len(agents) * len(EARLY)
    net_s = {phase: spent_s[phase] - parsing_s[phase] for phase in spent_s}
    return {
        "turn128_over_turn8": net_s["late"] / net_s["early"],
        "turn128_over_turn8_with_json": spent_s["late"] / spent_s["early"],
        "turn8_cpu_ms": 1000 * spent_s["early"] / calls,
        "turn128_cpu_ms": 1000 * spent_s["late"] / calls,
        "turn128_json_ms": 1000 * parsing_s["late"] / calls,
    }


async def memory(targets: Targets, size: Size) -> dict[str, float]:
    """Resident memory of a hundred thousand sessions of one turn each."""
    forge = targets.all["forge"]
    questions = (f"{QUESTION} This is rollout {number}." for number in itertools.count())

    def sessions(count: int) -> Iterator[Agent]:
        for _ in range(count):
            yield Agent(forge, targets.answer, question=next(questions))

    async def open_sessions(count: int) -> int:
        await drive(sessions(count), turns=1, concurrency=CONCURRENCY)
        return rss_bytes(forge.pid)

    before = await open_sessions(size.open_sessions // 5)
    after = await open_sessions(size.open_sessions)
    per_session = (after - before) / size.open_sessions
    return {
        "mib_per_100k_sessions": per_session * 100_000 / (1 << 20),
        "kib_per_session": per_session / 1024,
    }


async def _run(
    target: Target,
    answer: str,
    for_s: float,
    *,
    max_tokens: int = 1000,
    turns: int = TURNS,
    at_least: int = MIN_CALLS,
    begin_within_s: float = 0.0,
) -> Load:
    agents = (Agent(target, answer, max_tokens=max_tokens) for _ in itertools.count())
    before_s = cpu_s(target.pid) if target.pid else 0.0
    load = await drive(
        agents,
        turns=turns,
        concurrency=CONCURRENCY,
        for_s=for_s,
        at_least=at_least,
        begin_within_s=begin_within_s,
    )
    load.cpu_s = cpu_s(target.pid) - before_s if target.pid else 0.0
    return load


def _parse_s(body: bytes) -> float:
    """CPU seconds of the JSON parsing that the gateway does itself."""
    started_s = time.thread_time()
    request_body.decode(body, chat_schema.ChatCompletionRequest)
    return time.thread_time() - started_s


def _rotated(names: list[str], by: int) -> list[str]:
    """Each round begins with another, so that a trend of the machine favors none."""
    at = by % len(names)
    return names[at:] + names[:at]


def main() -> None:
    options = arguments(__doc__, quick="shorter runs, fewer rounds").parse_args()
    size = QUICK if options.quick else FULL
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        numbers = runner.run(measure(size))
    show("Gateway", numbers)
    missing = [name for name in ("litellm", "sglang_router") if f"rps_over_{name}" not in numbers]
    if missing:
        sys.stdout.write(f"not installed: {', '.join(missing)} (make bench-peers)\n")
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
