"""`make audit` says so where no advisories can be asked."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.suite import audit


@contextmanager
def serving(status: int, answer: object) -> Iterator[str]:
    """A package index that answers each question so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *words: object) -> None:
            """Prints nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/pypi/pip/24.0/json"
        server.shutdown()


@pytest.mark.parametrize(("status", "answer"), [(404, {}), (200, {"info": {}}), (200, [])])
def test_index_without_advisories_is_one_line(
    status: int, answer: object, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mirror of packages, for example."""
    with serving(status, answer) as source:
        assert audit.main([], source=source) == 2
    said = capsys.readouterr().err
    assert said.startswith("make audit: nothing was audited: ") and said.count("\n") == 1
    assert source in said


def test_index_with_advisories_is_asked() -> None:
    """Also if that version has none."""
    with serving(200, {"info": {}, "vulnerabilities": []}) as source:
        assert audit.unreachable(source) == ""
