"""The tables of RPCs on the pages of services, compared with the services."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from forge.v1 import pool_pb2, scheduler_pb2, trainer_pb2
from services.pool.service import SCOPES as POOL
from services.scheduler.service import SCOPES as SCHEDULER
from services.trainer.service import SCOPES as TRAINER

PAGES = Path(__file__).parents[3] / "docs" / "services"


def documented(page: str) -> dict[str, str]:
    """The scope of each RPC in the tables with a column of that name."""
    scopes: dict[str, str] = {}
    column: int | None = None
    for line in (PAGES / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            column = None
        elif "scope" in (names := [cell.lower() for cell in cells]):
            column = names.index("scope")
        elif column is not None:
            scopes |= dict.fromkeys(re.findall(r"\b[A-Z]\w+[a-z]\b", cells[0]), cells[column])
    return scopes


@pytest.mark.parametrize(
    ("page", "service", "scopes"),
    [
        ("pool.md", pool_pb2.DESCRIPTOR.services_by_name["PoolService"], POOL),
        ("scheduler.md", scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"], SCHEDULER),
        ("trainer.md", trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"], TRAINER),
    ],
)
def test_page_has_the_scope_of_every_rpc(
    page: str, service: ServiceDescriptor, scopes: Mapping[str, str]
) -> None:
    """An RPC without an entry in SCOPES needs the scope service."""
    expected = {name: scopes.get(name, "service") for name in service.methods_by_name}
    found = {name: one for name, one in documented(page).items() if name in expected}
    assert found == expected
