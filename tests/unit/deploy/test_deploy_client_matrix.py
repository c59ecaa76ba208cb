"""docs/clients.md says what the tests in tests/clients show."""

from __future__ import annotations

from tests.clients import (
    test_clients_agents,
    test_clients_conversations,
    test_clients_cpp_grpc,
    test_clients_node_grpc,
)
from tests.support.clients.matrix import documented, table_of


def test_the_table_of_clients_is_what_the_tests_show() -> None:
    """Each client and protocol: whether whole, streamed and with tools, nothing more or less."""
    agents = test_clients_agents
    rows = [
        *(client.row for client in test_clients_conversations.CLIENTS),
        *map(agents.in_path_row, agents.IN_PATH),
        agents.MINI,
        agents.TEAM,
        test_clients_node_grpc.ROW,
        test_clients_cpp_grpc.ROW,
    ]
    assert documented() == table_of(rows)
