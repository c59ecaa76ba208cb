"""The benchmark of the weight stream runs: its processes stand in for trainer and worker."""

from __future__ import annotations

from pathlib import Path

from benchmarks.weights import WAYS, even, full_over_socket
from tests.support.runtime.etcd import EtcdServer


def test_benchmark_publishes_by_every_way(own_etcd: EtcdServer, tmp_path: Path) -> None:
    """TCP, shared memory, a directory and gRPC, beside a bare gRPC stream and sockets."""
    found = full_over_socket(own_etcd, tmp_path, elements=even(1), rounds=1)
    ways = {*WAYS, "bare_grpc", "socket", "tls_socket"}
    assert {key for key in found if "over_socket." in key} == {
        f"full_over_socket.{way}" for way in ways
    }
