"""Ports chosen for processes that are to listen on them later."""

from __future__ import annotations

import socket

import pytest

from forge.runtime.process import ports
from forge.runtime.process.ports import free_ports


def test_chosen_ports_are_outside_the_ephemeral_range() -> None:
    """Connections and listeners on any free port use none of them."""
    assert all(1_024 < port < 32_768 for port in free_ports(100))


def test_ports_of_one_choice_are_different_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if few are left."""
    with socket.socket() as other:
        first, second, taken = free_ports(3)
        other.bind(("127.0.0.1", taken))
        monkeypatch.setattr(ports, "_RANGE", [first, second, taken])
        assert sorted(free_ports(2)) == sorted([first, second])
