"""/metrics over a real socket, under the rule of the other listeners."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import ExitStack
from http.client import HTTPSConnection
from urllib.request import urlopen

import pytest

from forge.core.errors import ConfigError
from forge.runtime.process.metrics_listener import MOST_CONNECTIONS, serve_metrics
from forge.runtime.security.tls import Tls
from tests.support.runtime.etcd import Certificates

TIMEOUT_S = 30
PLAIN = Tls(cert="", key="", ca="")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.issue(tmp_path_factory.mktemp("tls"))


def mutual(certificates: Certificates) -> Tls:
    return Tls(cert=certificates.cert, key=certificates.key, ca=certificates.ca)


def read(port: int, context: ssl.SSLContext) -> str:
    connection = HTTPSConnection("127.0.0.1", port, context=context, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def client(certificates: Certificates, *, named: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=certificates.ca)
    if named:
        context.load_cert_chain(certificates.cert, certificates.key)
    return context


def test_plain_metrics_beyond_loopback_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        serve_metrics("0.0.0.0", 0, PLAIN)


def test_plain_metrics_beyond_loopback_are_served_where_insecure_is_set() -> None:
    port = serve_metrics("0.0.0.0", 0, Tls(cert="", key="", ca="", insecure=True))
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
        assert b"process_start_time_seconds" in answer.read()


def test_metrics_over_tls_need_a_client_certificate(certificates: Certificates) -> None:
    port = serve_metrics("127.0.0.1", 0, mutual(certificates))
    assert "process_start_time_seconds" in read(port, client(certificates, named=True))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        read(port, client(certificates, named=False))


def test_silent_client_delays_no_other(certificates: Certificates) -> None:
    """It never begins its handshake."""
    port = serve_metrics("127.0.0.1", 0, mutual(certificates))
    with socket.create_connection(("127.0.0.1", port)):
        assert "process_start_time_seconds" in read(port, client(certificates, named=True))


@pytest.mark.parametrize("secure", [False, True])
def test_silent_clients_take_a_bounded_number_of_threads(
    certificates: Certificates, secure: bool
) -> None:
    """The oldest connection ends for each one more, and a scraper gets its answer."""
    port = serve_metrics("127.0.0.1", 0, mutual(certificates) if secure else PLAIN)
    before = threading.active_count()
    with ExitStack() as undo:
        silent = [
            undo.enter_context(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))
            for _ in range(2 * MOST_CONNECTIONS)
        ]
        # An answer follows the acceptance of all connections before.
        if secure:
            assert "process_start_time_seconds" in read(port, client(certificates, named=True))
        else:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
                assert b"process_start_time_seconds" in answer.read()
        assert threading.active_count() - before <= MOST_CONNECTIONS
        assert silent[0].recv(1) == b""


def test_occupied_port_is_one_line_with_the_setting() -> None:
    port = serve_metrics("127.0.0.1", 0, PLAIN)
    with pytest.raises(ConfigError, match=f"metrics_port = {port}: .*cannot be bound"):
        serve_metrics("127.0.0.1", port, PLAIN)
