"""The weight stream from a trainer to workers, on the loopback interface.

    python -m benchmarks.weights [--quick] [--json FILE] [--model tiny|smollm2|DIRECTORY]
                                 [--only full,egress,groups,ranks,swaps,publication,deltas,kept_kv]
                                 [--layout even|smollm2] [--ways bulk,bulk_tls,grpc,...]

`full_over_socket.WAY`: CPU seconds of both ends of a plain socket copy over those of a publication
of the same bytes to one worker, from digest to swap, over a bulk connection (`bulk_tls`: with TLS),
gRPC, a group of gloo, shared memory and a directory, and over those of a bare gRPC stream
(`bare_grpc`); all receive into new memory. Interleaved, medians.
`full_over_socket`: the best way. `bulk_tls_over_tls_socket`: the same ratio of `bulk_tls` to a copy
over a socket with TLS. `trainer_egress_over_one_worker`: bytes that leave the trainer for
8 workers over those for one. `groups.WAY_WORKERS`: seconds, CPU seconds of all ends and bytes from
the trainer, for a group of gloo and for bulk connections. `ranks.peak_mb.WAY`: largest growth of a
rank's memory in the first publication of 4 ranks, by `publish_from`;
`ranks.most_sent_over_weights.WAY`: most bytes that one of them sends to 8 workers over those of the
weights, `all_sent_over_weights`: all of them together.
`swap_pause_ms`: the longest gap between two tokens of a running answer around a swap, less the
median gap; `no_swap_pause_ms`: the same of the 40 tokens before it. `publish_to_sampled_p50_s`:
from the begin of a publication to the first token of its version at a client of the router.
`publication.share_beside`: share of a training step that waits for publication (`share_waited`: if
it waited for digests and announcement, too). `kept_kv.1e-06.kept_mean`: nats by which the log-prob
of a token differs behind keys and values of the weights one step before (`policies_mean`: by which
those weights differ themselves).
`delta_bytes_over_full`: bytes of a delta over those of all weights in bfloat16, median over real
steps of the model by AdamW at a learning rate of 1e-6 (`delta.1e-05.over_full` at 1e-5), beside the
share of changed elements, the largest delta and that of the last step.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from benchmarks.support.report import arguments, keep, show
from benchmarks.support.weights.groups import group_costs, publish_to, until_in_group
from benchmarks.support.weights.grpc_floor import receive_stream, serve_stream
from benchmarks.support.weights.socket_copy import receive_bytes, send_bytes
from benchmarks.support.weights.stream import Started, cpu_of, follow_weights, publish_weights
from forge.cli.local_run.models.models import ensure_model
from tests.support.runtime.etcd import Certificates, EtcdServer

WORKERS = 8
WAYS = ("bulk", "bulk_tls", "grpc", "group", "memory", "directory")
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
PARTS = ("full", "egress", "groups", "ranks", "swaps", "publication", "deltas", "kept_kv")
_TENSORS = 64
_FIRST_ROUNDS = 4
"""Not counted: they connect, the worker is not in discovery yet, and memory grows until it has the
versions that both ends keep."""


def even(mib: int) -> list[int]:
    """Return the elements of equal bfloat16 tensors."""
    return [(mib << 19) // _TENSORS] * _TENSORS


def smollm2() -> list[int]:
    """Return the elements of the 272 tensors of SmolLM2-135M, whose head is tied."""
    hidden, inner, kv, vocabulary = 576, 1536, 192, 49152
    attention = [hidden * hidden, hidden * kv, hidden * kv, hidden * hidden]
    layer = [*attention, *[hidden * inner] * 3, hidden, hidden]
    return [vocabulary * hidden, *layer * 30, hidden]


def full_over_socket(
    etcd: EtcdServer,
    folder: Path,
    *,
    elements: Sequence[int],
    rounds: int,
    ways: Sequence[str] = WAYS,
) -> dict[str, float]:
    """Return CPU seconds per GiB of both ends by way, of a bare gRPC stream and of sockets, and
    their ratios, for tensors of so many elements."""
    total_bytes = sum(elements) * 2
    ends = _started(etcd, folder, ways, total_bytes=total_bytes)

    def transfer(name: str) -> None:
        sender, receiver = ends[name]
        if name in ways:
            receiver.order("until", sender.order("publish"))
        elif name.endswith("socket"):
            sender.begin("send")
            receiver.order("receive")
            sender.answer()
        else:
            receiver.order("receive")

    costs_s: dict[str, list[float]] = {name: [] for name in ends}
    try:
        for number in range(rounds + _FIRST_ROUNDS):
            for name, (sender, receiver) in ends.items():
                if name in ways:
                    sender.order("make", elements)
                cost_s = cpu_of([sender, receiver], partial(transfer, name))
                costs_s[name] += [cost_s] if number >= _FIRST_ROUNDS else []
    finally:
        for way in ways:
            ends[way][0].order("end")
        for process in chain.from_iterable(ends.values()):
            process.end()
    gib = total_bytes / (1 << 30)
    per_gib = {name: statistics.median(found) / gib for name, found in costs_s.items()}
    numbers = {f"full.{name}_cpu_s_per_gib": cost_s for name, cost_s in per_gib.items()}
    ratios = {f"full_over_socket.{name}": per_gib["socket"] / per_gib[name] for name in per_gib}
    best = max(ratios[f"full_over_socket.{way}"] for way in ways)
    if "bulk_tls" in ways:
        ratios["bulk_tls_over_tls_socket"] = per_gib["tls_socket"] / per_gib["bulk_tls"]
    sizes = {"full.mib": gib * 1024, "full.tensors": float(len(elements))}
    return {**sizes, **numbers, **ratios, "full_over_socket": best}


def _started(
    etcd: EtcdServer, folder: Path, ways: Sequence[str], *, total_bytes: int
) -> dict[str, tuple[Started, Started]]:
    """Return sender and receiver of each way, of a bare gRPC stream and of sockets."""
    ends: dict[str, tuple[Started, Started]] = {}
    Certificates.issue(folder)
    for way in ways:
        directory = str(folder) if way in ("bulk_tls", "directory", "group") else ""
        publisher = Started(publish_weights, etcd.endpoint, way, way, directory)
        ends[way] = publisher, Started(follow_weights, etcd.endpoint, way, "w0", directory, way)
    sender = Started(serve_stream, total_bytes)
    ends["bare_grpc"] = sender, Started(receive_stream, sender.ready, total_bytes)
    for name, tls in (("socket", ""), ("tls_socket", str(folder))):
        sender = Started(send_bytes, total_bytes, tls)
        ends[name] = sender, Started(receive_bytes, sender.ready, total_bytes, tls)
    if "group" in ways:
        until_in_group(*ends["group"])
    return ends


def trainer_egress(etcd: EtcdServer, *, mib: int, rounds: int) -> dict[str, float]:
    """Return the bytes that leave the trainer for 8 workers over those for one worker."""
    sent: dict[int, float] = {}
    for count in (1, WORKERS):
        cluster = f"egress{count}"
        publisher = Started(publish_weights, etcd.endpoint, cluster)
        workers = [Started(follow_weights, etcd.endpoint, cluster, f"w{n}") for n in range(count)]
        try:
            publisher.order("make", even(mib))
            publish_to(publisher, workers)
            found = []
            for _ in range(rounds):
                publisher.order("make", even(mib))
                before = publisher.order("sent_bytes")
                publish_to(publisher, workers)
                found.append(publisher.order("sent_bytes") - before)
            sent[count] = statistics.median(found)
        finally:
            for process in (publisher, *workers):
                process.end()
    return {"trainer_egress_over_one_worker": sent[WORKERS] / sent[1]}


def deltas(path: Path, *, steps: int) -> dict[str, float]:
    """Return the size of deltas by learning rate."""
    from benchmarks.support.weights.deltas import delta_sizes

    numbers: dict[str, float] = {}
    for learning_rate in LEARNING_RATES:
        found = delta_sizes(path, learning_rate=learning_rate, steps=steps)
        numbers |= {f"delta.{learning_rate:g}.{name}": value for name, value in found.items()}
    return {"delta_bytes_over_full": numbers["delta.1e-06.over_full"], **numbers}


def kept_kv(path: Path) -> dict[str, float]:
    """Return what `kv.on_update = keep` costs, by learning rate."""
    from benchmarks.support.weights.kv_on_update import keep_gap

    numbers: dict[str, float] = {}
    for learning_rate in LEARNING_RATES:
        found = keep_gap(path, learning_rate=learning_rate, steps=1, batches=2)
        numbers |= {f"kept_kv.{learning_rate:g}.{name}": value for name, value in found.items()}
    return numbers


def streams(
    parts: Sequence[str], model: Path, *, quick: bool, layout: str, ways: Sequence[str]
) -> dict[str, float]:
    """Measure the parts that need etcd."""
    # The processes that this one spawns import this module, too, and need no torch.
    from benchmarks.support.weights.publication import publication_share
    from benchmarks.support.weights.ranks import rank_publication
    from benchmarks.support.weights.swaps import swaps

    mib, rounds = (64, 3) if quick else (256, 5)
    numbers: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        etcd = EtcdServer(folder / "etcd")
        etcd.start()
        try:
            if "full" in parts:
                elements = smollm2() if layout == "smollm2" else even(mib)
                numbers |= full_over_socket(
                    etcd, folder, elements=elements, rounds=rounds, ways=ways
                )
            if "egress" in parts:
                numbers |= trainer_egress(etcd, mib=min(mib, 64), rounds=3)
            if "groups" in parts:
                numbers |= group_costs(
                    etcd.endpoint,
                    folder,
                    elements=even(min(mib, 64)),
                    rounds=rounds,
                    most_workers=WORKERS,
                )
            if "ranks" in parts:
                hidden = 512 if quick else 1024
                numbers |= rank_publication(folder, etcd.endpoint, hidden=hidden, workers=WORKERS)
            if "swaps" in parts:
                numbers |= asyncio.run(swaps(folder, etcd, rounds=rounds))
            if "publication" in parts:
                share = publication_share(folder, etcd.endpoint, model, steps=3)
                numbers |= asyncio.run(share)
        finally:
            etcd.stop()
    return numbers


def main() -> None:
    """Measure and show."""
    parser = arguments(str(__doc__), quick="smaller weights, fewer rounds, the tiny model")
    parser.add_argument("--model", help="of publication and deltas: tiny, smollm2 or a directory")
    parser.add_argument("--root", type=Path, default=Path(".forge"), help="models are kept here")
    parser.add_argument("--only", default=",".join(PARTS), help="these parts, separated by commas")
    parser.add_argument(
        "--layout",
        choices=("even", "smollm2"),
        default="even",
        help="tensors of full: 64 of equal size, or the 272 of SmolLM2-135M",
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="of full, separated by commas")
    options = parser.parse_args()
    parts = options.only.split(",")
    if odd := set(parts) - set(PARTS):
        parser.error(f"--only: {sorted(odd)} are none of {PARTS}")
    path = Path()
    numbers: dict[str, float] = {}
    if {"publication", "deltas", "kept_kv"} & set(parts):
        model = options.model or ("tiny" if options.quick else "smollm2")
        path = asyncio.run(ensure_model(model, seed=0, root=options.root))
    if set(parts) - {"deltas", "kept_kv"}:
        ways = options.ways.split(",")
        if odd := set(ways) - set(WAYS):
            parser.error(f"--ways: {sorted(odd)} are none of {WAYS}")
        numbers |= streams(parts, path, quick=options.quick, layout=options.layout, ways=ways)
    if "deltas" in parts:
        numbers |= deltas(path, steps=5 if options.quick else 20)
    if "kept_kv" in parts:
        numbers |= kept_kv(path)
    show("Weight stream", numbers)
    keep(numbers, options.json)


if __name__ == "__main__":
    main()
