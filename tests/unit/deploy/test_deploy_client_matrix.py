"""docs/clients.md says what the tests in tests/clients show."""

from __future__ import annotations

from tests.clients import (
    test_clients_agents,
    test_clients_coding_agents,
    test_clients_conversations,
    test_clients_cpp_grpc,
    test_clients_node_grpc,
)
from tests.support.clients.matrix import documented, table_of


def test_client_table_in_the_docs_matches_the_tests() -> None:
    """For each client and protocol: whole, streamed and with tools."""
    agents = test_clients_agents
    rows = [
        *(client.row for client in test_clients_conversations.CLIENTS),
        *map(agents.in_path_row, agents.IN_PATH),
        *(agent.row for agent in test_clients_coding_agents.AGENTS),
        agents.MINI,
        agents.TEAM,
        test_clients_node_grpc.ROW,
        test_clients_cpp_grpc.ROW,
    ]
    assert documented() == table_of(rows)
