"""What all clients share: one cluster to talk to, and the matrix that is printed in the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from forge.runtime.coordination import Coordinator, Instance
from tests.support.clients.matrix import Row
from tests.support.clients.programs import NODE_DIR, VENV
from tests.support.gateway.stack import GatewayStack
from tests.support.runtime.etcd import EtcdServer

CLUSTER = "clients"
CONTEXT_TOKENS = 1 << 17


@dataclass(slots=True, kw_only=True)
class MatrixRow:
    """What one test adds to the table."""

    row: Row
    version: str = "?"
    """Known once the client has said it."""


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    """The clients live in an environment of their own: what they pin is no business of Forge's."""
    needed = (VENV / "bin/python", VENV / "bin/node", NODE_DIR / "node_modules")
    missing = [str(path) for path in needed if not path.exists()]
    if missing:
        pytest.exit(f"{', '.join(missing)} missing: run `make test-clients`", returncode=2)


@pytest.fixture(scope="session")
def stack(
    shared_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayStack]:
    """A pool, an engine and one gateway that all clients talk to."""
    made = GatewayStack(
        folder=tmp_path_factory.mktemp("clients"),
        etcd=shared_etcd,
        cluster=CLUSTER,
        context_tokens=CONTEXT_TOKENS,
    )
    with made.running():
        yield made


@pytest_asyncio.fixture(scope="session")
async def clients_coordinator(shared_etcd: EtcdServer) -> AsyncIterator[Coordinator]:
    connected = await Coordinator.connect(shared_etcd.endpoint, cluster=CLUSTER)
    yield connected
    await connected.close()


@pytest_asyncio.fixture(scope="session")
async def gateway(stack: GatewayStack, clients_coordinator: Coordinator) -> Instance:
    return await stack.gateway(clients_coordinator)


@pytest.fixture
def matrix(record_property: Callable[[str, object], None]) -> Callable[..., MatrixRow]:
    """Adds a row to the table; its version may be told later."""

    def add(row: Row, *, version: str = "?") -> MatrixRow:
        added = MatrixRow(row=row, version=version)
        record_property("matrix", added)
        return added

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the matrix."""
    lines: list[tuple[str, ...]] = [("client", "version", "protocol", "stream", "tools", "result")]
    for outcome in ("passed", "failed", "xfailed", "xpassed"):
        for report in terminalreporter.getreports(outcome):
            rows = [row for name, row in report.user_properties if name == "matrix"]
            lines += [(*_cells(row), outcome) for row in rows]
    if len(lines) == 1:
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    terminalreporter.section("client matrix")
    for line in (lines[0], *sorted(lines[1:])):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        terminalreporter.write_line("  ".join(cells).rstrip())


def _cells(added: MatrixRow) -> tuple[str, ...]:
    row = added.row
    shown = ["yes" if one else "no" for one in (row.stream, row.tools)]
    return (row.client, added.version, row.protocol, *shown)
